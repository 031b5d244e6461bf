"""A caller's tensors, NumPy's or torch's, to arrays and back to the same kind."""

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
"""numpy.ndarray or torch.Tensor. torch is not imported for it."""


def as_tensor(tensor: Tensor, field: str) -> Tensor:
    """The tensor's elements, in its own memory where it is contiguous: an array, or, of a GPU, a torch tensor. Raises
    InvalidArgumentError."""
    array = _plain_on_gpu(tensor) if is_on_gpu(tensor) else _as_numpy(tensor, field)
    if dtype_name(array) not in TENSOR_DTYPES:
        raise InvalidArgumentError(f"is {array.dtype}, not one of {', '.join(TENSOR_DTYPES)}", field=field)
    return array


def _plain_on_gpu(tensor: Tensor) -> Tensor:
    """Contiguous, and aligned as the kernels read it."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.data_ptr() % GPU_ALIGNMENT == 0 else tensor.clone()


def as_result(tensor: Tensor, field: str) -> Tensor:
    """The tensor's own memory, for a result. Raises InvalidArgumentError where it has gaps."""
    array = as_tensor(tensor, field)
    if _is_torch(tensor) and address_of(array) != tensor.data_ptr():
        raise InvalidArgumentError("is not contiguous, or on a GPU not aligned to 16 bytes", field=field)
    return array


def as_array(tensor: Tensor) -> Array:
    """What `as_tensor` has returned, in host memory."""
    return _as_numpy(tensor.cpu(), "") if is_on_gpu(tensor) else tensor


def is_on_gpu(tensor: Tensor) -> bool:
    return not isinstance(tensor, np.ndarray) and _is_torch(tensor) and tensor.is_cuda


def device_of(tensor: Tensor) -> int:
    """The number of the GPU that it is on; -1: it is in host memory."""
    return int(tensor.get_device()) if is_on_gpu(tensor) else -1


def dtype_name(tensor: Tensor) -> str:
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    """Cached: NumPy takes microseconds to say it, and every call asks for several."""
    return str(dtype).removeprefix("torch.")


def address_of(tensor: Tensor) -> int | None:
    """Of the first element, if the elements lie in row-major order and without gaps. No memory of a GPU has an address
    that memory of the host has."""
    if isinstance(tensor, np.ndarray):
        return _ext.address_of(tensor)
    return int(tensor.data_ptr()) if tensor.is_contiguous() else None


def copy(target: Tensor, source: Tensor) -> None:
    """Elements into an array or tensor of that shape; on a GPU in the order of the current stream."""
    if isinstance(source, np.ndarray) and not isinstance(target, np.ndarray):
        source = _as_torch(source)
    target[...] = source


def copy_of(tensor: Tensor) -> Tensor:
    return tensor.copy() if isinstance(tensor, np.ndarray) else tensor.clone()


def from_message(message: tensor_pb2.Tensor, field: str) -> Array:
    """An array of its own memory."""
    return to_array(message, field).copy()


def like(array: Array, tensor: Tensor) -> Tensor:
    """The array; as a torch tensor, over its memory or on the GPU where `tensor` is, where `tensor` is one."""
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
    kind = getattr(sys.modules.get("torch"), "Tensor", None)  # none either while another thread is importing torch
    return kind is not None and isinstance(tensor, kind)
