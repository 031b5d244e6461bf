"""Copies of blocks beside the computing: each kind on a stream of its own, ordered by events and by nothing else.

A copy waits for the work that was submitted to the compute stream before it. Work that touches a block, of the pool or
of the swap tier, waits for the copy in flight that touched it last; that copy waited for the one before it, so one
number for each block is enough. While nothing is in flight nothing is looked at.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from kvservice.devices.base import Array, Int32

if TYPE_CHECKING:
    from kvservice import _cuda


class Tier:
    """Blocks at an address, each with the number of the copy that touched it last."""

    def __init__(self, pointer: int, num_blocks: int) -> None:
        self.pointer = pointer
        self.num_blocks = num_blocks
        self.last_copy = np.zeros(num_blocks, np.int64)


class Copies:
    """Copies between two tiers, and within the first. Called by one thread at a time."""

    def __init__(
        self, cuda: ModuleType, device: int, compute: _cuda.Stream, pool: Tier, swap: Tier, block_bytes: int
    ) -> None:
        self._cuda = cuda
        self._device = device
        self._compute = compute
        self.pool = pool
        self.swap = swap
        self._block_bytes = block_bytes
        self._within, self._out, self._in = (cuda.Stream(device) for _ in range(3))
        self._computed = cuda.Event(device)
        self._spare: list[_cuda.Event] = []
        # By number, the oldest first.
        self._flying: dict[int, tuple[_cuda.Event, _cuda.Stream]] = {}
        self._newest = 0

    def within_pool(self, src_ids: Int32, dst_ids: Int32) -> None:
        self._copy(self._within, self.pool, self.pool, src_ids, dst_ids)

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        self._copy(self._out, self.pool, self.swap, src_ids, dst_ids)

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        self._copy(self._in, self.swap, self.pool, src_ids, dst_ids)

    def _copy(self, stream: _cuda.Stream, source: Tier, target: Tier, src_ids: Int32, dst_ids: Int32) -> None:
        self._wait_for_compute(stream)
        for tier, ids in ((source, src_ids), (target, dst_ids)):
            self.wait_for_copies(stream, tier, ids)
        self._cuda.copy_blocks(
            source.pointer,
            target.pointer,
            source.num_blocks,
            target.num_blocks,
            self._block_bytes,
            src_ids,
            dst_ids,
            stream.handle,
        )
        event = self._spare.pop() if self._spare else self._cuda.Event(self._device)
        event.record(stream.handle)
        self._newest += 1
        self._flying[self._newest] = (event, stream)
        source.last_copy[src_ids] = self._newest
        target.last_copy[dst_ids] = self._newest

    def _wait_for_compute(self, stream: _cuda.Stream) -> None:
        self._computed.record(self._compute.handle)
        stream.wait(self._computed)

    def wait_for_copies(self, stream: _cuda.Stream, tier: Tier, blocks: Array) -> None:
        """Let a stream go on only after the copies that touch any of the blocks."""
        for event, other in self.in_flight(tier, blocks):
            if other is not stream:
                stream.wait(event)

    def in_flight(self, tier: Tier, blocks: Array) -> list[tuple[_cuda.Event, _cuda.Stream]]:
        """The last copies that touch any of the blocks, as far as they are not done."""
        self._forget_done()
        if not self._flying:
            return []
        numbers = tier.last_copy[blocks]
        numbers = numbers[numbers >= next(iter(self._flying))]
        return [self._flying[number] for number in np.unique(numbers).tolist() if number in self._flying]

    def _forget_done(self) -> None:
        busy: set[int] = set()
        for number, (event, stream) in list(self._flying.items()):
            if stream.handle in busy:
                continue
            if event.done():
                del self._flying[number]
                self._spare.append(event)
            else:
                busy.add(stream.handle)

    def synchronize(self) -> None:
        for stream in (self._within, self._out, self._in):
            stream.synchronize()
