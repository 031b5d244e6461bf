"""The block manager: all bookkeeping of the KV pool, without a byte of it.

Every operation takes a space first, takes a batch, checks everything before it changes anything, and either does all
of the batch or raises one of kvservice.errors. When a `can_...` says yes, the operation does not fail.
"""

from __future__ import annotations

from collections.abc import MutableSequence

from kvservice.blocks.inspection import InspectionOps
from kvservice.blocks.integrity import check_integrity
from kvservice.blocks.layers import LayerOps
from kvservice.blocks.pins import PinOps
from kvservice.blocks.sequences import NUM_COUNTERS, SequenceSpace
from kvservice.blocks.sharing import SharingOps
from kvservice.blocks.steps import StepOps
from kvservice.blocks.swapping import SwapOps


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
        """Frees all sequences of a space and ends its pins; the space is of no use after. Returns how many sequences
        were freed; closing it again frees none."""
        if space.closed:
            return 0
        num_sequences = len(space)
        if num_sequences:
            self._free_rows(space, *space.lookup(space.sequence_ids()))
        for pin_id in list(space.pins):
            self._end_pin(space, pin_id)
        space.supersede(list(space.steps))
        space.closed = True
        self.spaces.remove(space)
        return num_sequences

    def check_integrity(self) -> None:
        """Recomputes every invariant from scratch; O(pool). Raises InternalError naming the one that is broken."""
        check_integrity(self)
