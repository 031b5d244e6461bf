"""Step tables: the live steps of a session in shared memory, for a client that works in the mapped pool.

    int64[NUM_SLOTS]     word `slot` is the id of the step while it is live, else 0
    int64[NUM_SLOTS]     word `slot` is the id of the first step of its run
    then, at the offset of each step, with every array aligned to ALIGNMENT bytes:
    slot_mapping int64[num_tokens], query_lens int32[n], context_lens int32[n], block_tables int32[n][max_blocks]

The client checks the word before and after its work on a step. If the step ended in between, its blocks may already
belong to other sequences, so the result is invalid. Step ids are never reused, so comparing the word is sufficient.

The steps ahead that follow one another by commits are a run, and have one slot. While any of them is live, the slots
of those before it are still those of their sequences. So a client with an answer on its way need not wait for it to
know that its work is good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvservice.blocks import StepPlan
from kvservice.pool.sealed import SealedMemory

NUM_SLOTS = 1024
ALIGNMENT = 64
TABLE_BYTES = 16 << 20
NOT_LIVE = 0


class Run(NamedTuple):
    """Steps ahead that follow one another: their slot, and the id of the first."""

    slot: int
    first_id: int


class SharedStepTables:
    """The step tables of one session. The daemon writes them, and the client maps them read-only."""

    def __init__(self, memory: SealedMemory) -> None:
        """`memory` must be read-only for clients."""
        self.memory = memory
        self._words, self._runs = np.frombuffer(self.memory.map, np.int64, 2 * NUM_SLOTS).reshape(2, NUM_SLOTS)
        # Live steps: id → (slot, first byte, end byte).
        self._extents: dict[int, tuple[int, int, int]] = {}
        self._free_slots = list(range(NUM_SLOTS - 1, -1, -1))
        # The step that `following` keeps, and whether it has ended.
        self._kept: int | None = None
        self._kept_ended = False

    @contextlib.contextmanager
    def following(self, step_id: int) -> Iterator[Run | None]:
        """A context in which a step ahead is committed, and the one that follows it is opened and published. Yields its
        run, or None if the step is not in the tables. Until the next one is there, clients see this one."""
        extent = self._extents.get(step_id)
        if extent is None:
            yield None
            return
        self._kept, self._kept_ended = step_id, False
        try:
            yield Run(extent[0], int(self._runs[extent[0]]))
        finally:
            self._release_kept()

    def _release_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None and self._kept_ended:
            self.retire(kept)

    def publish(self, step: StepPlan, run: Run | None = None) -> tuple[int, int] | None:
        """Publish a live step. Returns its (slot, offset in bytes), or None if there is no room for it. `run` is what
        `following` has yielded."""
        if (known := self._extents.get(step.step_id)) is not None:
            return known[:2]
        parts = (step.slot_mapping, step.query_lens, step.context_lens, step.block_tables)
        num_bytes = sum(_aligned(part.nbytes) for part in parts)
        begin = self._find_room(num_bytes)
        if begin is None and run is not None:
            self._release_kept()
            begin, run = self._find_room(num_bytes), None
        if begin is None or (run is None and not self._free_slots):
            return None
        at = begin
        for part in parts:
            self._put(at, part)
            at += _aligned(part.nbytes)
        slot, first_id = run or Run(self._free_slots.pop(), step.step_id)
        self._extents[step.step_id] = (slot, begin, at)
        self._runs[slot] = first_id  # before the word: who sees the step sees its run
        self._words[slot] = step.step_id
        return slot, begin

    def __contains__(self, step_id: int) -> bool:
        return step_id in self._extents

    def retire(self, step_id: int) -> None:
        """Remove a step that is no longer live. Unknown ids are ignored."""
        if step_id == self._kept:
            self._kept_ended = True
            return
        extent = self._extents.pop(step_id, None)
        if extent is not None and self._words[extent[0]] == step_id:  # else the slot is that of one that follows
            self._words[extent[0]] = NOT_LIVE
            self._free_slots.append(extent[0])

    def close(self) -> None:
        """Remove all steps."""
        for step_id in list(self._extents):
            self.retire(step_id)

    def _find_room(self, num_bytes: int) -> int | None:
        """Return the offset of the first gap that is large enough, or None. A linear search is sufficient, because few
        steps are live at a time."""
        begin = self._words.nbytes + self._runs.nbytes
        for _, first, end in sorted(self._extents.values(), key=lambda extent: extent[1]):
            if first - begin >= num_bytes:
                return begin
            begin = end
        return begin if self.memory.num_bytes - begin >= num_bytes else None

    def _put(self, offset: int, part: np.ndarray[Any, Any]) -> None:
        np.ndarray(part.shape, part.dtype, self.memory.map, offset)[...] = part


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
