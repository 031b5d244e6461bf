"""What of the client works on a GPU. It needs torch, whose tensors and streams it takes, and kvservice built with CUDA;
nothing else of the client imports either."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvservice.client.shared_memory import Memory
from kvservice.client.tensors import Tensor
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError

if TYPE_CHECKING:
    from kvservice.client.mapped import MappedStep
    from kvservice.client.transports import Layer
    from kvservice.client.values import PoolInfo

OUT_OF_MEMORY = 2


def extension() -> ModuleType:
    """Raises FailedPreconditionError where there is no CUDA, or no torch for it."""
    try:
        import torch

        from kvservice import _cuda
    except ImportError as error:
        raise FailedPreconditionError(f"tensors of a GPU need torch and kvservice built with CUDA: {error}") from None
    if not torch.cuda.is_available():
        raise FailedPreconditionError("torch finds no CUDA device")
    return _cuda


def device_of(info: PoolInfo) -> int | None:
    """The number of the GPU that the pool is on; None: it is in host memory."""
    kind, _, number = info.device.partition(":")
    return int(number or 0) if kind == "cuda" else None


class _Bytes:
    """Memory of a GPU as torch looks at it (__cuda_array_interface__); it keeps what owns the memory."""

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
    """See Memory. Of a GPU; arrays are torch tensors. What is computed into them need not be waited for."""

    def __init__(self, name: str, num_bytes: int, device: int) -> None:
        """Raises ResourceExhaustedError, InvalidArgumentError naming device, FailedPreconditionError."""
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


def launched_before(tensor: Tensor) -> Callable[[], None]:
    """Waits for what is launched by now on the current stream of the tensor's device, when it is called."""
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tensor.device))
    wait: Callable[[], None] = event.synchronize
    return wait


class GpuKernels:
    """The operations on a pool that is mapped, on the current stream. See `mapped.Kernels`."""

    takes_gpu_tensors = True

    def __init__(self, info: PoolInfo, pool: Tensor) -> None:
        from kvservice.ops import torch_cuda

        self.pool = pool
        self._ops = torch_cuda
        self._batch_invariant = info.batch_invariant
        self._tables: tuple[int, tuple[Tensor, ...]] | None = None
        self._wait: Callable[[], None] | None = None

    @staticmethod
    def open(info: PoolInfo, shape: tuple[int, ...], descriptor: int, num_bytes: int, writable: bool) -> GpuKernels:
        """Over the memory that the descriptor stands for."""
        cuda, device = extension(), device_of(info)
        assert device is not None, "the pool is on a GPU"
        memory = cuda.ImportedMemory(device, descriptor, num_bytes, writable)
        return GpuKernels(info, _view(_as_bytes(memory, num_bytes, device), shape, info.kv_cache_dtype, 0))

    def write(self, mapped: MappedStep, layer: int, key: Tensor, value: Tensor) -> None:
        slot_mapping, *_ = self._tables_of(mapped)
        self._ops.write_kv(self.pool, layer, slot_mapping, key, value)
        self._wait = launched_before(self.pool)

    def attend(self, mapped: MappedStep, layer: Layer, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        import torch

        _, query_lens, context_lens, block_tables = self._tables_of(mapped)
        if (slopes := options["alibi_slopes"]) is not None:
            options["alibi_slopes"] = torch.from_numpy(slopes).to(self.pool.device)
        out = torch.empty_like(layer.query) if layer.out is None else layer.out
        lse = layer.lse_out
        if lse is None:
            lse = layer.query.new_empty(layer.lse_shape, dtype=torch.float32)
        self._ops.attend(
            out,
            lse,
            self.pool,
            layer.number,
            layer.query,
            query_lens,
            block_tables,
            context_lens,
            **options,
            max_query_len=mapped.max_query_len,
            batch_invariant=self._batch_invariant,
        )
        self._wait = launched_before(self.pool)
        return out, lse

    def _tables_of(self, mapped: MappedStep) -> tuple[Tensor, ...]:
        """On the device, brought there once for a step."""
        if self._tables is None or self._tables[0] != mapped.step_id:
            import torch

            data = torch.from_numpy(np.array(mapped.bytes)).to(self.pool.device)
            mapped.check()  # what was copied was the step's
            tables = tuple(
                _view(data, array.shape, array.dtype.name, offset) for array, offset in mapped.arrays_and_offsets
            )
            self._tables = mapped.step_id, tables
        return self._tables[1]

    def wait(self) -> None:
        """Until what was launched is done: the daemon may do what it likes with a step's blocks when it has ended."""
        if self._wait is not None:
            self._wait()
            self._wait = None
