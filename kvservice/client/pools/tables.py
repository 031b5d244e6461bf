"""The tables of steps, which the daemon writes, as `kvservice.ops` takes them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvservice.client.values import StepInfo
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, StaleStepError
from kvservice.wire.tensors import Array

ALIGNMENT = 64
NUM_SLOTS = 1024


class OneStep(NamedTuple):
    """The tables of one token of each sequence, as `kvservice.ops` takes them: slot_mapping int64[n], query_lens
    int32[n], all 1, context_lens int32[n], block_tables int32[n, max_blocks]."""

    slot_mapping: Array
    query_lens: Array
    context_lens: Array
    block_tables: Array


class MappedStep:
    """A step's lengths, block tables and slot mapping as `kvservice.ops` takes them: slot_mapping int64[num_tokens],
    query_lens and context_lens int32[num_seqs], block_tables int32[num_seqs, max_blocks].

    They are views of the daemon's memory. They are valid as long as `check` does not raise: call it before they are
    used, and again when the operation that used them is done. Those of a step ahead are copies, because it is in use
    while it is committed, and the daemon's memory then has other tables.
    """

    def __init__(self, tables: mmap.mmap, step: StepInfo, block_size: int, check_process: Callable[[], None]) -> None:
        """`check_process` raises an error unless the process of the daemon that writes the tables is there. Raises
        FailedPreconditionError if the step is not in the tables, and StaleStepError if it is over."""
        if step.mapped is None:
            raise FailedPreconditionError(
                f"step {step.step_id} is not in the tables: they were full, or not mapped yet"
            )
        slot, begin = step.mapped
        self.step_id, self._ahead = step.step_id, step.ahead
        self._check_process = check_process
        self.written: set[int] = set()  # layers that the session's transport has written here
        self.max_query_len = int(step.query_lens.max())
        self._word: Array = np.frombuffer(tables, np.int64, 1, 8 * slot)
        self._run_word: Array = np.frombuffer(tables, np.int64, 1, 8 * (NUM_SLOTS + slot))
        self._run = int(self._run_word[0])
        num_seqs = len(step.query_lens)
        max_blocks = -(-int(step.context_lens.max()) // block_size)
        parts: tuple[tuple[tuple[int, ...], type], ...] = (
            ((step.num_tokens,), np.int64),
            ((num_seqs,), np.int32),
            ((num_seqs,), np.int32),
            ((num_seqs, max_blocks), np.int32),
        )
        offsets, end = [], 0
        for shape, dtype in parts:
            offsets.append(end)
            end += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.bytes: Array = np.frombuffer(tables, np.uint8, end, begin)
        if step.ahead:
            self.bytes = self.bytes.copy()
        # The arrays with their byte offsets from the start of `bytes`.
        self.arrays_and_offsets: list[tuple[Array, int]] = [
            (np.ndarray(shape, dtype, self.bytes, offset), offset)
            for (shape, dtype), offset in zip(parts, offsets, strict=True)
        ]
        arrays = (array for array, _ in self.arrays_and_offsets)
        self.slot_mapping, self.query_lens, self.context_lens, self.block_tables = arrays
        if self._word[0] != self.step_id:  # a step that follows does not count here: it has other tables
            raise self._over()

    def ahead(self, number: int) -> OneStep:
        """Return the tables for token `number`, from 0, of each sequence in a step ahead. Raises InvalidArgumentError,
        and FailedPreconditionError for other steps."""
        if not self._ahead:
            raise FailedPreconditionError(f"step {self.step_id} is not ahead", field="step_id")
        num_steps = self.max_query_len
        if not 0 <= number < num_steps:
            raise InvalidArgumentError(f"{number} is not from 0 to {num_steps - 1}", field="number")
        slots = np.ascontiguousarray(self.slot_mapping.reshape(-1, num_steps)[:, number])
        context_lens = self.context_lens - np.int32(num_steps - 1 - number)
        return OneStep(slots, np.ones_like(context_lens), context_lens, self.block_tables)

    def check(self) -> None:
        """Raise StaleStepError if the step is over, since its blocks may have been reallocated; after a restart of the
        daemon, too. A step ahead is not over while one that follows it is live. Raise ConnectionLostError if the
        connection is broken, since the daemon may have ended."""
        word = self._word[0]  # before the run, because the daemon writes the run first
        if word != self.step_id and (word == 0 or self._run_word[0] != self._run):
            raise self._over()
        self._check_process()

    def _over(self) -> StaleStepError:
        return StaleStepError(
            f"step {self.step_id} ended with a newer operation on one of its sequences, or with the mapping",
            field="step_id",
        )
