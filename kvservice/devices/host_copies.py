"""Copies of whole blocks between a pool in host memory and other host memory, with checksums."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from kvservice import _ext
from kvservice.devices.base import Bools, Int32, UInt64
from kvservice.devices.bytequeue import ByteQueue, awaited, ready
from kvservice.devices.unfinished import UnfinishedBlocks

T = TypeVar("T")

# Smaller copies run on the event loop if no work precedes them. A thread would take longer to start.
SHORT_BYTES: Final = 256 << 10


def copy_from_pool(pool: int, block_ids: Int32, addresses: UInt64, block_bytes: int, num_threads: int) -> UInt64:
    """Copy blocks of the pool at address `pool` to `addresses`. Returns their checksums."""
    base, offsets, places, size = _places(addresses, block_ids, block_bytes)
    checksums = _ext.store_copy_in(base, offsets, block_bytes, pool, places, size, num_threads)
    return np.frombuffer(checksums, np.uint64)


def copy_to_pool(
    pool: int, addresses: UInt64, block_ids: Int32, checksums: UInt64, block_bytes: int, num_threads: int
) -> Bools:
    """Copy blocks from `addresses` to the pool at address `pool`. Returns which have the right checksum."""
    base, offsets, places, size = _places(addresses, block_ids, block_bytes)
    expected = checksums.tobytes()
    bitmap = _ext.store_copy_out(base, offsets, block_bytes, pool, places, size, expected, num_threads)
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=len(addresses), bitorder="little")
    return bits.astype(np.bool_)


def _places(addresses: UInt64, block_ids: Int32, block_bytes: int) -> tuple[int, bytes, bytes, bytes]:
    """Return the lowest address, the offsets from it, the offsets of the blocks in the pool, and the size of a
    block."""
    base = addresses.min()
    places = block_ids.astype(np.uint64) * np.uint64(block_bytes)
    return int(base), (addresses - base).tobytes(), places.tobytes(), np.uint64(block_bytes).tobytes()


@dataclass(frozen=True)
class HostPool:
    """A pool at an address in host memory."""

    pointer: int
    unfinished: UnfinishedBlocks


class CpuHostCopies:
    """The copies of a CPU device. They begin after the work that precedes them in the queue, and run beside the work
    that follows: one thread saves, and another one loads."""

    def __init__(self, queue: ByteQueue, block_bytes: int, num_threads: int) -> None:
        """Up to `num_threads` native threads copy, and end with the copy."""
        self._queue, self._block_bytes, self._num_threads = queue, block_bytes, num_threads
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")

    def save(self, pool: HostPool, block_ids: Int32, addresses: UInt64) -> Awaitable[UInt64]:
        """See Device.save_blocks."""
        if not len(block_ids):
            return ready(np.zeros(0, np.uint64))

        def work() -> UInt64:
            return copy_from_pool(pool.pointer, block_ids, addresses, self._block_bytes, self._num_threads)

        return self._run(self._saver, work, len(block_ids))

    def load(self, pool: HostPool, addresses: UInt64, block_ids: Int32, checksums: UInt64) -> Awaitable[Bools]:
        """See Device.load_blocks."""
        if not len(block_ids):
            return ready(np.zeros(0, np.bool_))
        pool.unfinished.begin(block_ids)

        def work() -> Bools:
            size, num_threads = self._block_bytes, self._num_threads
            right = copy_to_pool(pool.pointer, addresses, block_ids, checksums, size, num_threads)
            pool.unfinished.end(block_ids)
            return right

        return self._run(self._loader, work, len(block_ids))

    def _run(self, worker: ThreadPoolExecutor, work: Callable[[], T], num_blocks: int) -> Awaitable[T]:
        if self._queue.idle and num_blocks * self._block_bytes <= SHORT_BYTES:
            return ready(self._queue.guarded(work))
        done: Future[T] = Future()
        self._queue.post(lambda: worker.submit(self._run_for, work, done), inline=True)
        return awaited(done)

    def _run_for(self, work: Callable[[], T], done: Future[T]) -> None:
        try:
            done.set_result(self._queue.guarded(work))
        except BaseException as error:
            done.set_exception(error)

    def close(self) -> None:
        """Finish all copies. The queue is closed."""
        self._saver.shutdown(wait=True)
        self._loader.shutdown(wait=True)
