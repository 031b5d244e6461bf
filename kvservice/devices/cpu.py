"""The CPU device: the pool is in host memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

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
)
from kvservice.devices.bytequeue import ByteQueue, awaited, ready
from kvservice.devices.host_copies import CpuHostCopies, HostPool
from kvservice.devices.unfinished import UnfinishedBlocks
from kvservice.errors import InvalidArgumentError, RegionsNotAllowedError
from kvservice.kept import KeptState
from kvservice.pool.cpu import CpuPool
from kvservice.pool.sealed import SealedMemory

T = TypeVar("T")

# Smaller work runs directly on the event loop if the queue is empty, because a hop to a thread and back costs more.
INLINE_BYTES = 2 << 20


class CpuDevice:
    """A `Device`. One thread runs work that is too long for the event loop; the kernels have their own threads."""

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
        self._queue = ByteQueue(kept.mark_faulted)
        self._pools: dict[PoolName, HostPool] = {
            "pool": HostPool(self.pool.blocks.ctypes.data, self._unfinished),
            "swap": HostPool(self.swap_pool.blocks.ctypes.data, self._unfinished_swap),
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

        self._post(work, self._unfinished, dst_ids)

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        def work() -> None:
            with self._timed("out"):
                ops.copy_blocks(self.pool.blocks, self.swap_pool.blocks, src_ids, dst_ids)

        self._post(work, self._unfinished_swap, dst_ids)

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        def work() -> None:
            with self._timed("in"):
                ops.copy_blocks(self.swap_pool.blocks, self.pool.blocks, src_ids, dst_ids)

        self._post(work, self._unfinished, dst_ids)

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
        self.swap_busy_s[direction] += time.perf_counter() - start

    def _post(self, work: Callable[[], None], unfinished: UnfinishedBlocks, dst_ids: Int32) -> None:
        counted = _counted(work, unfinished, dst_ids)
        self._queue.post(counted, inline=len(dst_ids) * self.layout.block_bytes <= INLINE_BYTES)

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

        scores = int((step.query_lens.astype(np.int64) * step.context_lens).sum())
        return self._run(work, completed, scores * query[0].nbytes)

    def write(
        self, step: StepPlan, layers: Sequence[int], keys: Array, values: Array, *, completed: StepPlan | None = None
    ) -> Awaitable[None]:
        def work() -> None:
            for index, layer in enumerate(layers):
                ops.write_kv(self.pool.blocks, layer, step.slot_mapping, keys[index], values[index])

        return self._run(work, completed, keys.nbytes * 2)

    def _run(self, work: Callable[[], T], completed: StepPlan | None, num_bytes: int) -> Awaitable[T]:
        """Run a call. If it completes a step and is not done when this returns, the step's blocks are unfinished until
        then. Work runs in order, so the step's other layers are written too."""
        if num_bytes <= INLINE_BYTES and self._queue.idle:
            return ready(self._queue.guarded(work))
        if completed is not None:
            work = _counted(work, self._unfinished, completed.slot_mapping // self.layout.block_size)
        return awaited(self._queue.submit(work))

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
        return self._queue.run(work, inline=num_bytes <= INLINE_BYTES)

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

    def prepare(self, _: StepPlan) -> Awaitable[None] | None:
        return None if self._queue.idle else self._queue.run(lambda: None, inline=False)

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
