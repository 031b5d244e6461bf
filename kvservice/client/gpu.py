"""The GPU part of the client. It works on torch's tensors and streams, and needs torch and kvservice built with CUDA.
No other module of the client imports them."""

from __future__ import annotations

import functools
import math
from dataclasses import astuple
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvservice.client.shared_memory import Memory
from kvservice.client.tensors import GPU_ALIGNMENT, Tensor
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError

if TYPE_CHECKING:
    from kvservice.client.mapped import MappedStep
    from kvservice.client.transports import Layer
    from kvservice.client.values import PoolInfo

OUT_OF_MEMORY = 2
# vert_stride, local_blocks, block_size, head_sliding_step, tp_rank
NO_SPARSE = (0, 0, 64, 0, 0)


@functools.cache
def extension() -> ModuleType:
    """Return the CUDA extension. Raises FailedPreconditionError if it, torch or a CUDA device is missing."""
    try:
        import torch

        from kvservice import _cuda
    except ImportError as error:
        raise FailedPreconditionError(f"tensors of a GPU need torch and kvservice built with CUDA: {error}") from None
    if not torch.cuda.is_available():
        raise FailedPreconditionError("torch finds no CUDA device")
    return _cuda


def device_of(info: PoolInfo) -> int | None:
    """Return the number of the pool's GPU, or None for a pool in host memory."""
    kind, _, number = info.device.partition(":")
    return int(number or 0) if kind == "cuda" else None


class _Bytes:
    """GPU memory with __cuda_array_interface__, for torch. It keeps a reference to the owner of the memory."""

    def __init__(self, owner: Any, num_bytes: int) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (owner.pointer, False),
            "version": 3,
        }


def _as_bytes(owner: Any, num_bytes: int, device: int) -> Any:
    import torch

    return torch.as_tensor(_Bytes(owner, num_bytes), device=f"cuda:{device}")


def _view(data: Any, shape: tuple[int, ...], dtype: str, offset: int) -> Any:
    import torch

    kind = getattr(torch, dtype)
    return data[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


class GpuMemory(Memory):
    """See Memory. The memory is on a GPU and its arrays are torch tensors. A call may be
    made while kernels that write to them still run."""

    def __init__(self, name: str, num_bytes: int, device: int) -> None:
        """Allocate the memory. Raises ResourceExhaustedError, InvalidArgumentError naming `device`,
        FailedPreconditionError."""
        cuda = extension()
        if not 0 <= device < cuda.device_count():
            raise InvalidArgumentError(f"is {device}, there are {cuda.device_count()}", field="device")
        try:
            allocation = cuda.IpcAllocation(device, num_bytes)
        except cuda.CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise ResourceExhaustedError(f"the GPU has no {num_bytes} bytes left: {error}") from None
        super().__init__(name, num_bytes, allocation.pointer, None)
        self.handle: bytes = allocation.handle
        self._bytes = _as_bytes(allocation, num_bytes, device)

    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Tensor:
        try:
            if offset < 0:
                raise ValueError("the offset is negative")
            return _view(self._bytes, (shape,) if isinstance(shape, int) else tuple(shape), dtype, offset)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"does not fit into {self.num_bytes} bytes: {error}", field="shape") from None


def current_stream(device: int) -> int:
    """Return the handle of torch's current stream. `torch.cuda.current_stream` creates an object, which takes longer
    than a kernel launch."""
    import torch

    handle: int = torch._C._cuda_getCurrentRawStream(device)
    return handle


def finish_stream(tensor: Tensor) -> None:
    """Synchronize the current stream of the tensor's device."""
    extension().synchronize_stream(current_stream(tensor.get_device()))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return bool(first < second + other.nbytes and second < first + one.nbytes)


class GpuKernels:
    """See `mapped.Kernels`. Kernels on a mapped GPU pool, launched on the current stream. The arguments are already
    validated: the daemon wrote the tables, and the transport has checked the tensors."""

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
        # Streams with launches since the last `wait`.
        self._streams: set[int] = set()

    @staticmethod
    def open(info: PoolInfo, shape: tuple[int, ...], descriptor: int, num_bytes: int, writable: bool) -> GpuKernels:
        """Import the pool from a file descriptor of its memory."""
        cuda, device = extension(), device_of(info)
        assert device is not None, "the pool is on a GPU"
        memory = cuda.ImportedMemory(device, descriptor, num_bytes, writable)
        return GpuKernels(info, _view(_as_bytes(memory, num_bytes, device), shape, info.kv_cache_dtype, 0))

    def write(self, mapped: MappedStep, layer: int, key: Tensor, value: Tensor) -> None:
        self._write(*self._begin(mapped), layer, key, value)

    def attend(self, mapped: MappedStep, layer: Layer, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        query, out, lse = layer.query, layer.out, layer.lse_out
        if out is None:
            out = self._torch.empty_like(query)
        if lse is None:
            lse = query.new_empty(layer.lse_shape, dtype=self._torch.float32)
        if overlap(query, out):
            raise InvalidArgumentError("shares memory with query", field="out")
        slopes = options["alibi_slopes"]
        if slopes is not None:
            slopes = self._torch.from_numpy(slopes).to(self.pool.device)
        step, stream = self._begin(mapped)
        call = step.call
        call.alibi_slopes = 0 if slopes is None else slopes.data_ptr()
        call.scale = options["scale"] or self._default_scale
        call.sliding_window, call.soft_cap = options["sliding_window"], options["logits_soft_cap"]
        sparse = layer.options.block_sparse
        call.sparse = NO_SPARSE if sparse is None else astuple(sparse)
        self._launch(step, stream, layer.number, query, out, lse.data_ptr())
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
        self, mapped: MappedStep, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor
    ) -> None:
        """Write the K/V of a layer, then compute attention with default options into `out`."""
        step, stream = self._begin(mapped)
        self._write(step, stream, layer, key, value)
        call = step.call
        call.alibi_slopes, call.scale, call.sliding_window, call.soft_cap = 0, self._default_scale, 0, 0.0
        call.sparse = NO_SPARSE
        self._launch(step, stream, layer, query, out, 0)

    def _begin(self, mapped: MappedStep) -> tuple[_GpuStep, int]:
        """Return the step with its tables on the device, copied once per step, and the current stream."""
        stream = current_stream(self._device)
        self._streams.add(stream)
        self._cuda.set_device(self._device)
        if self._step is None or self._step.step_id != mapped.step_id:
            self._step = _GpuStep(mapped, self.pool.device, self._cuda.Attention(), self._common)
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

    def wait(self) -> None:
        """Synchronize all streams with launches. The daemon may reuse the blocks of a step after the step has ended."""
        while self._streams:
            self._cuda.synchronize_stream(self._streams.pop())


# Attributes of `_cuda.Attention`, in the order of the arguments of `_cuda.write_kv`.
POOL_ATTRIBUTES = ("pool", "pool_dtype", "num_blocks", "num_layers", "num_kv_heads", "head_size", "block_size")


class _GpuStep:
    """A step's tables on the device, and an attention call with the parameters that all layers share."""

    def __init__(self, mapped: MappedStep, device: Any, call: Any, common: dict[str, Any]) -> None:
        import torch

        self.step_id = mapped.step_id
        self._memory = data = torch.from_numpy(np.array(mapped.bytes)).to(device)
        mapped.check()  # after the copy: the tables belonged to the step while they were copied
        offsets = (offset for _, offset in mapped.arrays_and_offsets)
        self.slots, query_lens, context_lens, block_tables = (data.data_ptr() + offset for offset in offsets)
        self.num_tokens = len(mapped.slot_mapping)
        tables = {
            "query_lens": query_lens,
            "context_lens": context_lens,
            "block_tables": block_tables,
            "num_tokens": self.num_tokens,
            "num_seqs": len(mapped.query_lens),
            "max_blocks": mapped.block_tables.shape[1],
            "max_query_len": mapped.max_query_len,
        }
        for name, value in (common | tables).items():
            setattr(call, name, value)
        self.call = call
