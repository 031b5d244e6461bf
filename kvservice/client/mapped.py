"""The pool in the client's own process: the tables of steps, which the daemon writes, the kernels that read them, in
host memory or on a GPU, and the mapping itself."""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvservice import ops
from kvservice.attention_options import AttentionOptions
from kvservice.client.connection import SessionConnection
from kvservice.client.messages import build
from kvservice.client.remote import Context
from kvservice.client.tensors import (
    GPU_ALIGNMENT,
    Tensor,
    as_bytes,
    current_stream,
    extension,
    overlap,
    pool_device,
    view,
)
from kvservice.client.values import PoolInfo, Sequence, StepInfo
from kvservice.errors import ConnectionLostError, FailedPreconditionError, InvalidArgumentError, StaleStepError
from kvservice.ops.cuda import set_options
from kvservice.pool.layout import DTYPES, PoolLayout
from kvservice.v1 import host_pb2
from kvservice.wire.tensors import Array

ALIGNMENT = 64
NUM_SLOTS = 1024


class OneStep(NamedTuple):
    """The tables of one token of each sequence, as `kvservice.ops` takes them: slot_mapping int64[n], query_lens
    int32[n], all 1, context_lens int32[n], block_tables int32[n, max_blocks]."""

    slot_mapping: Array
    query_lens: Array
    context_lens: Array
    block_tables: Array


class MappedStep:
    """A step's lengths, block tables and slot mapping as `kvservice.ops` takes them: slot_mapping int64[num_tokens],
    query_lens and context_lens int32[num_seqs], block_tables int32[num_seqs, max_blocks].

    They are views of the daemon's memory. They are valid as long as `check` does not raise: call it before they are
    used, and again when the operation that used them is done. Those of a step ahead are copies, because it is in use
    while it is committed, and the daemon's memory then has other tables.
    """

    def __init__(self, tables: mmap.mmap, step: StepInfo, block_size: int, check_process: Callable[[], None]) -> None:
        """`check_process` raises an error unless the process of the daemon that writes the tables is there. Raises
        FailedPreconditionError if the step is not in the tables, and StaleStepError if it is over."""
        if step.mapped is None:
            raise FailedPreconditionError(
                f"step {step.step_id} is not in the tables: they were full, or not mapped yet"
            )
        slot, begin = step.mapped
        self.step_id, self._ahead = step.step_id, step.ahead
        self._check_process = check_process
        self.written: set[int] = set()  # layers that the session's transport has written here
        self.max_query_len = int(step.query_lens.max())
        self._word: Array = np.frombuffer(tables, np.int64, 1, 8 * slot)
        self._run_word: Array = np.frombuffer(tables, np.int64, 1, 8 * (NUM_SLOTS + slot))
        self._run = int(self._run_word[0])
        num_seqs = len(step.query_lens)
        max_blocks = -(-int(step.context_lens.max()) // block_size)
        parts: tuple[tuple[tuple[int, ...], type], ...] = (
            ((step.num_tokens,), np.int64),
            ((num_seqs,), np.int32),
            ((num_seqs,), np.int32),
            ((num_seqs, max_blocks), np.int32),
        )
        offsets, end = [], 0
        for shape, dtype in parts:
            offsets.append(end)
            end += -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT
        self.bytes: Array = np.frombuffer(tables, np.uint8, end, begin)
        if step.ahead:
            self.bytes = self.bytes.copy()
        # The arrays with their byte offsets from the start of `bytes`.
        self.arrays_and_offsets: list[tuple[Array, int]] = [
            (np.ndarray(shape, dtype, self.bytes, offset), offset)
            for (shape, dtype), offset in zip(parts, offsets, strict=True)
        ]
        arrays = (array for array, _ in self.arrays_and_offsets)
        self.slot_mapping, self.query_lens, self.context_lens, self.block_tables = arrays
        if self._word[0] != self.step_id:  # a step that follows does not count here: it has other tables
            raise self._over()

    def ahead(self, number: int) -> OneStep:
        """Return the tables for token `number`, from 0, of each sequence in a step ahead. Raises InvalidArgumentError,
        and FailedPreconditionError for other steps."""
        if not self._ahead:
            raise FailedPreconditionError(f"step {self.step_id} is not ahead", field="step_id")
        num_steps = self.max_query_len
        if not 0 <= number < num_steps:
            raise InvalidArgumentError(f"{number} is not from 0 to {num_steps - 1}", field="number")
        slots = np.ascontiguousarray(self.slot_mapping.reshape(-1, num_steps)[:, number])
        context_lens = self.context_lens - np.int32(num_steps - 1 - number)
        return OneStep(slots, np.ones_like(context_lens), context_lens, self.block_tables)

    def check(self) -> None:
        """Raise StaleStepError if the step is over, since its blocks may have been reallocated; after a restart of the
        daemon, too. A step ahead is not over while one that follows it is live. Raise ConnectionLostError if the
        connection is broken, since the daemon may have ended."""
        word = self._word[0]  # before the run, because the daemon writes the run first
        if word != self.step_id and (word == 0 or self._run_word[0] != self._run):
            raise self._over()
        self._check_process()

    def _over(self) -> StaleStepError:
        return StaleStepError(
            f"step {self.step_id} ended with a newer operation on one of its sequences, or with the mapping",
            field="step_id",
        )


# ---- kernels


class HostKernels:
    """See MappedKernels. The host kernels are synchronous."""

    takes_gpu_tensors = False
    is_busy = False

    def __init__(self, info: PoolInfo, pool: Array) -> None:
        self.pool = pool
        self._batch_invariant = info.batch_invariant

    @staticmethod
    def open(info: PoolInfo, shape: tuple[int, ...], descriptor: int, num_bytes: int, writable: bool) -> HostKernels:
        """Map the pool from a file descriptor of its memory."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        memory = mmap.mmap(descriptor, num_bytes, prot=access)
        return HostKernels(info, np.ndarray(shape, DTYPES[info.kv_cache_dtype], memory))

    def write(self, tables: MappedStep, layer: int, key: Array, value: Array) -> None:
        ops.write_kv(self.pool, layer, tables.slot_mapping, key, value)

    def attend(
        self,
        tables: MappedStep,
        layer: int,
        query: Array,
        options: AttentionOptions,
        out: Array | None,
        lse_out: Array | None,
    ) -> tuple[Array, Array]:
        output, lse = ops.attention(
            self.pool,
            layer,
            query,
            tables.query_lens,
            tables.block_tables,
            tables.context_lens,
            scale=options.scale,
            sliding_window=options.sliding_window,
            logits_soft_cap=options.logits_soft_cap,
            alibi_slopes=options.alibi_slopes,
            batch_invariant=self._batch_invariant,
            out=out,
            return_lse=True,
        )
        if lse_out is None:
            return output, lse
        np.copyto(lse_out, lse)
        return output, lse_out

    def mark_launch(self) -> None:
        pass

    def wait(self) -> None:
        pass


# vert_stride, local_blocks, block_size, head_sliding_step, tp_rank
NO_SPARSE = (0, 0, 64, 0, 0)


class GpuKernels:
    """See MappedKernels. The kernels are launched on the current stream. The arguments are already validated: the
    daemon wrote the tables, and the transport has checked the tensors."""

    takes_gpu_tensors = True

    def __init__(self, info: PoolInfo, pool: Tensor) -> None:
        import torch

        from kvservice.ops.cuda import DTYPE_NUMBERS
        from kvservice.ops.torch_cuda import TensorWorkspace

        self.pool = pool
        self._new_workspace = TensorWorkspace
        self._cuda, self._torch = extension(), torch
        self._device = pool.get_device()
        self._torch_dtype = getattr(torch, info.dtype)
        self._num_kv_heads, self._head_size = info.num_kv_heads, info.head_size
        self._pool_address = pool.data_ptr()
        self._dtype = DTYPE_NUMBERS[info.dtype]
        self._default_scale = info.head_size**-0.5
        self._sizes = info.num_blocks, info.num_layers, info.num_kv_heads, info.head_size, info.block_size
        self._common = dict(zip(POOL_ATTRIBUTES, (pool.data_ptr(), self._dtype, *self._sizes), strict=True)) | {
            "dtype": self._dtype,
            "batch_invariant": info.batch_invariant,
        }
        self._step: _GpuStep | None = None
        # Workspaces by stream handle.
        self._workspaces: dict[int, Any] = {}
        # Numbers of the last launches on each stream, and of those that were waited for. Nothing is removed, so that a
        # thread can launch while another one waits.
        self._numbers = itertools.count()
        self._launched: dict[int, int] = {}
        self._waited: dict[int, int] = {}

    @staticmethod
    def open(info: PoolInfo, shape: tuple[int, ...], descriptor: int, num_bytes: int, writable: bool) -> GpuKernels:
        """Import the pool from a file descriptor of its memory."""
        cuda, device = extension(), pool_device(info)
        assert device is not None, "the pool is on a GPU"
        memory = cuda.ImportedMemory(device, descriptor, num_bytes, writable)
        return GpuKernels(info, view(as_bytes(memory, num_bytes, device), shape, info.kv_cache_dtype, 0))

    def write(self, tables: MappedStep, layer: int, key: Tensor, value: Tensor) -> None:
        self._write(*self._begin(tables), layer, key, value)

    def attend(
        self,
        tables: MappedStep,
        layer: int,
        query: Tensor,
        options: AttentionOptions,
        out: Tensor | None,
        lse_out: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if out is None:
            out = self._torch.empty_like(query)
        lse = query.new_empty(tuple(query.shape[:2]), dtype=self._torch.float32) if lse_out is None else lse_out
        if overlap(query, out):
            raise InvalidArgumentError("shares memory with query", field="out")
        slopes = None
        if options.alibi_slopes is not None:
            slopes = self._torch.from_numpy(options.alibi_slopes).to(self.pool.device)
        step, stream = self._begin(tables)
        call = step.call
        call.alibi_slopes = 0 if slopes is None else slopes.data_ptr()
        call.scale, call.sparse = self._default_scale, NO_SPARSE  # the previous call's options
        set_options(call, options)
        self._launch(step, stream, layer, query, out, lse.data_ptr())
        return out, lse

    def fits(self, num_tokens: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> bool:
        """Return whether `write_and_attend` accepts these tensors. They have not been validated before."""
        of_kv = num_tokens, self._num_kv_heads, self._head_size
        for tensor in (query, key, value, out):
            if not (isinstance(tensor, self._torch.Tensor) and tensor.is_cuda and tensor.is_contiguous()):
                return False
            if tensor.dtype is not self._torch_dtype or tensor.get_device() != self._device:
                return False
            if tensor.data_ptr() % GPU_ALIGNMENT:
                return False
        shape = query.shape
        if overlap(query, out) or not (key.shape == value.shape == of_kv and shape == out.shape and len(shape) == 3):
            return False
        rows, heads, size = shape
        return bool(rows == num_tokens and size == self._head_size and heads > 0 and heads % self._num_kv_heads == 0)

    def write_and_attend(
        self, tables: MappedStep, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        """Write the K/V of a layer, then compute attention with default options into `out`."""
        step, stream = self._begin(tables)
        self._write(step, stream, layer, key, value)
        call = step.call
        call.alibi_slopes, call.scale, call.sliding_window, call.soft_cap = 0, self._default_scale, 0, 0.0
        call.sparse = NO_SPARSE
        self._launch(step, stream, layer, query, out, 0)

    def _begin(self, tables: MappedStep) -> tuple[_GpuStep, int]:
        """Return the step with its tables on the device, copied once per step, and the current stream."""
        stream = self.mark_launch()
        self._cuda.set_device(self._device)
        if self._step is None or self._step.step_id != tables.step_id:
            self._step = _GpuStep(tables, self.pool.device, self._cuda.Attention(), self._common)
        return self._step, stream

    def _write(self, step: _GpuStep, stream: int, layer: int, key: Tensor, value: Tensor) -> None:
        pool = self._pool_address, self._dtype, *self._sizes
        tensors = step.slots, key.data_ptr(), value.data_ptr()
        self._cuda.write_kv(*pool, layer, step.num_tokens, *tensors, self._dtype, 0, 0, stream)

    def _launch(self, step: _GpuStep, stream: int, layer: int, query: Tensor, out: Tensor, lse: int) -> None:
        call = step.call
        call.layer, call.num_heads, call.stream = layer, query.shape[1], stream
        call.query, call.out, call.lse = query.data_ptr(), out.data_ptr(), lse
        call.workspace_bytes = call.wanted_workspace_bytes()
        if stream not in self._workspaces:
            self._workspaces[stream] = self._new_workspace(self.pool.device)
        call.workspace = self._workspaces[stream].reserve(call.workspace_bytes)
        call.launch()

    def mark_launch(self) -> int:
        """Say that kernels are launched on the current stream. Returns its handle."""
        stream = current_stream(self._device)
        self._launched[stream] = next(self._numbers)
        return stream

    @property
    def is_busy(self) -> bool:
        """Whether kernels were launched that no `wait` has waited for."""
        return self._launched != self._waited

    def wait(self) -> None:
        """Synchronize all streams with launches until now. The daemon may reuse the blocks of a step after the step has
        ended."""
        launched = dict(self._launched)
        for stream, number in launched.items():
            if self._waited.get(stream) != number:
                self._cuda.synchronize_stream(stream)
        self._waited = launched


# Attributes of `_cuda.Attention`, in the order of the arguments of `_cuda.write_kv`.
POOL_ATTRIBUTES = ("pool", "pool_dtype", "num_blocks", "num_layers", "num_kv_heads", "head_size", "block_size")


class _GpuStep:
    """A step's tables on the device, and an attention call with the parameters that all layers share."""

    def __init__(self, tables: MappedStep, device: Any, call: Any, common: dict[str, Any]) -> None:
        import torch

        self.step_id = tables.step_id
        self._memory = data = torch.from_numpy(np.array(tables.bytes)).to(device)
        tables.check()  # after the copy: the tables belonged to the step while they were copied
        offsets = (offset for _, offset in tables.arrays_and_offsets)
        self.slots, query_lens, context_lens, block_tables = (data.data_ptr() + offset for offset in offsets)
        self.num_tokens = len(tables.slot_mapping)
        values = common | {
            "query_lens": query_lens,
            "context_lens": context_lens,
            "block_tables": block_tables,
            "num_tokens": self.num_tokens,
            "num_seqs": len(tables.query_lens),
            "max_blocks": tables.block_tables.shape[1],
            "max_query_len": tables.max_query_len,
        }
        for name, value in values.items():
            setattr(call, name, value)
        self.call = call


# ---- the mapping


class HasStepInfo(Protocol):
    """A step of the sync or async API."""

    @property
    def info(self) -> StepInfo: ...
    @property
    def sequences(self) -> tuple[Sequence, ...]: ...


class MappedKernels(Protocol):
    """The kernels on a mapped pool. Tensors and tables are valid; options are those of AttentionOptions."""

    takes_gpu_tensors: bool
    pool: Tensor

    def write(self, tables: MappedStep, layer: int, key: Tensor, value: Tensor, /) -> None: ...

    def attend(
        self,
        tables: MappedStep,
        layer: int,
        query: Tensor,
        options: AttentionOptions,
        out: Tensor | None,
        lse_out: Tensor | None,
        /,
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp: `out` and `lse_out` if given, else new tensors."""

    def mark_launch(self) -> object:
        """Say that the caller launches kernels of its own on the pool, for `is_busy` and `wait`."""

    @property
    def is_busy(self) -> bool:
        """Whether launched work may still be running."""

    def wait(self) -> None:
        """Wait until all work that was launched until now is done."""


class MappedPool:
    """The pool and the session's tables, mapped into this process.

    `pool` is the array for `kvservice.ops`, or for a GPU the torch tensor for `kvservice.ops.torch_ops`. It is
    read-only unless it was mapped as writable; a GPU does not enforce this.

    Steps that the session opens after the mapping can be processed here. A step that is written here must be committed
    (`session.commit`); otherwise its blocks do not count as computed. On a GPU, synchronize before a call that ends the
    step, because its blocks may be reallocated then.
    """

    def __init__(
        self,
        layout: PoolLayout,
        kernels: MappedKernels,
        tables: mmap.mmap,
        writable: bool,
        connection: SessionConnection,
        num_restarts: int,
    ) -> None:
        """`num_restarts` is the connection's, from before the pool was mapped."""
        self.num_restarts = num_restarts
        self._connection = connection
        self.layout = layout
        self.writable = writable
        self.kernels = kernels
        self.pool = kernels.pool
        self._tables = tables
        self._steps: dict[int, MappedStep] = {}  # the last step of each slot of the tables

    @staticmethod
    async def open(context: Context, writable: bool, timeout_s: float | None = None) -> MappedPool:
        """Map the pool. Raises PoolNotSharedError, ConnectionLostError if the descriptors cannot be fetched, and for a
        pool on a GPU FailedPreconditionError."""
        return await context.connection.with_one_process(lambda: MappedPool._open(context, writable, timeout_s))

    @staticmethod
    async def _open(context: Context, writable: bool, timeout_s: float | None) -> MappedPool:
        info, connection = context.info, context.connection
        num_restarts = connection.num_restarts
        if (device := pool_device(info)) is not None:
            extension()
        request = build(host_pb2.MapPoolRequest, request_id=connection.next_request_id(), writable=writable)
        await context.fds.introduce_once()
        response = await connection.call("map_pool", request, timeout_s)
        layout = PoolLayout(info.num_layers, info.num_kv_heads, info.head_size, info.block_size, info.kv_cache_dtype)
        shape = (info.num_blocks, *layout.block_shape)
        descriptors = await context.fds.fetch(response.handover_token, 2)
        try:
            kernels: MappedKernels
            if device is None:
                kernels = HostKernels.open(info, shape, descriptors[0], response.pool_bytes, writable)
            else:
                kernels = GpuKernels.open(info, shape, descriptors[0], response.pool_bytes, writable)
            tables = mmap.mmap(descriptors[1], response.table_bytes, prot=mmap.PROT_READ)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return MappedPool(layout, kernels, tables, writable, connection, num_restarts)

    def step(self, step: HasStepInfo) -> MappedStep:
        """Return the tables of a step. Raises StaleStepError, and FailedPreconditionError if the step is not in the
        tables."""
        return self.tables(step.info)

    def tables(self, step: StepInfo) -> MappedStep:
        """See `step`."""
        if step.num_restarts != self.num_restarts:
            raise StaleStepError(
                f"step {step.step_id} or the mapping is of an earlier process of the daemon", field="step_id"
            )
        slot = -1 if step.mapped is None else step.mapped[0]
        found = self._steps.get(slot)
        if found is not None and found.step_id == step.step_id:
            found.check()
            return found
        found = MappedStep(self._tables, step, self.layout.block_size, self._check_process)
        found.check()  # before it replaces the step that has the slot now
        self._steps[slot] = found
        return found

    def begun_steps(self) -> list[MappedStep]:
        """Return the steps of which the session's transport has written some layers here, and not all."""
        return [step for step in self._steps.values() if 0 < len(step.written) < self.layout.num_layers]

    def _check_process(self) -> None:
        if self.num_restarts != self._connection.num_restarts:
            raise StaleStepError("the daemon was restarted: map the pool again")
        if not self._connection.connected:
            raise ConnectionLostError("the daemon may have ended, so that the step's tables are not kept current")
