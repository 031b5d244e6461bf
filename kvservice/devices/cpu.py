"""The CPU device: the pool is in host memory. The queue of its work, and its copies, serve the GPU's device too."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np

from kvservice import _ext, ops
from kvservice.attention_options import AttentionOptions
from kvservice.blocks import StepPlan
from kvservice.config import ServeConfig
from kvservice.devices.base import (
    Array,
    Bools,
    CudaRegion,
    Int32,
    Int64,
    LaneSession,
    PoolDescriptor,
    PoolName,
    UInt64,
    UnfinishedBlocks,
)
from kvservice.errors import InternalError, InvalidArgumentError, RegionsNotAllowedError
from kvservice.kept import KeptState
from kvservice.pool.pools import CpuPool
from kvservice.pool.sealed import SealedMemory

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Smaller work runs directly on the event loop if nothing precedes it, because a hop to a thread and back costs more.
ON_LOOP_BYTES = 2 << 20
# Smaller copies run on the event loop if no work precedes them. A thread would take longer to start.
SHORT_BYTES: Final = 256 << 10


class CpuDevice:
    """A `Device`. Threads of a queue run work that is too long for the event loop; the kernels have their own."""

    lane_bytes = _ext.LANE_BYTES
    lane_buckets_s = _ext.LANE_BUCKETS

    def __init__(self, config: ServeConfig, kept: KeptState) -> None:
        if config.kv_cache_dtype != "auto":
            raise InvalidArgumentError(
                f"the CPU's kernels have no {config.kv_cache_dtype}: use auto", field="kv_cache_dtype"
            )
        # The first call chooses the kernels. It raises InvalidArgumentError for a bad KVSERVICE_CPU_ISA, which would
        # otherwise be the first extend's error, and so a fault of the device.
        ops.cpu_isa()
        num_blocks = config.pool_blocks
        assert num_blocks is not None, "on the CPU the pool's size is always given"
        self.layout = config.layout
        self.num_blocks = num_blocks
        self.num_swap_blocks = config.swap_blocks
        writable = config.share_pool == "write"
        self.pool = CpuPool(
            self.layout, num_blocks, "pool", config.pool_field, writable_by_others=writable, allocate=kept.memory
        )
        self.swap_pool = CpuPool(self.layout, self.num_swap_blocks, "swap", "swap_space_gib", allocate=kept.memory)
        self._unfinished = UnfinishedBlocks(kept.arrays, "unfinished_device", num_blocks)
        self._unfinished_swap = UnfinishedBlocks(kept.arrays, "unfinished_swap", self.num_swap_blocks)
        self.memory_bytes = {"pool": self.pool.num_bytes, "swap": self.swap_pool.num_bytes}
        self.swap_busy_s = {"out": 0.0, "in": 0.0}
        self._swap_lock = threading.Lock()
        # In the queue, blocks of the swap tier have the numbers after those of the pool.
        self._queue = ByteQueue(kept.mark_faulted, num_blocks=num_blocks + self.num_swap_blocks)
        self._pools: dict[PoolName, HostPool] = {
            "pool": HostPool(self.pool.blocks.ctypes.data, self._unfinished, 0),
            "swap": HostPool(self.swap_pool.blocks.ctypes.data, self._unfinished_swap, num_blocks),
        }
        self._host_copies = CpuHostCopies(self._queue, self.layout.block_bytes, config.store_copy_threads)
        self._batch_invariant = config.batch_invariant
        self._lanes = _ext.CpuLaneExecutor(self.pool.blocks, self.layout.head_size, config.batch_invariant)
        self._lane_spin_us = config.lane_spin_us
        self.finished_steps = _ext.FinishedSteps()
        if config.num_threads:
            ops.set_num_threads(config.num_threads)

    @property
    def fault(self) -> BaseException | None:
        return self._queue.fault

    @property
    def on_fault(self) -> Callable[[], object]:
        return self._queue.on_fault

    @on_fault.setter
    def on_fault(self, call: Callable[[], object]) -> None:
        self._queue.on_fault = call

    def check_options(self, options: AttentionOptions) -> None:
        if options.block_sparse is not None and options.block_sparse.is_on:
            raise InvalidArgumentError("is not supported by the CPU's kernels", field="options.block_sparse")

    def copy(self, src_ids: Int32, dst_ids: Int32) -> None:
        def work() -> None:
            ops.copy_blocks(self.pool.blocks, self.pool.blocks, src_ids, dst_ids)

        self._post(work, self._unfinished, dst_ids, BlockUse(src_ids, dst_ids))

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        def work() -> None:
            with self._timed("out"):
                ops.copy_blocks(self.pool.blocks, self.swap_pool.blocks, src_ids, dst_ids)

        self._post(work, self._unfinished_swap, dst_ids, BlockUse(src_ids, dst_ids + self.num_blocks))

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        def work() -> None:
            with self._timed("in"):
                ops.copy_blocks(self.swap_pool.blocks, self.pool.blocks, src_ids, dst_ids)

        self._post(work, self._unfinished, dst_ids, BlockUse(src_ids + self.num_blocks, dst_ids))

    def save_blocks(self, block_ids: Int32, addresses: UInt64, pool: PoolName = "pool") -> Awaitable[UInt64]:
        return self._host_copies.save(self._pools[pool], block_ids, addresses)

    def load_blocks(
        self, addresses: UInt64, block_ids: Int32, checksums: UInt64, pool: PoolName = "pool"
    ) -> Awaitable[Bools]:
        return self._host_copies.load(self._pools[pool], addresses, block_ids, checksums)

    @contextlib.contextmanager
    def _timed(self, direction: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        with self._swap_lock:
            self.swap_busy_s[direction] += time.perf_counter() - start

    def _post(self, work: Callable[[], None], unfinished: UnfinishedBlocks, dst_ids: Int32, use: BlockUse) -> None:
        counted = _counted(work, unfinished, dst_ids)
        num_bytes = len(dst_ids) * self.layout.block_bytes
        self._queue.post(counted, on_loop=num_bytes <= ON_LOOP_BYTES, num_bytes=num_bytes, use=lambda: use)

    def attend(
        self,
        step: StepPlan,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        options: AttentionOptions,
        out: Array | None = None,
        *,
        completed: StepPlan | None = None,
    ) -> Awaitable[tuple[Array, Array]]:
        block_tables = step.block_tables  # gathered now, because they are valid only while the step is live

        def work() -> tuple[Array, Array]:
            ops.write_kv(self.pool.blocks, layer, step.slot_mapping, key, value)
            return ops.attention(
                self.pool.blocks,
                layer,
                query,
                step.query_lens,
                block_tables,
                step.context_lens,
                scale=options.scale,
                sliding_window=options.sliding_window,
                logits_soft_cap=options.logits_soft_cap,
                alibi_slopes=options.alibi_slopes,
                batch_invariant=self._batch_invariant,
                out=out,
                return_lse=True,
            )

        return self._run(work, step, completed, step.num_scores * (query.nbytes // len(query)))

    def write(
        self, step: StepPlan, layers: Sequence[int], keys: Array, values: Array, *, completed: StepPlan | None = None
    ) -> Awaitable[None]:
        def work() -> None:
            for index, layer in enumerate(layers):
                ops.write_kv(self.pool.blocks, layer, step.slot_mapping, keys[index], values[index])

        return self._run(work, step, completed, keys.nbytes * 2)

    def _run(self, work: Callable[[], T], step: StepPlan, completed: StepPlan | None, num_bytes: int) -> Awaitable[T]:
        """Run a call. If it completes a step and is not done when this returns, the step's blocks are unfinished until
        then. All work on the step's blocks precedes it, so the step's other layers and parts are written too."""
        if num_bytes <= ON_LOOP_BYTES and self._queue.idle:
            return ready(self._queue.guarded(work))
        use = functools.cache(partial(blocks_of_step, step if completed is None else completed))
        if num_bytes <= ON_LOOP_BYTES and self._queue.is_free(use):
            return ready(self._queue.guarded(work))
        if completed is not None:
            work = _counted(work, self._unfinished, completed.slot_mapping // self.layout.block_size)
        return awaited(self._queue.submit(work, num_bytes, use))

    def read(
        self, layers: Sequence[int], slots: Int64, out: tuple[Array, Array] | None = None
    ) -> Awaitable[tuple[Array, Array]]:
        def work() -> tuple[Array, Array]:
            layout, pool = self.layout, self.pool.blocks
            shape = (len(layers), len(slots), layout.num_kv_heads, layout.head_size)
            key, value = (np.empty(shape, pool.dtype), np.empty(shape, pool.dtype)) if out is None else out
            for index, layer in enumerate(layers):  # what is copied is still in a cache
                key[index], value[index] = ops.read_kv(pool, layer, slots, head_size=layout.head_size)
            return key, value

        num_bytes = len(slots) * self.layout.token_bytes // self.layout.num_layers * len(layers)

        def use() -> BlockUse:
            return BlockUse(slots // self.layout.block_size, NO_BLOCKS)

        return self._queue.run(work, on_loop=num_bytes <= ON_LOOP_BYTES, num_bytes=num_bytes, use=use)

    def lane_session(self, number: int, kept_ids: Int64) -> _ext.LaneSession:
        return _ext.LaneSession(self.layout.num_layers, self.finished_steps, number, kept_ids)

    def open_lane(self, memory: SealedMemory, session: LaneSession) -> _ext.LaneServer:
        assert isinstance(session, _ext.LaneSession), "it was made here"
        return _ext.LaneServer(memory.map, session, self._lanes, self._lane_spin_us, self._lane_failed)

    def _lane_failed(self, message: str) -> None:
        self._queue.fail(RuntimeError(f"a lane: {message}"))

    def open_cuda_region(
        self, _session: LaneSession, _raw_handle: bytes, _device_id: int, _num_bytes: int
    ) -> CudaRegion:
        raise RegionsNotAllowedError("the pool is in host memory, so the daemon opens no GPU memory")

    def prepare(self, step: StepPlan) -> Awaitable[None] | None:
        use = functools.cache(partial(blocks_of_step, step))
        return None if self._queue.is_free(use) else self._queue.run(lambda: None, on_loop=False, use=use)

    def publish(self, session: LaneSession, step: StepPlan, written: bytearray) -> None:
        assert isinstance(session, _ext.LaneSession), "it was made here"
        session.publish(step.step_id, written, step.slot_mapping, step.query_lens, step.context_lens, step.block_tables)

    @contextlib.contextmanager
    def exported_pool(self) -> Iterator[PoolDescriptor]:
        yield PoolDescriptor(self.pool.fd, self.pool.num_bytes)

    def close(self) -> None:
        self._queue.close()
        self._host_copies.close()


def _counted(work: Callable[[], T], unfinished: UnfinishedBlocks, blocks: Array) -> Callable[[], T]:
    """Count blocks as unfinished from now until `work` is done. If it fails, the device is faulted, and they stay."""
    unfinished.begin(blocks)

    def counted() -> T:
        result = work()
        unfinished.end(blocks)
        return result

    return counted


# ---- the queue in which work runs in order

# Work waits for work of its size class and below. It waits for larger work only if one of them writes blocks that the
# other one uses. So small work is not behind work of seconds, and small work that cannot pass is in order behind it.
#
#   worker 0   small ──▶ small ──▶ small        never waits for worker 1 or 2
#   worker 1   medium ──▶ small, of a block that the medium one writes
#   worker 2   large ──▶ large                  each waits for what worker 0 and 1 had before it was submitted

NO_BLOCKS: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class BlockUse:
    """The blocks that work reads and writes, int[n] each. A block may be repeated."""

    reads: Array
    writes: Array


def blocks_of_step(step: StepPlan) -> BlockUse:
    """Return the blocks that a call of a live step uses."""
    tables, size = step.block_tables, step.block_size
    there = np.arange(tables.shape[1]) < -(-step.context_lens // size)[:, None]  # the rest is padding
    return BlockUse(tables[there], step.slot_mapping // size)


class ByteQueue:
    """Queue of work, each on the worker thread of its size class or of larger work that it must follow. Work is
    submitted from the event loop only.

    Work is validated before it is submitted, and recorded as done in the bookkeeping as it is submitted. An exception
    in it is therefore a bug or, for `device_errors`, a device failure. Either leaves the content of the pool undefined
    and sets `fault`, and the daemon exits. `on_start` runs first in each worker thread. `mark_faulted` is called first
    of all on a fault, on any thread.

    Where work has a `num_bytes` and a `use`, they are the bytes that it moves or reads, counted roughly, and a function
    that returns its blocks, below `num_blocks`. Work without a `use` may use all blocks.
    """

    def __init__(
        self,
        mark_faulted: Callable[[], object],
        device_errors: tuple[type[Exception], ...] = (),
        on_start: Callable[[], object] = lambda: None,
        num_blocks: int = 0,
    ) -> None:
        self.fault: BaseException | None = None
        self.on_fault: Callable[[], object] = lambda: None
        self._mark_faulted = mark_faulted
        self._device_errors = device_errors
        self._workers = [_Worker(num_blocks, on_start) for _ in range(len(_ext.CPU_SIZE_CLASSES) + 1)]

    def run(
        self,
        work: Callable[[], T],
        *,
        on_loop: bool,
        num_bytes: int = 0,
        use: Callable[[], BlockUse] | None = None,
    ) -> Awaitable[T]:
        """Run `work` in order. The caller awaits its result. With `on_loop` and nothing before it, it runs now, on the
        event loop. Cancelling the caller does not cancel the work."""
        if on_loop and self.is_free(use):
            return ready(self.guarded(work))
        return awaited(self.submit(work, num_bytes, use))

    def post(
        self,
        work: Callable[[], object],
        *,
        on_loop: bool,
        num_bytes: int = 0,
        use: Callable[[], BlockUse] | None = None,
    ) -> None:
        """Run `work` in order without waiting for it. Later submissions see its effect."""
        if on_loop and self.is_free(use):
            self.guarded(work)
        else:
            self.submit(work, num_bytes, use)

    @property
    def idle(self) -> bool:
        return all(worker.last_done.is_set() for worker in self._workers)

    def is_free(self, use: Callable[[], BlockUse] | None) -> bool:
        """Return whether nothing precedes small work that uses these blocks."""
        return self._workers[0].idle and self._worker_of(0, use) == 0

    def close(self) -> None:
        """Finish all queued work."""
        for worker in self._workers:
            worker.thread.shutdown(wait=True)

    def submit(self, work: Callable[[], T], num_bytes: int = 0, use: Callable[[], BlockUse] | None = None) -> Future[T]:
        number = self._worker_of(num_bytes, use)
        before = [worker.last_done for worker in self._workers[:number] if not worker.idle]
        worker = self._workers[number]
        done = worker.begin(None if use is None or not number else use())

        def run() -> T:
            try:
                for earlier in before:
                    earlier.wait()
                return self.guarded(work)
            finally:
                done.set()

        return worker.thread.submit(run)

    def _worker_of(self, num_bytes: int, use: Callable[[], BlockUse] | None) -> int:
        """Return the number of the worker for work: of its size class, or of larger work that it must follow."""
        smallest = bisect.bisect_left(_ext.CPU_SIZE_CLASSES, num_bytes)
        for number in range(len(self._workers) - 1, smallest, -1):
            worker = self._workers[number]
            if not worker.idle and (use is None or worker.precedes(use())):
                return number
        return smallest

    def guarded(self, work: Callable[[], T]) -> T:
        """Run `work` on the calling thread. An exception in it becomes the fault."""
        try:
            return work()
        except BaseException as error:
            raise self.fail(error) from None

    def fail(self, error: BaseException) -> BaseException:
        """Record an error as the fault, unless there is one already. Returns the error for the caller."""
        known = isinstance(error, self._device_errors)
        if self.fault is None:
            self._mark_faulted()
            self.fault = error
            logger.critical("work on the pool failed, its content is lost: %s", error, exc_info=not known)
            self.on_fault()
        return InternalError(f"the device failed: {error}") if known else error


class _Worker:
    """A thread, which the first work starts, and the blocks of its work that is not done."""

    def __init__(self, num_blocks: int, on_start: Callable[[], object]) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="bytes", initializer=on_start)
        # Set when the last submission is done. Its future would also say so, but it would keep a result alive that may
        # be in memory of a disconnected client.
        self.last_done = threading.Event()
        self.last_done.set()
        # The number of submissions that read or write each block. Only the event loop's thread uses them: it takes what
        # is done away before it looks.
        self._num_reading = np.zeros(num_blocks, np.int32)
        self._num_writing = np.zeros(num_blocks, np.int32)
        self._begun = deque[tuple[threading.Event, BlockUse | None]]()

    @property
    def idle(self) -> bool:
        return self.last_done.is_set()

    def begin(self, use: BlockUse | None) -> threading.Event:
        """Count a submission, which sets the event when it is done."""
        done = self.last_done = threading.Event()
        self._forget_done()
        if use is not None:
            np.add.at(self._num_reading, use.reads, 1)
            np.add.at(self._num_writing, use.writes, 1)
        self._begun.append((done, use))
        return done

    def precedes(self, use: BlockUse) -> bool:
        """Return whether work with these blocks must wait for a submission."""
        self._forget_done()
        writing, written = self._num_writing, use.writes
        if writing[use.reads].any() or writing[written].any() or self._num_reading[written].any():
            return True
        return any(begun is None for _, begun in self._begun)

    def _forget_done(self) -> None:
        while self._begun and self._begun[0][0].is_set():
            _, use = self._begun.popleft()
            if use is not None:
                np.subtract.at(self._num_reading, use.reads, 1)
                np.subtract.at(self._num_writing, use.writes, 1)


async def ready(result: T) -> T:
    """Return a result that is known already."""
    return result


async def awaited(done: Future[T]) -> T:
    """Wait for a future of a thread. Cancelling the caller does not cancel it."""
    return await asyncio.shield(asyncio.wrap_future(done))


# ---- copies of whole blocks between a pool in host memory and other host memory, with checksums


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
    """A pool at an address in host memory. `first` is the number of its first block in the queue."""

    pointer: int
    unfinished: UnfinishedBlocks
    first: int


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

        return self._run(self._saver, work, BlockUse(block_ids + pool.first, NO_BLOCKS))

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

        return self._run(self._loader, work, BlockUse(NO_BLOCKS, block_ids + pool.first))

    def _run(self, worker: ThreadPoolExecutor, work: Callable[[], T], use: BlockUse) -> Awaitable[T]:
        num_bytes = (len(use.reads) + len(use.writes)) * self._block_bytes
        if num_bytes <= SHORT_BYTES and self._queue.is_free(lambda: use):
            return ready(self._queue.guarded(work))
        done: Future[T] = Future()
        self._queue.post(lambda: worker.submit(self._run_for, work, done), on_loop=True, use=lambda: use)
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
