"""Block manager of the KV pool. It plans all operations and never touches the bytes of the pool.

Every operation takes a session namespace and a batch. It validates everything before it changes anything, and either
performs the whole batch or raises one of kvservice.errors. If a `can_...` method says yes, the operation does not fail.
"""

from __future__ import annotations

from collections.abc import MutableSequence
from typing import Final

import numpy as np

from kvservice.blocks.inspection import InspectionOps
from kvservice.blocks.integrity import check_in_slices, check_integrity
from kvservice.blocks.layers import LayerOps
from kvservice.blocks.pins import PinOps
from kvservice.blocks.sequences import NUM_COUNTERS, SequenceSpace
from kvservice.blocks.sharing import SharingOps
from kvservice.blocks.slices import SLICE_BLOCKS, Slices, finish
from kvservice.blocks.steps import StepOps
from kvservice.blocks.swapping import SwapOps

# Steps that one slice ends.
_SLICE_STEPS: Final = 1024


class BlockManager(StepOps, LayerOps, SharingOps, SwapOps, PinOps, InspectionOps):
    """Allocator, block tables, prefix index and swap tier of one pool (vLLM's block manager, adapted to a service).

    The mixins implement the operations: allocate in allocation.py, append and open_step in steps.py, layers of a step
    in layers.py, fork, truncate and free in sharing.py, swap in swapping.py, pins in pins.py.
    """

    def open_space(self, number: int = 1, counters: MutableSequence[int] | None = None) -> SequenceSpace:
        """Open a namespace for one client's sequences, steps and pins. `number`, above 0, identifies the namespace in
        sequence states. `counters` has three elements, see SequenceSpace."""
        space = SequenceSpace(number, [0] * NUM_COUNTERS if counters is None else counters)
        self.spaces.add(space)
        return space

    def close_space(self, space: SequenceSpace) -> int:
        """`close_space_in_slices` without a pause."""
        return finish(self.close_space_in_slices(space))

    def close_space_in_slices(self, space: SequenceSpace) -> Slices[int]:
        """Free all sequences of a namespace and remove its pins. The namespace is closed after the first slice. Returns
        the number of sequences freed, which is 0 if it was already closed."""
        if space.closed:
            return 0
        space.closed = True
        self.generation += 1
        self.spaces.remove(space)
        rows = np.array(list(space.rows.values()), np.int64)
        self.sequences.ending.update(rows.tolist())
        yield from self._end_steps(space)
        yield from self._end_pins(space)
        if len(rows):
            yield from self._end_rows(rows)
        return len(rows)

    def _end_steps(self, space: SequenceSpace) -> Slices[None]:
        step_ids = list(space.steps)
        for first in range(0, len(step_ids), _SLICE_STEPS):
            if first:
                yield
            space.supersede(step_ids[first : first + _SLICE_STEPS])

    def _end_pins(self, space: SequenceSpace) -> Slices[None]:
        left = SLICE_BLOCKS
        while space.pins:
            if left <= 0:
                yield
                left = SLICE_BLOCKS
            left -= self._end_pin(space, next(iter(space.pins)))

    def check_integrity(self) -> None:
        """Recompute every invariant from scratch, in O(pool). Raises InternalError naming the one that is violated."""
        check_integrity(self)

    def check_integrity_in_slices(self) -> Slices[bool]:
        """Check integrity in slices; other operations may run in between. See integrity.check_in_slices."""
        return check_in_slices(self)
