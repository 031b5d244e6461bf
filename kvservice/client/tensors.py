"""Conversion of a caller's NumPy or torch tensors to arrays, and of results to the same type."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from kvservice import _ext
from kvservice.errors import InvalidArgumentError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import tensor_pb2
from kvservice.wire.tensors import Array, to_array

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
        return dtype_name(tensor) == dtype
    return (
        _is_torch(tensor) and tensor.device.type == "cpu" and dtype_name(tensor) == dtype and not tensor.requires_grad
    )


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


def from_message(message: tensor_pb2.Tensor, field: str) -> Array:
    """Copy a tensor message to a new array."""
    return to_array(message, field).copy()


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
