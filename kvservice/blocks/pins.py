"""Pins: cached prefixes that are kept until the pin expires.

A pin is not a reference to a block (ref_count counts tables only). It keeps the block in the prefix index and from
eviction; a sequence that writes into a pinned block gets a copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, MutableMapping

import numpy as np

from kvservice.blocks.block_pool import ONE, CachingBlockPool
from kvservice.blocks.kept import pack_pin, pin_key, split_pin_key, unpack_pin
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.slices import SLICE_BLOCKS


class PinTable:
    """The pins of all namespaces.

    `counts` int32[num_blocks] is the number of pins of each block, and `num_pinned` the number of blocks with at least
    one. `deadlines` is a heap of (time in seconds of the clock, id of the namespace, pin id, namespace). A pin that was
    removed may still be in it.
    """

    def __init__(self, device: CachingBlockPool, clock: Callable[[], float], kept: MutableMapping[int, bytes]) -> None:
        self.counts = np.zeros(device.num_blocks, np.int32)
        self.num_pinned = 0
        self.num_pins = 0
        self.deadlines: list[tuple[float, int, int, SessionNamespace]] = []
        self._device, self._clock, self._kept = device, clock, kept

    def add(self, namespace: SessionNamespace, blocks: Int64Array, ttl_s: float) -> int:
        """Pin these distinct indexed blocks. Returns the id of the pin."""
        pin_id, deadline = namespace.next_pin_id(), self._clock() + ttl_s
        self._kept[pin_key(namespace.number, pin_id)] = pack_pin(deadline, blocks)
        self._add(namespace, pin_id, blocks, deadline)
        return pin_id

    def _add(self, namespace: SessionNamespace, pin_id: int, blocks: Int64Array, deadline: float) -> None:
        fresh = blocks[~self._device.pinned[blocks]]
        self._device.pin(fresh)
        self.counts[blocks] += ONE
        self.num_pinned += len(fresh)
        self.num_pins += 1
        namespace.pins[pin_id] = blocks
        heapq.heappush(self.deadlines, (deadline, id(namespace), pin_id, namespace))

    def remove(self, namespace: SessionNamespace, pin_id: int) -> int:
        """Remove a pin. Returns the number of blocks that it pinned."""
        blocks = namespace.pins.pop(pin_id)
        del self._kept[pin_key(namespace.number, pin_id)]
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

    def recover(self, namespaces: Mapping[int, SessionNamespace], max_pinned: int) -> None:
        """Pin what the pins of an earlier process pinned, for namespaces by number. A pin ends here if its namespace is
        closed, if one of its blocks left the prefix index, or if more than `max_pinned` blocks would be pinned."""
        for key, data in list(self._kept.items()):
            number, pin_id = split_pin_key(key)
            deadline, blocks = unpack_pin(data)
            num_new = int(np.count_nonzero(~self._device.pinned[blocks]))
            fits = self.num_pinned + num_new <= max_pinned and self.num_pins < max_pinned
            if number in namespaces and fits and self._device.indexed[blocks].all():
                self._add(namespaces[number], pin_id, blocks, deadline)
            else:
                del self._kept[key]

    def forget_removed(self) -> None:
        """Drop the deadlines of removed pins when they are the most, so that the heap stays small."""
        if len(self.deadlines) > 2 * self.num_pins + 64:
            self.deadlines = [entry for entry in self.deadlines if entry[2] in entry[3].pins]
            heapq.heapify(self.deadlines)
