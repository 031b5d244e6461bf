"""Copies of whole blocks between a pool of a CUDA device and host memory that is not pinned, with checksums.

The bytes go through pinned staging memory. Their checksum has to be computed anyway, and that reads them once; copying
them between the staging memory and their place in the same pass costs little more. So nothing else has to be pinned:
for the memory of a block store, that would take the driver seconds.

    save:   pool ──copy engine──▶ staging ──CPU, checksum──▶ memory
    load:   memory ──CPU, checksum──▶ staging ──copy engine──▶ pool

One half of the staging memory is filled while the other one is emptied. A save and a load may run at the same time, and
each direction has a thread and a stream. Copies between the swap tier and other host memory take the same way.
"""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from types import ModuleType
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from kvservice.devices.base import Array, Bools, Int32, UInt64
from kvservice.devices.compute import Compute
from kvservice.devices.copies import Tier
from kvservice.devices.cpu import ByteQueue, awaited, copy_from_pool, copy_to_pool, ready

if TYPE_CHECKING:
    from kvservice import _cuda

T = TypeVar("T")

# The size of each half of the staging memory, unless a block is larger.
STAGING_BYTES: Final = 8 << 20


class _Half:
    """A half of the staging memory. `used` says when the copy engine has last used it."""

    def __init__(self, pointer: int, used: _cuda.Event) -> None:
        self.pointer = pointer
        self.used = used


class _Direction:
    """The thread, the stream and the staging memory of one direction. Everything but `stream` is for that thread."""

    def __init__(self, cuda: ModuleType, device: int, queue: ByteQueue, block_bytes: int, num_threads: int) -> None:
        self.stream: _cuda.Stream = cuda.Stream(device)
        self._cuda, self._device, self._queue = cuda, device, queue
        self._block_bytes, self._num_threads = block_bytes, num_threads
        self._half_blocks = max(1, STAGING_BYTES // block_bytes)
        self._registration: _cuda.HostRegistration | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staging", initializer=partial(cuda.set_device, device))

    def submit(self, work: Callable[[], T], done: Future[T]) -> None:
        self._thread.submit(self._run, work, done)

    def _run(self, work: Callable[[], T], done: Future[T]) -> None:
        try:
            done.set_result(self._queue.guarded(work))
        except BaseException as error:
            done.set_exception(error)

    def save(self, tier: Tier, block_ids: Int32, addresses: UInt64) -> UInt64:
        if tier.in_host_memory:
            self.stream.synchronize()
            return copy_from_pool(tier.pointer, block_ids, addresses, self._block_bytes, self._num_threads)
        checksums = np.zeros(len(block_ids), np.uint64)
        before: list[tuple[slice, _Half]] = []
        for part, half in self._parts(len(block_ids)):
            self._launch(tier.pointer, half.pointer, tier.num_blocks, self._half_blocks, block_ids[part], _first(part))
            half.used.record(self.stream.handle)
            if before:
                self._empty(*before.pop(), addresses, checksums)
            before.append((part, half))
        self._empty(*before.pop(), addresses, checksums)
        return checksums

    def _empty(self, part: slice, half: _Half, addresses: UInt64, checksums: UInt64) -> None:
        """Copy a part of the blocks from the staging memory to their places."""
        half.used.synchronize()
        size, num_threads = self._block_bytes, self._num_threads
        checksums[part] = copy_from_pool(half.pointer, _first(part), addresses[part], size, num_threads)

    def load(self, tier: Tier, addresses: UInt64, block_ids: Int32, checksums: UInt64) -> Bools:
        size, num_threads = self._block_bytes, self._num_threads
        if tier.in_host_memory:
            self.stream.synchronize()
            return copy_to_pool(tier.pointer, addresses, block_ids, checksums, size, num_threads)
        right = np.zeros(len(block_ids), np.bool_)
        for part, half in self._parts(len(block_ids)):
            half.used.synchronize()  # the copy engine may still read its blocks of before
            right[part] = copy_to_pool(half.pointer, addresses[part], _first(part), checksums[part], size, num_threads)
            self._launch(half.pointer, tier.pointer, self._half_blocks, tier.num_blocks, _first(part), block_ids[part])
            half.used.record(self.stream.handle)
        for half in self._halves:
            half.used.synchronize()
        return right

    @cached_property
    def _halves(self) -> tuple[_Half, _Half]:
        """The staging memory. It is pinned when it is used first, because most daemons never use it."""
        num_bytes = self._half_blocks * self._block_bytes
        self._memory: Array = np.frombuffer(mmap.mmap(-1, 2 * num_bytes), np.uint8)
        pointer = self._memory.ctypes.data
        self._registration = self._cuda.HostRegistration(pointer, 2 * num_bytes)
        first, second = (self._cuda.Event(self._device) for _ in range(2))
        return _Half(pointer, first), _Half(pointer + num_bytes, second)

    def _parts(self, num_blocks: int) -> Iterator[tuple[slice, _Half]]:
        """Yield the parts of so many blocks that fit a half, and the half for each."""
        for number, first in enumerate(range(0, num_blocks, self._half_blocks)):
            yield slice(first, min(first + self._half_blocks, num_blocks)), self._halves[number % 2]

    def _launch(self, src: int, dst: int, num_src: int, num_dst: int, src_ids: Int32, dst_ids: Int32) -> None:
        self._cuda.copy_blocks(src, dst, num_src, num_dst, self._block_bytes, src_ids, dst_ids, self.stream.handle)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        if self._registration is not None and self._queue.fault is None:
            self._registration.close()


def _first(part: slice) -> Int32:
    """Return the ids of the blocks in the staging memory that a part of the blocks takes: the first ones."""
    return np.arange(part.stop - part.start, dtype=np.int32)


class CudaHostCopies:
    """The copies of a CUDA device. They begin after the operations that precede them."""

    def __init__(self, cuda: ModuleType, device: int, compute: Compute, block_bytes: int, num_threads: int) -> None:
        self._compute = compute
        self._out, self._in = (_Direction(cuda, device, compute.queue, block_bytes, num_threads) for _ in ("out", "in"))

    def save(self, tier: Tier, block_ids: Int32, addresses: UInt64) -> Awaitable[UInt64]:
        """See Device.save_blocks."""
        if not len(block_ids):
            return ready(np.zeros(0, np.uint64))
        return self._start(self._out, tier, block_ids, lambda: self._out.save(tier, block_ids, addresses))

    def load(self, tier: Tier, addresses: UInt64, block_ids: Int32, checksums: UInt64) -> Awaitable[Bools]:
        """See Device.load_blocks."""
        if not len(block_ids):
            return ready(np.zeros(0, np.bool_))
        tier.unfinished.begin(block_ids)

        def work() -> Bools:
            right = self._in.load(tier, addresses, block_ids, checksums)
            tier.unfinished.end(block_ids)
            return right

        return self._start(self._in, tier, block_ids, work)

    def _start(self, direction: _Direction, tier: Tier, block_ids: Int32, work: Callable[[], T]) -> Awaitable[T]:
        done: Future[T] = Future()

        def begin() -> None:
            writes = direction is self._in
            self._compute.copies.let_wait(direction.stream, tier, block_ids, writes=writes)
            direction.submit(work, done)

        self._compute.queue.post(begin, inline=True)
        return awaited(done)

    def close(self) -> None:
        """Finish all copies. The queue is closed."""
        self._out.close()
        self._in.close()
