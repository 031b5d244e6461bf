"""Pins: cached prefixes that are kept until the pin expires.

A pin is not a reference to a block (ref_count counts tables only). It keeps the block in the prefix index and from
eviction; a sequence that writes into a pinned block gets a copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from kvservice.blocks.block_pool import ONE, CachingBlockPool
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.slices import SLICE_BLOCKS


class PinTable:
    """The pins of all namespaces.

    `counts` int32[num_blocks] is the number of pins of each block, and `num_pinned` the number of blocks with at least
    one. `deadlines` is a heap of (time in seconds of the clock, id of the namespace, pin id, namespace). A pin that was
    removed may still be in it.
    """

    def __init__(self, device: CachingBlockPool, clock: Callable[[], float]) -> None:
        self.counts = np.zeros(device.num_blocks, np.int32)
        self.num_pinned = 0
        self.num_pins = 0
        self.deadlines: list[tuple[float, int, int, SessionNamespace]] = []
        self._device, self._clock = device, clock

    def add(self, namespace: SessionNamespace, blocks: Int64Array, ttl_s: float) -> int:
        """Pin these distinct indexed blocks. Returns the id of the pin."""
        fresh = blocks[~self._device.pinned[blocks]]
        self._device.pin(fresh)
        self.counts[blocks] += ONE
        self.num_pinned += len(fresh)
        self.num_pins += 1
        namespace.last_pin_id += 1
        pin_id = namespace.last_pin_id
        namespace.pins[pin_id] = blocks
        heapq.heappush(self.deadlines, (self._clock() + ttl_s, id(namespace), pin_id, namespace))
        return pin_id

    def remove(self, namespace: SessionNamespace, pin_id: int) -> int:
        """Remove a pin. Returns the number of blocks that it pinned."""
        blocks = namespace.pins.pop(pin_id)
        self.counts[blocks] -= ONE
        ended = blocks[self.counts[blocks] == 0]
        self.num_pinned -= len(ended)
        self._device.unpin(ended[::-1])
        self.num_pins -= 1
        return len(blocks)

    def expire(self) -> bool:
        """Remove expired pins, at most one slice of them; later calls remove the rest. Returns whether it removed
        any."""
        now, left = self._clock(), SLICE_BLOCKS
        while left > 0 and self.deadlines and self.deadlines[0][0] <= now:
            _, _, pin_id, namespace = heapq.heappop(self.deadlines)
            if pin_id in namespace.pins:
                left -= self.remove(namespace, pin_id)
        return left < SLICE_BLOCKS

    def forget_removed(self) -> None:
        """Drop the deadlines of removed pins when they are the most, so that the heap stays small."""
        if len(self.deadlines) > 2 * self.num_pins + 64:
            self.deadlines = [entry for entry in self.deadlines if entry[2] in entry[3].pins]
            heapq.heapify(self.deadlines)
