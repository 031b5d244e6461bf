"""Copies of blocks between the memory of the store and requests, responses or regions.

They run natively, in threads and without the interpreter lock; short ones on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np

from kvservice import _ext
from kvservice.errors import RegionShrunkError, ResourceExhaustedError
from kvservice.server.memory.region import Array, Places, Region
from kvservice.server.memory.remote import RemoteMemory

T = TypeVar("T")

# Copies of at most so many bytes run on the event loop: a thread would take longer to start.
SHORT_BYTES: Final = 256 << 10
# The size of the buffer for a region whose memory is not mapped, unless one block is larger.
BUFFER_BYTES: Final = 8 << 20


class StoreCopies:
    """Copies at the addresses of one store. At most `num_threads` run at once, others wait in order; a copy has all
    threads if no other one runs."""

    def __init__(self, memory: int, num_threads: int) -> None:
        self._memory, self._num_threads = memory, num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kvservice-store")
        self._num_running = 0

    async def checksums(self, offsets: bytes, block_bytes: int) -> bytes:
        """Return the checksums of blocks in the store."""

        def compute(num_threads: int) -> bytes:
            return _ext.store_checksums(self._memory, offsets, block_bytes, num_threads)

        return await self._run(len(offsets) // 8 * block_bytes, compute)

    async def write(self, offsets: bytes, block_bytes: int, source: Array, places: Places) -> bytes:
        """Copy blocks from `source`, uint8, into the store. Returns their checksums."""

        def copy(num_threads: int) -> bytes:
            return self._copy_in(offsets, block_bytes, source, places, num_threads)

        return await self._run(len(offsets) // 8 * block_bytes, copy)

    async def read(self, offsets: bytes, block_bytes: int, target: Array, places: Places, checksums: bytes) -> bytes:
        """Copy blocks of the store into `target`, uint8. Returns a bitmap of those with the expected checksum, or of
        all if `checksums` is empty."""

        def copy(num_threads: int) -> bytes:
            return self._copy_out(offsets, block_bytes, target, places, checksums, num_threads)

        return await self._run(len(offsets) // 8 * block_bytes, copy)

    async def write_from(self, offsets: bytes, block_bytes: int, region: Region, places: Places) -> bytes:
        """`write` from a region. Raises RegionShrunkError, TransferFailedError."""
        if isinstance(memory := region.memory, RemoteMemory):
            return b"".join(
                await memory.run(lambda: memory.pull(places, block_bytes, self._take(offsets, block_bytes)))
            )
        view = region.memory.view(0, region.byte_size)
        if view is not None:
            return await self.write(offsets, block_bytes, view, places)

        def copy(num_threads: int) -> bytes:
            checksums = []
            for first, part in _parts(places, block_bytes):
                rows = np.concatenate([_read(region, int(at), int(n)) for at, n in part.ranges()])
                some = offsets[8 * first : 8 * (first + len(part))]
                inside = Places.packed(len(part), block_bytes)
                checksums.append(self._copy_in(some, block_bytes, rows, inside, num_threads))
            return b"".join(checksums)

        return await self._run(len(offsets) // 8 * block_bytes, copy)

    async def read_into(
        self, offsets: bytes, block_bytes: int, region: Region, places: Places, checksums: bytes
    ) -> bytes:
        """`read` into a region. Raises RegionShrunkError, ResourceExhaustedError, TransferFailedError."""
        if isinstance(memory := region.memory, RemoteMemory):
            give = self._give(offsets, block_bytes, checksums)
            flags = await memory.run(lambda: memory.push(places, block_bytes, give))
            return np.packbits(np.concatenate([np.zeros(0, np.uint8), *flags]), bitorder="little").tobytes()
        view = region.memory.view(0, region.byte_size)
        if view is not None:
            return await self.read(offsets, block_bytes, view, places, checksums)

        def copy(num_threads: int) -> bytes:
            bits = []
            for first, part in _parts(places, block_bytes):
                rows = np.empty(len(part) * block_bytes, np.uint8)
                chosen = slice(8 * first, 8 * (first + len(part)))
                inside = Places.packed(len(part), block_bytes)
                good = self._copy_out(offsets[chosen], block_bytes, rows, inside, checksums[chosen], num_threads)
                begin = 0
                for at, n in part.ranges():
                    _write(region, int(at), rows[begin : begin + int(n)])
                    begin += int(n)
                bits.append(np.unpackbits(np.frombuffer(good, np.uint8), count=len(part), bitorder="little"))
            return np.packbits(np.concatenate(bits), bitorder="little").tobytes()

        return await self._run(len(offsets) // 8 * block_bytes, copy)

    def _take(self, offsets: bytes, block_bytes: int) -> Callable[[int, int, Array], bytes]:
        """Return a function that copies blocks of a slot into the store, and returns their checksums."""

        def take(first: int, count: int, slot: Array) -> bytes:
            inside = Places.packed(count, block_bytes)
            return self._copy_in(offsets[8 * first : 8 * (first + count)], block_bytes, slot, inside, self._num_threads)

        return take

    def _give(self, offsets: bytes, block_bytes: int, checksums: bytes) -> Callable[[int, int, Array], Array]:
        """Return a function that copies blocks of the store into a slot, and returns a bit for each: whether its
        checksum was right."""

        def give(first: int, count: int, slot: Array) -> Array:
            chosen, inside = slice(8 * first, 8 * (first + count)), Places.packed(count, block_bytes)
            good = self._copy_out(offsets[chosen], block_bytes, slot, inside, checksums[chosen], self._num_threads)
            return np.unpackbits(np.frombuffer(good, np.uint8), count=count, bitorder="little")

        return give

    def _copy_in(self, offsets: bytes, block_bytes: int, source: Array, places: Places, num_threads: int) -> bytes:
        return _ext.store_copy_in(
            self._memory,
            offsets,
            block_bytes,
            source.ctypes.data,
            places.offsets.tobytes(),
            places.piece_bytes.tobytes(),
            num_threads,
        )

    def _copy_out(
        self, offsets: bytes, block_bytes: int, target: Array, places: Places, checksums: bytes, num_threads: int
    ) -> bytes:
        return _ext.store_copy_out(
            self._memory,
            offsets,
            block_bytes,
            target.ctypes.data,
            places.offsets.tobytes(),
            places.piece_bytes.tobytes(),
            checksums,
            num_threads,
        )

    async def _run(self, num_bytes: int, copy: Callable[[int], T]) -> T:
        """Run `copy` with a number of threads. The caller must not be cancelled meanwhile."""
        if num_bytes <= SHORT_BYTES:
            return copy(1)
        self._num_running += 1
        try:
            share = max(1, self._num_threads // self._num_running)
            return await asyncio.get_running_loop().run_in_executor(self._threads, copy, share)
        finally:
            self._num_running -= 1


def _parts(places: Places, block_bytes: int) -> Iterator[tuple[int, Places]]:
    """Split places into parts that fit the buffer. Yields the number of the first block, and the part."""
    most = max(1, BUFFER_BYTES // block_bytes)
    for first in range(0, len(places), most):
        yield first, Places(places.piece_bytes, places.offsets[first : first + most])


def _read(region: Region, begin: int, num_bytes: int) -> Array:
    try:
        return region.memory.read(begin, num_bytes)
    except RegionShrunkError as error:
        error.field = "region.region"
        raise


def _write(region: Region, begin: int, data: Array) -> None:
    try:
        region.memory.write(begin, data)
    except (RegionShrunkError, ResourceExhaustedError) as error:
        error.field = "region.region"
        raise
