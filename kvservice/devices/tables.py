"""Lengths, block tables and slots of a step on the device. They are uploaded once for all layers."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable

import numpy as np

from kvservice.blocks import StepPlan
from kvservice.devices.arena import offsets_of
from kvservice.devices.base import Array, Int32


def common_blocks(block_tables: Int32, most: int) -> int:
    """Return how many of the first `most` blocks are common to all of several tables. It reads few more entries than
    these."""
    start, width = 0, 1
    while len(block_tables) > 1 and start < most:
        end = min(start + width, most)
        same = (block_tables[1:, start:end] == block_tables[0, start:end]).all(axis=0)
        if not same.all():
            return start + int(same.argmin())
        start, width = end, 2 * width
    return start


class DeviceStepTables:
    """Addresses of a step's tables on the device, and the host's information about them."""

    def __init__(self, step: StepPlan, allocate: Callable[[int], int]) -> None:
        self.host_block_tables = step.block_tables  # gathered now, because they are valid only while the step is live
        self.written_blocks = step.slot_mapping // step.block_size
        self.num_seqs, self.max_blocks = self.host_block_tables.shape
        self.num_tokens = len(step.slot_mapping)
        self.max_query_len = int(step.query_lens.max())
        query_lens, context_lens = step.query_lens.astype(np.int64), step.context_lens.astype(np.int64)
        self.num_context_tokens = int(context_lens.sum())
        self.num_scores = int((query_lens * context_lens).sum())
        num_before = int((context_lens - query_lens).min()) // step.block_size
        self.num_common_blocks = common_blocks(self.host_block_tables, num_before)
        parts: list[Array] = [step.slot_mapping, step.query_lens, step.context_lens, self.host_block_tables]
        *offsets, self.num_bytes = offsets_of(parts)
        # Tables that are not uploaded yet, as (offset, array). The list is empty after the upload.
        self.pending = list(zip(offsets, parts, strict=True))
        self.pointer = allocate(self.num_bytes)
        addresses = (self.pointer + offset for offset, _ in self.pending)
        self.slots, self.query_lens, self.context_lens, self.block_tables = addresses

    @property
    def num_pending_bytes(self) -> int:
        return self.num_bytes if self.pending else 0


class LiveTables:
    """Tables of all steps that still exist. The memory of the others is freed in stream order."""

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._tables: weakref.WeakKeyDictionary[StepPlan, DeviceStepTables] = weakref.WeakKeyDictionary()
        # A step may be collected on any thread. The next launch frees its memory, after all calls that use it.
        self.garbage: collections.deque[int] = collections.deque()

    def of(self, step: StepPlan) -> DeviceStepTables:
        tables = self._tables.get(step)
        if tables is None:
            tables = self._tables[step] = DeviceStepTables(step, self._allocate)
            weakref.finalize(step, self.garbage.append, tables.pointer).atexit = False
        return tables
