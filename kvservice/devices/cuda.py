"""The CUDA device: the pool is in GPU memory."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvservice.attention_options import AttentionOptions
from kvservice.blocks import StepPlan
from kvservice.config import ServeConfig
from kvservice.devices.arena import Arena, StagingBuffer, aligned, offsets_of
from kvservice.devices.base import (
    Array,
    Bools,
    CudaRegion,
    FinishedSteps,
    Int32,
    Int64,
    LaneServer,
    LaneSession,
    PoolDescriptor,
    PoolName,
    UInt64,
    UnfinishedBlocks,
)
from kvservice.devices.compute import Compute, ComputeCall
from kvservice.devices.copies import Copies, Tier
from kvservice.devices.cpu import ByteQueue, awaited, copy_from_pool, copy_to_pool, ready
from kvservice.devices.cuda_lanes import CudaLanes, CudaLaneSession
from kvservice.devices.kernels import (
    LANE_WORKSPACE_BYTES,
    CudaPoolKernels,
    arena_bytes,
    blocks_that_fit,
    workspace_bytes,
)
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, reason_of
from kvservice.kept import KeptState, KeptStateError
from kvservice.ops.cuda import COUNTER_BYTES, HOW_TO_BUILD, load_extension
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.pool.pools import OUT_OF_MEMORY, CpuPool, CudaPool
from kvservice.pool.sealed import SealedMemory

if TYPE_CHECKING:
    from kvservice import _cuda

# ---- the pool in GPU memory that an earlier process of the daemon left, or a new one


# The name of the descriptor, and of the fact that has [number of blocks, bytes of the memory].
POOL = "pool"


def open_pool(cuda: ModuleType, device: int, config: ServeConfig, kept: KeptState) -> CudaPool:
    """Take over the pool in `kept`, or allocate one and put it there. Raises ResourceExhaustedError, and KeptStateError
    if the earlier process's pool cannot be mapped."""
    fd = kept.descriptor(POOL)
    if fd is None:
        pool = _new_pool(cuda, device, config)
        kept.facts[POOL] = [pool.num_blocks, pool.mapped_bytes]
        kept.put_descriptor(POOL, os.dup(pool.fd))
        return pool
    num_blocks, mapped_bytes = kept.facts[POOL]
    try:
        return CudaPool.reopen(cuda, device, config.layout, num_blocks, fd, mapped_bytes)
    except (InvalidArgumentError, cuda.CudaError) as error:
        raise KeptStateError(f"the earlier process's pool cannot be mapped: {error}") from None


def _new_pool(cuda: ModuleType, device: int, config: ServeConfig) -> CudaPool:
    if config.pool_blocks is not None:
        return CudaPool(cuda, device, config.layout, config.pool_blocks, config.pool_field)
    num_blocks = blocks_that_fit(cuda, device, config)
    return CudaPool(cuda, device, config.layout, num_blocks, "gpu_memory_utilization")


# ---- scales of an FP8 cache, read from a file


NAMES = ("k_scale", "v_scale")


def load_scales(path: str, num_layers: int, num_kv_heads: int) -> npt.NDArray[np.float32]:
    """Return the scales of keys and values, float32[2, num_layers, num_kv_heads]. The stored number times its scale is
    the value.

    The file holds {"k_scale": ..., "v_scale": ...}. Each is a number, a list with one number per layer, or a list per
    layer with one number per KV head. Omitted scales are 1; if `path` is empty, all are 1. Raises InvalidArgumentError
    with field kv_scales.
    """
    content = _read(path) if path else {}
    unknown = set(content) - set(NAMES)
    if unknown:
        raise InvalidArgumentError(f"{path}: {', '.join(sorted(unknown))} is unknown", field="kv_scales")
    shape = (num_layers, num_kv_heads)
    return np.stack([_as_array(content.get(name, 1.0), f"{path}: {name}", shape) for name in NAMES])


def _read(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidArgumentError(f"{path}: {reason_of(error)}", field="kv_scales") from None
    if not isinstance(content, dict):
        raise InvalidArgumentError(f"{path}: is not an object with k_scale and v_scale", field="kv_scales")
    return content


def _as_array(value: Any, where: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    try:
        scales = np.array(value, np.float32)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{where} is not made of numbers", field="kv_scales") from None
    if scales.shape not in ((), shape[:1], shape):
        raise InvalidArgumentError(
            f"{where} has shape {list(scales.shape)}, must be one number, {list(shape[:1])} or {list(shape)}",
            field="kv_scales",
        )
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise InvalidArgumentError(f"{where} has to be finite and positive", field="kv_scales")
    if scales.ndim == 1:
        scales = scales[:, None]
    return np.broadcast_to(scales, shape)


# ---- warm-up of the usual kernels
#
# The driver loads a kernel, and allocates memory for it, at its first launch.


# Tokens of the larger warm-up call.
NUM_TOKENS = 256


def warm_up(compute: Compute, kernels: CudaPoolKernels, workspace: int, workspace_bytes: int) -> None:
    """Write, read and attend over zeros. `kernels` has a pool of one block, to which every table entry refers."""
    config = kernels.config
    tensor_bytes = aligned(NUM_TOKENS * config.num_kv_heads * config.head_size * TENSOR_DTYPES[config.dtype].itemsize)
    tables_bytes = aligned(8 * NUM_TOKENS)
    lengths = np.array([1, NUM_TOKENS], np.int32)
    zeros = compute.allocate(tables_bytes + 3 * tensor_bytes + aligned(lengths.nbytes))
    tensors = zeros + tables_bytes
    lengths_at = tensors + 3 * tensor_bytes
    buffer = compute.arena.allocate(lengths.nbytes)
    kernels.cuda.fill_async(zeros, 0, tables_bytes + 3 * tensor_bytes, kernels.stream)
    buffer.put(0, lengths)
    kernels.cuda.copy_async(lengths_at, buffer.host_pointer, lengths.nbytes, kernels.stream)
    kernels.write(0, 1, zeros, tensors, tensors)
    kernels.read(0, 1, zeros, tensors + tensor_bytes, tensors + 2 * tensor_bytes)
    for index, num_tokens in enumerate(lengths.tolist()):
        call = kernels.attention(0)
        call.num_tokens, call.num_seqs, call.num_heads = num_tokens, 1, config.num_kv_heads
        call.max_blocks, call.max_query_len = -(-num_tokens // config.block_size), num_tokens
        call.query_lens = call.context_lens = lengths_at + 4 * index
        call.block_tables, call.query, call.out = zeros, tensors, tensors + tensor_bytes
        call.workspace, call.workspace_bytes = workspace, workspace_bytes
        call.launch()
    compute.free(zeros)
    compute.stream.synchronize()
    compute.arena.release(buffer)


# ---- the device


# Rates of the host link, device memory and arithmetic, for estimates of a call's duration. They are low, so that the
# estimates are rather too long.
LINK_BYTES_PER_S = 20e9
MEMORY_BYTES_PER_S = 1e12
OPERATIONS_PER_S = 50e12
NO_BLOCKS = np.zeros(0, np.int64)
NO_CODE_FOR_DEVICE = 209  # cudaErrorNoKernelImageForDevice


class CudaDevice:
    """A `Device`. The modules `compute` and `copies` describe the order of its streams."""

    def __init__(self, config: ServeConfig, kept: KeptState) -> None:
        self._cuda, self._number = _load(config)
        self._config = config
        self.layout = config.layout
        self.lane_bytes: int = self._cuda.LANE_BYTES
        self.lane_buckets_s: tuple[float, ...] = self._cuda.LANE_BUCKETS
        self.finished_steps: FinishedSteps = self._cuda.FinishedSteps()
        self._dtype = TENSOR_DTYPES[config.dtype]
        self._token_layer_bytes = self.layout.token_bytes // self.layout.num_layers
        try:
            self._cuda.set_device(self._number)
            self._compute = Compute(self._cuda, self._number, kept.mark_faulted)
            self._take_workspaces()
            self._take_pools(kept)
            self._lanes = self._take_lanes() if config.shares_memory else None
        except self._cuda.CudaError as error:
            raise _start_error(error, config.device) from None

    def _take_workspaces(self) -> None:
        cuda, config, compute = self._cuda, self._config, self._compute
        compute.arena = Arena(cuda, self._number, arena_bytes(config))
        self._workspace_bytes = max(COUNTER_BYTES, workspace_bytes(cuda, config))
        self._workspace_memory = cuda.DeviceMemory(self._number, self._workspace_bytes)
        self._workspace: int = self._workspace_memory.pointer
        cuda.fill_async(self._workspace, 0, COUNTER_BYTES, compute.stream.handle)
        self._scales = self._take_scales()
        block = compute.allocate(self.layout.block_bytes)
        kernels = CudaPoolKernels(cuda, config, compute.stream.handle, block, 1, self._scales)
        warm_up(compute, kernels, self._workspace, self._workspace_bytes)
        compute.free(block)
        compute.stream.synchronize()

    def _take_scales(self) -> int:
        """Upload the scales as float32[2, num_layers, num_kv_heads]. Returns their address, or 0 if the pool is not
        FP8."""
        if self._config.kv_cache_dtype == "auto":
            return 0
        scales = load_scales(self._config.kv_scales, self.layout.num_layers, self.layout.num_kv_heads)
        pointer = self._compute.allocate(scales.nbytes)
        buffer = self._compute.arena.allocate(scales.nbytes)
        buffer.put(0, scales)
        self._cuda.copy_async(pointer, buffer.host_pointer, scales.nbytes, self._compute.stream.handle)
        self._compute.stream.synchronize()
        self._compute.arena.release(buffer)
        return pointer

    def _take_pools(self, kept: KeptState) -> None:
        cuda, config, compute = self._cuda, self._config, self._compute
        self.pool = open_pool(cuda, self._number, config, kept)
        self.num_blocks, self.num_swap_blocks = self.pool.num_blocks, config.swap_blocks
        self.swap_pool = CpuPool(self.layout, self.num_swap_blocks, "swap", "swap_space_gib", allocate=kept.memory)
        self._swap_registration = _page_lock(cuda, self.swap_pool) if self.num_swap_blocks else None
        self.memory_bytes = {
            "pool": self.pool.num_bytes,
            "swap": self.swap_pool.num_bytes,
            "workspaces": self._workspace_bytes + compute.arena.num_bytes,
        }
        unfinished = UnfinishedBlocks(kept.arrays, "unfinished_device", self.num_blocks)
        pool = Tier(self.pool.pointer, self.num_blocks, unfinished)
        unfinished = UnfinishedBlocks(kept.arrays, "unfinished_swap", self.num_swap_blocks)
        swap = Tier(self.swap_pool.blocks.ctypes.data, self.num_swap_blocks, unfinished, in_host_memory=True)
        block_bytes, fail = self.layout.block_bytes, compute.queue.fail
        compute.copies = Copies(cuda, self._number, compute.stream, pool, swap, block_bytes, fail)
        self._host_copies = CudaHostCopies(cuda, self._number, compute, block_bytes, config.store_copy_threads)
        self._kernels = CudaPoolKernels(
            cuda, config, compute.stream.handle, self.pool.pointer, self.num_blocks, self._scales
        )

    def _take_lanes(self) -> CudaLanes:
        self.memory_bytes["workspaces"] += LANE_WORKSPACE_BYTES
        pool = self.pool.pointer, self.num_blocks, self._scales
        return CudaLanes(self._cuda, self._number, self._config, self._compute, *pool)

    @property
    def fault(self) -> BaseException | None:
        return self._compute.queue.fault

    @property
    def swap_busy_s(self) -> dict[str, float]:
        return self._compute.copies.swap_busy_s

    @property
    def on_fault(self) -> Callable[[], object]:
        return self._compute.queue.on_fault

    @on_fault.setter
    def on_fault(self, call: Callable[[], object]) -> None:
        self._compute.queue.on_fault = call

    def check_options(self, options: AttentionOptions) -> None:
        """Do nothing: the reference kernel supports all options."""

    def copy(self, src_ids: Int32, dst_ids: Int32) -> None:
        copies = self._compute.copies
        self._compute.post(copies.within_pool, copies.pool, src_ids, dst_ids)

    def swap_out(self, src_ids: Int32, dst_ids: Int32) -> None:
        copies = self._compute.copies
        self._compute.post(copies.swap_out, copies.swap, src_ids, dst_ids)

    def swap_in(self, src_ids: Int32, dst_ids: Int32) -> None:
        copies = self._compute.copies
        self._compute.post(copies.swap_in, copies.pool, src_ids, dst_ids)

    def save_blocks(self, block_ids: Int32, addresses: UInt64, pool: PoolName = "pool") -> Awaitable[UInt64]:
        return self._host_copies.save(self._tier(pool), block_ids, addresses)

    def load_blocks(
        self, addresses: UInt64, block_ids: Int32, checksums: UInt64, pool: PoolName = "pool"
    ) -> Awaitable[Bools]:
        return self._host_copies.load(self._tier(pool), addresses, block_ids, checksums)

    def _tier(self, pool: PoolName) -> Tier:
        return self._compute.copies.pool if pool == "pool" else self._compute.copies.swap

    def attend(
        self,
        step: StepPlan,
        layer: int,
        query: Array,
        key: Array,
        value: Array,
        options: AttentionOptions,
        _out: Array | None = None,
        *,
        completed: StepPlan | None = None,
    ) -> Awaitable[tuple[Array, Array]]:
        compute, kernels = self._compute, self._kernels
        num_tokens, num_heads, head_size = query.shape
        tables = compute.tables_of(step)
        attention = kernels.attention_over(tables, layer, num_heads, options)
        # Placeholder addresses: only the presence of these tensors matters for the choice of the kernel.
        attention.lse = compute.arena.device_pointer
        attention.alibi_slopes = 0 if options.alibi_slopes is None else compute.arena.device_pointer
        extra = compute.reserve(lambda: self._workspace_for(attention))
        slopes = [] if options.alibi_slopes is None else [options.alibi_slopes.astype(np.float32, copy=False)]
        inputs = [query, key, value, *slopes]
        offsets = offsets_of(inputs)
        out = offsets[-1]
        lse = out + aligned(query.nbytes)
        end = lse + aligned(4 * num_tokens * num_heads)

        def launch(buffer: StagingBuffer) -> None:
            compute.upload(buffer, inputs, offsets)
            compute.upload_tables(tables, buffer, end)
            at = buffer.device_pointer
            kernels.write(layer, num_tokens, tables.slots, at + offsets[1], at + offsets[2])
            attention.query, attention.out, attention.lse = at, at + out, at + lse
            if slopes:
                attention.alibi_slopes = at + offsets[3]
            attention.launch()
            if extra:
                compute.free(extra)
            compute.download(buffer, out, end)

        def result(buffer: StagingBuffer) -> tuple[Array, Array]:
            output = buffer.get(out, query.shape, self._dtype)
            return output, buffer.get(lse, (num_tokens, num_heads), np.dtype(np.float32))

        kv_bytes = tables.num_context_tokens * self._token_layer_bytes
        operations = 4 * tables.num_scores * num_heads * head_size
        seconds = end / LINK_BYTES_PER_S + kv_bytes / MEMORY_BYTES_PER_S + operations / OPERATIONS_PER_S
        num_bytes = end + tables.num_pending_bytes
        reads, writes = tables.host_block_tables, tables.written_blocks
        completes = self._blocks_of(completed)
        return compute.start(ComputeCall(step, num_bytes, reads, writes, seconds, launch, result, completes))

    def _blocks_of(self, completed: StepPlan | None) -> Array | None:
        return None if completed is None else completed.slot_mapping // self.layout.block_size

    def _workspace_for(self, attention: _cuda.Attention) -> int:
        """Set the workspace of a call: the device's own, or a larger temporary one. Returns the address of the
        temporary one, which is freed after the call, or 0."""
        wanted = attention.wanted_workspace_bytes()
        attention.workspace, attention.workspace_bytes = self._workspace, self._workspace_bytes
        if wanted <= self._workspace_bytes:
            return 0
        extra = self._compute.allocate(wanted)
        self._cuda.fill_async(extra, 0, COUNTER_BYTES, self._compute.stream.handle)
        attention.workspace, attention.workspace_bytes = extra, wanted
        return extra

    def write(
        self, step: StepPlan, layers: Sequence[int], keys: Array, values: Array, *, completed: StepPlan | None = None
    ) -> Awaitable[None]:
        compute = self._compute
        tables = compute.tables_of(step)
        inputs = [keys, values]
        offsets = offsets_of(inputs)
        layer_bytes = keys[0].nbytes

        def launch(buffer: StagingBuffer) -> None:
            compute.upload(buffer, inputs, offsets)
            compute.upload_tables(tables, buffer, offsets[-1])
            for index, layer in enumerate(layers):
                key = buffer.device_pointer + index * layer_bytes
                self._kernels.write(layer, tables.num_tokens, tables.slots, key, key + offsets[1])

        num_bytes = offsets[-1] + tables.num_pending_bytes
        seconds = offsets[-1] / LINK_BYTES_PER_S
        writes, completes = tables.written_blocks, self._blocks_of(completed)
        return compute.start(
            ComputeCall(step, num_bytes, NO_BLOCKS, writes, seconds, launch, lambda _: None, completes)
        )

    def read(
        self, layers: Sequence[int], slots: Int64, out: tuple[Array, Array] | None = None
    ) -> Awaitable[tuple[Array, Array]]:
        compute = self._compute
        shape = (len(layers), len(slots), self.layout.num_kv_heads, self.layout.head_size)
        layer_bytes = int(np.prod(shape[1:])) * self._dtype.itemsize
        key = aligned(slots.nbytes)
        value = key + aligned(len(layers) * layer_bytes)
        end = value + aligned(len(layers) * layer_bytes)

        def launch(buffer: StagingBuffer) -> None:
            compute.upload(buffer, [slots], [0, slots.nbytes])
            at = buffer.device_pointer
            for index, layer in enumerate(layers):
                there = at + index * layer_bytes
                self._kernels.read(layer, len(slots), at, there + key, there + value)
            compute.download(buffer, key, end)

        def result(buffer: StagingBuffer) -> tuple[Array, Array]:
            if out is None:
                return buffer.get(key, shape, self._dtype), buffer.get(value, shape, self._dtype)
            buffer.copy(key, out[0])
            buffer.copy(value, out[1])
            return out

        compute.reserve(lambda: None)
        blocks = slots // self.layout.block_size
        launch_or_not = launch if len(slots) else lambda _: None
        return compute.start(ComputeCall(None, end, blocks, NO_BLOCKS, end / LINK_BYTES_PER_S, launch_or_not, result))

    def lane_session(self, number: int, kept_ids: Int64) -> CudaLaneSession:
        return self._open_lanes.session(self.finished_steps, number, kept_ids)

    def open_lane(self, memory: SealedMemory, session: LaneSession) -> LaneServer:
        assert isinstance(session, CudaLaneSession), "it was made here"
        lane: LaneServer = self._open_lanes.open(memory, session)
        return lane

    def open_cuda_region(self, session: LaneSession, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
        assert isinstance(session, CudaLaneSession), "it was made here"
        return self._open_lanes.open_client_memory(session, raw_handle, device_id, byte_size)

    @property
    def _open_lanes(self) -> CudaLanes:
        assert self._lanes is not None, "clients may share memory"
        return self._lanes

    def prepare(self, step: StepPlan) -> Awaitable[None] | None:
        """Wait for copies of the step's blocks and for the upload of its tables."""
        compute = self._compute
        tables = compute.tables_of(step)
        num_bytes = tables.num_pending_bytes
        reads, writes = tables.host_block_tables, tables.written_blocks
        seconds = num_bytes / LINK_BYTES_PER_S

        def launch(buffer: StagingBuffer) -> None:
            compute.upload_tables(tables, buffer, 0)

        return compute.start(ComputeCall(step, num_bytes, reads, writes, seconds, launch, lambda _: None))

    def publish(self, session: LaneSession, step: StepPlan, written: bytearray) -> None:
        assert isinstance(session, CudaLaneSession), "it was made here"
        session.publish(step, written, self._compute.tables_of(step))

    @contextlib.contextmanager
    def exported_pool(self) -> Iterator[PoolDescriptor]:
        yield PoolDescriptor(self.pool.fd, self.pool.mapped_bytes)

    def close(self) -> None:
        self._compute.close()
        self._host_copies.close()
        if self.fault is not None:
            return  # a faulted device accepts no calls, and the process exits
        self._lanes = None
        if self._swap_registration is not None:
            self._swap_registration.close()
        self._compute.arena.close()
        self.pool.close()
        self._workspace_memory.close()


def prepare(config: ServeConfig) -> None:
    """Load the driver and create the context of the GPU, which `CudaDevice` uses. Raises InvalidArgumentError."""
    cuda, number = _load(config)
    try:
        cuda.set_device(number)
    except cuda.CudaError as error:
        raise _start_error(error, config.device) from None


def _load(config: ServeConfig) -> tuple[ModuleType, int]:
    try:
        cuda = load_extension()
    except FailedPreconditionError as error:
        raise InvalidArgumentError(str(error), field="device") from None
    number = config.cuda_device
    assert number is not None, "the configuration names a GPU"
    count = cuda.device_count()
    if number >= count:
        there = f"CUDA devices there are: {count}" if count else "there is no CUDA device, or no driver for it"
        raise InvalidArgumentError(f"{config.device}: {there}", field="device")
    return cuda, number


def _start_error(error: Any, device: str) -> Exception:
    if error.code == OUT_OF_MEMORY:
        return ResourceExhaustedError(f"{device} has no memory for the daemon's workspaces: {error}", field="device")
    if error.code == NO_CODE_FOR_DEVICE:
        other = f"kvservice was built for other GPUs than {device}; {HOW_TO_BUILD}"
        return InvalidArgumentError(other, field="device")
    return InvalidArgumentError(f"{device} cannot be used: {error}", field="device")


def _page_lock(cuda: ModuleType, pool: CpuPool) -> Any:
    try:
        return cuda.HostRegistration(pool.blocks.ctypes.data, pool.num_bytes)
    except cuda.CudaError as error:
        raise ResourceExhaustedError(
            f"{pool.num_bytes} bytes of host memory cannot be page-locked: {error}",
            field="swap_space_gib",
            wanted=pool.num_bytes,
        ) from None


# ---- copies of whole blocks between a pool of a CUDA device and host memory that is not pinned, with checksums
#
# The bytes go through pinned staging memory. Their checksum has to be computed anyway, and that reads them once;
# copying them between the staging memory and their place in the same pass costs little more. So nothing else has to
# be pinned: for the memory of a block store, that would take the driver seconds.
#
#     save:   pool ──copy engine──▶ staging ──CPU, checksum──▶ memory
#     load:   memory ──CPU, checksum──▶ staging ──copy engine──▶ pool
#
# One half of the staging memory is filled while the other one is emptied. A save and a load may run at the same time,
# and each direction has a thread and a stream. Copies between the swap tier and other host memory take the same way.


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

        self._compute.queue.post(begin, on_loop=True)
        return awaited(done)

    def close(self) -> None:
        """Finish all copies. The queue is closed."""
        self._out.close()
        self._in.close()
