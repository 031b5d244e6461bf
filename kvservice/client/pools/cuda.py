"""Kernels on a mapped pool on a GPU. They work on torch's tensors and streams."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from kvservice.attention_options import AttentionOptions
from kvservice.client.cuda import as_bytes, current_stream, device_of, extension, overlap, view
from kvservice.client.pools.tables import MappedStep
from kvservice.client.tensors import GPU_ALIGNMENT, Tensor
from kvservice.client.values import PoolInfo
from kvservice.errors import InvalidArgumentError
from kvservice.ops.cuda import set_options

# vert_stride, local_blocks, block_size, head_sliding_step, tp_rank
NO_SPARSE = (0, 0, 64, 0, 0)


class GpuKernels:
    """See MappedKernels. The kernels are launched on the current stream. The arguments are already validated: the
    daemon wrote the tables, and the transport has checked the tensors."""

    takes_gpu_tensors = True

    def __init__(self, info: PoolInfo, pool: Tensor) -> None:
        import torch

        from kvservice.ops.device_array import DTYPE_NUMBERS
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
        cuda, device = extension(), device_of(info)
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
