"""A caller's NumPy or torch tensors: conversion to arrays, and of results to the same type; and views of GPU memory.

torch is imported only where a caller has done so. What needs CUDA needs torch and kvservice built with CUDA, which are
imported when they are used.
"""

from __future__ import annotations

import functools
import math
import sys
from types import ModuleType
from typing import Any

import numpy as np

from kvservice import _ext
from kvservice.client.values import PoolInfo
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.wire.tensors import Array

GPU_ALIGNMENT = 16
Tensor = Any
"""numpy.ndarray or torch.Tensor. It is Any, so that torch need not be imported."""


def as_tensor(tensor: Tensor, field: str) -> Tensor:
    """Convert to a NumPy array, or for a GPU to a contiguous torch tensor. A contiguous tensor is not copied, unless it
    is on a GPU and not aligned to 16 bytes. Raises InvalidArgumentError for other types and dtypes."""
    array = _plain_on_gpu(tensor) if is_on_gpu(tensor) else _as_numpy(tensor, field)
    if dtype_name(array) not in TENSOR_DTYPES:
        raise InvalidArgumentError(f"is {array.dtype}, not one of {', '.join(TENSOR_DTYPES)}", field=field)
    return array


def _plain_on_gpu(tensor: Tensor) -> Tensor:
    """Return the tensor contiguous and aligned for the kernels; copies it if needed."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % GPU_ALIGNMENT == 0 else tensor.clone()


def as_result(tensor: Tensor, field: str) -> Tensor:
    """Convert a tensor that receives a result, without a copy. Raises InvalidArgumentError if that is impossible: it is
    not contiguous, or on a GPU not aligned to 16 bytes."""
    array = as_tensor(tensor, field)
    if _is_torch(tensor) and address_of(array) != tensor.data_ptr():
        raise InvalidArgumentError("is not contiguous, or on a GPU not aligned to 16 bytes", field=field)
    return array


def as_array(tensor: Tensor) -> Array:
    """Convert a result of `as_tensor` to an array in host memory."""
    return _as_numpy(tensor.cpu(), "") if is_on_gpu(tensor) else tensor


def is_on_gpu(tensor: Tensor) -> bool:
    return not isinstance(tensor, np.ndarray) and _is_torch(tensor) and tensor.is_cuda


def is_plain_on_host(tensor: Tensor, dtype: str) -> bool:
    """Return whether this is a NumPy array or a torch tensor in host memory, with this dtype and without a gradient."""
    if isinstance(tensor, np.ndarray):
        return _name_of(tensor.dtype) == dtype
    if not _is_torch(tensor) or tensor.device.type != "cpu":
        return False
    return _name_of(tensor.dtype) == dtype and not tensor.requires_grad


def device_of(tensor: Tensor) -> int:
    """Return the number of the tensor's GPU, or -1 for host memory."""
    return int(tensor.get_device()) if is_on_gpu(tensor) else -1


def dtype_name(tensor: Tensor) -> str:
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    """Return the name of a dtype. It is cached because NumPy takes microseconds, and every call needs several names."""
    return str(dtype).removeprefix("torch.")


def address_of(tensor: Tensor) -> int | None:
    """Return the address of the first element of a contiguous (row-major) tensor, else None. Host and GPU memory never
    have the same addresses."""
    if isinstance(tensor, np.ndarray):
        return _ext.address_of(tensor)
    return int(tensor.data_ptr()) if tensor.is_contiguous() else None


def host_address(tensor: Any, field: str) -> int:
    """Return the address of a contiguous tensor in host memory. Raises InvalidArgumentError for anything else."""
    if not isinstance(tensor, np.ndarray):
        if not _is_torch(tensor):
            raise InvalidArgumentError(f"is {type(tensor).__name__}, not a NumPy array or a torch tensor", field=field)
        if tensor.device.type != "cpu":
            raise InvalidArgumentError(f"is on {tensor.device}, must be in host memory", field=field)
    address = address_of(tensor)
    if address is None:
        raise InvalidArgumentError("is not contiguous", field=field)
    return address


def copy(target: Tensor, source: Tensor) -> None:
    """Copy the elements of `source` into `target`, which has the same shape; on a GPU on the current stream."""
    if isinstance(source, np.ndarray) and not isinstance(target, np.ndarray):
        source = _as_torch(source)
    target[...] = source


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor.clone()


def like(array: Array, tensor: Tensor) -> Tensor:
    """Convert an array to the type and device of `tensor`. A torch tensor on the CPU shares the array's memory."""
    if not _is_torch(tensor) or not isinstance(array, np.ndarray):
        return array
    return _as_torch(array).to(tensor.device)


def _as_torch(array: Array) -> Any:
    torch = sys.modules["torch"]
    if array.dtype == TENSOR_DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_numpy(tensor: Tensor, field: str) -> Array:
    if isinstance(tensor, np.ndarray):
        return tensor
    if not _is_torch(tensor):
        raise InvalidArgumentError(f"is {type(tensor).__name__}, not a NumPy array or a torch tensor", field=field)
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise InvalidArgumentError(f"is on {tensor.device}, must be on the CPU or a CUDA device", field=field)
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(TENSOR_DTYPES["bfloat16"])
    array: Array = tensor.numpy()
    return array


def _is_torch(tensor: Tensor) -> bool:
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # None also while another thread imports torch
    return kind is not None and isinstance(tensor, kind)


# ---- GPU memory


OUT_OF_MEMORY = 2


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


def pool_device(info: PoolInfo) -> int | None:
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


def as_bytes(owner: Any, num_bytes: int, device: int) -> Tensor:
    """Return a torch tensor uint8[num_bytes] over the memory of `owner`, which has the attribute `pointer`."""
    import torch

    return torch.as_tensor(_Bytes(owner, num_bytes), device=f"cuda:{device}")


def view(data: Tensor, shape: tuple[int, ...], dtype: str, offset: int) -> Tensor:
    """Return a tensor over the bytes of `data` from byte `offset` on. `dtype` is a name as in PoolInfo."""
    import torch

    kind = getattr(torch, dtype)
    return data[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)


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
