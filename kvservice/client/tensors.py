"""A caller's tensors, NumPy's or torch's on the CPU, to arrays and back to the same kind."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvservice.errors import InvalidArgumentError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import tensor_pb2
from kvservice.wire.tensors import Array, to_array

Tensor = Any
"""numpy.ndarray or torch.Tensor. torch is not imported for it."""


def as_array(tensor: Tensor, field: str) -> Array:
    """The tensor's elements, in its own memory where it is contiguous. Raises InvalidArgumentError."""
    array = _as_numpy(tensor, field)
    if array.dtype not in TENSOR_DTYPES.values():
        raise InvalidArgumentError(f"is {array.dtype}, not one of {', '.join(TENSOR_DTYPES)}", field=field)
    return array


def as_result(tensor: Tensor, field: str) -> Array:
    """The tensor's own memory, for a result. Raises InvalidArgumentError where it has gaps."""
    array = as_array(tensor, field)
    if _is_torch(tensor) and array.ctypes.data != tensor.data_ptr():
        raise InvalidArgumentError("is not contiguous", field=field)
    return array


def from_message(message: tensor_pb2.Tensor, field: str) -> Array:
    """An array of its own memory."""
    return to_array(message, field).copy()


def like(array: Array, tensor: Tensor) -> Tensor:
    """The array; as a torch tensor over its memory where `tensor` is one."""
    if not _is_torch(tensor):
        return array
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
        raise InvalidArgumentError(f"is on {tensor.device}, must be on the CPU", field=field)
    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(TENSOR_DTYPES["bfloat16"])
    array: Array = tensor.numpy()
    return array


def _is_torch(tensor: Tensor) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)
