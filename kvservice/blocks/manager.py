"""The block manager: all bookkeeping of the KV pool, without a byte of it.

Every operation takes a space first, takes a batch, checks everything before it changes anything, and either does all
of the batch or raises one of kvservice.errors. When a `can_...` says yes, the operation does not fail.
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

# Steps that are ended in one slice.
_SLICE_STEPS: Final = 1024


class BlockManager(StepOps, LayerOps, SharingOps, SwapOps, PinOps, InspectionOps):
    """Allocator, block tables, prefix index and swap tier of one pool (vLLM's block manager, as a service needs it).

    The operations stand in the files of their mixins: allocate in allocation.py, append and open_step in steps.py,
    layers of a step in layers.py, fork, truncate and free in sharing.py, swap in swapping.py, pins in pins.py.
    """

    def open_space(self, number: int = 1, counters: MutableSequence[int] | None = None) -> SequenceSpace:
        """Names for one client's sequences, steps and pins. `number`, above 0, says in `meta` whose a row is;
        `counters` has three elements to count in, see SequenceSpace."""
        space = SequenceSpace(number, [0] * NUM_COUNTERS if counters is None else counters)
        self.spaces.add(space)
        return space

    def close_space(self, space: SequenceSpace) -> int:
        """`close_space_in_slices` without a pause."""
        return finish(self.close_space_in_slices(space))

    def close_space_in_slices(self, space: SequenceSpace) -> Slices[int]:
        """Frees all sequences of a space and ends its pins; the space is of no use after the first slice. Returns how
        many sequences were freed; closing it again frees none."""
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
        """Recomputes every invariant from scratch; O(pool). Raises InternalError naming the one that is broken."""
        check_integrity(self)

    def check_integrity_in_slices(self) -> Slices[bool]:
        """The same, with operations in between; see check_in_slices."""
        return check_in_slices(self)
