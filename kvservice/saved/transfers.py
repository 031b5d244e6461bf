"""Blocks between the pools of a device and a file, in pieces of several blocks, some of which are in progress at once.

save:   device ──save_blocks──▶ piece ──thread──▶ file          load:   file ──thread──▶ piece ──load_blocks──▶ device
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.devices import Device
from kvservice.devices.base import PoolName, UInt64
from kvservice.saved.errors import DamagedFileError
from kvservice.saved.file_io import DirectFile, aligned_memory
from kvservice.saved.format import SECTOR_BYTES, rounded_up

# The size of a piece, unless a block is larger, and how many pieces are in progress.
PIECE_BYTES: Final = 8 << 20
NUM_PIECES: Final = 4


@dataclass(frozen=True, eq=False)
class FilePlaces:
    """Blocks, each with its place in the file, int64[n] in ascending order, and in a pool: block_ids int64[n] of the
    swap tier where in_swap bool[n] is true."""

    slots: Int64Array
    block_ids: Int64Array
    in_swap: BoolArray


@dataclass(frozen=True, eq=False)
class Piece:
    """Part of the blocks of FilePlaces. They are in one pool."""

    part: slice
    slots: Int64Array
    block_ids: Int64Array
    pool: PoolName

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (first place in the piece, first slot, number of blocks) of each contiguous range of slots."""
        ends = [*(np.flatnonzero(np.diff(self.slots) != 1) + 1).tolist(), len(self.slots)]
        first = 0
        for end in ends:
            yield first, int(self.slots[first]), end - first
            first = end


class BlockTransfers:
    """Copies blocks between a device and files. All methods are for the event loop."""

    def __init__(self, device: Device, block_bytes: int) -> None:
        self.stride = rounded_up(block_bytes)
        self._device = device
        self._piece_blocks = max(1, PIECE_BYTES // self.stride)
        self._threads = ThreadPoolExecutor(NUM_PIECES, thread_name_prefix="saved")

    def run(self, call: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        """Run a function that blocks in a thread."""
        return asyncio.get_running_loop().run_in_executor(self._threads, call, *args)

    async def save(self, file: DirectFile, places: FilePlaces, check: Callable[[], None]) -> UInt64:
        """Write blocks into a file. Returns their checksums uint64[n]. `check` raises an error if others may use the
        blocks by now. Must not be cancelled. Raises OSError."""
        checksums = np.zeros(len(places.slots), np.uint64)

        async def save(piece: Piece, memory: memoryview, addresses: UInt64) -> None:
            check()
            blocks = piece.block_ids.astype(np.int32)
            checksums[piece.part] = await self._device.save_blocks(blocks, addresses, piece.pool)
            check()
            for first, slot, count in piece.ranges():
                data = memory[first * self.stride : (first + count) * self.stride]
                await self.run(file.write, data, self.offset(slot))

        await self._in_pieces(places, save)
        return checksums

    async def load(self, file: DirectFile, places: FilePlaces, checksums: UInt64) -> None:
        """Read blocks, of which nobody else uses one, and compare their checksums uint64[n]. Must not be cancelled.
        Raises DamagedFileError and OSError."""

        async def load(piece: Piece, memory: memoryview, addresses: UInt64) -> None:
            for first, slot, count in piece.ranges():
                data = memory[first * self.stride : (first + count) * self.stride]
                await self.run(file.read, data, self.offset(slot))
            blocks, expected = piece.block_ids.astype(np.int32), checksums[piece.part]
            right = await self._device.load_blocks(addresses, blocks, expected, piece.pool)
            if not right.all():
                raise DamagedFileError(f"block {piece.slots[int(right.argmin())]} has another checksum")

        await self._in_pieces(places, load)

    def offset(self, slot: int) -> int:
        """Return the offset of a block in a file. The block after the last one is where the manifest begins."""
        return SECTOR_BYTES + slot * self.stride

    async def _in_pieces(
        self, places: FilePlaces, work: Callable[[Piece, memoryview, UInt64], Coroutine[Any, Any, None]]
    ) -> None:
        """Run `work` for each piece, for NUM_PIECES at a time. If one fails, it waits for those in progress."""
        free: list[tuple[memoryview, UInt64]] = []
        running: deque[tuple[asyncio.Task[None], tuple[memoryview, UInt64]]] = deque()
        try:
            for piece in self._pieces(places):
                if len(running) == NUM_PIECES:
                    task, memory = running.popleft()
                    await task
                    free.append(memory)
                memory = free.pop() if free else self._memory()
                count = len(piece.slots)
                task = asyncio.create_task(work(piece, memory[0], memory[1][:count]))
                running.append((task, memory))
            while running:
                await running.popleft()[0]
        finally:
            await asyncio.gather(*(task for task, _ in running), return_exceptions=True)

    def _memory(self) -> tuple[memoryview, UInt64]:
        """Return memory for a piece, and the addresses of the blocks in it."""
        memory = memoryview(aligned_memory(self._piece_blocks * self.stride))
        first = np.frombuffer(memory, np.uint8).ctypes.data
        addresses = np.uint64(first) + np.arange(self._piece_blocks, dtype=np.uint64) * np.uint64(self.stride)
        return memory, addresses

    def _pieces(self, places: FilePlaces) -> Iterator[Piece]:
        switches = (np.flatnonzero(np.diff(places.in_swap)) + 1).tolist()
        for begin, end in zip([0, *switches], [*switches, len(places.slots)], strict=True):
            for first in range(begin, end, self._piece_blocks):
                part = slice(first, min(first + self._piece_blocks, end))
                pool: PoolName = "swap" if places.in_swap[first] else "pool"
                yield Piece(part, places.slots[part], places.block_ids[part], pool)

    def close(self) -> None:
        """End the threads after their work."""
        self._threads.shutdown(wait=True)
