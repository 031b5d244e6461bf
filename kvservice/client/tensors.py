"""A caller's tensors, NumPy's or torch's on the CPU, to messages and back to the same kind."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from kvservice.client.shared_memory import FindPlace
from kvservice.errors import InvalidArgumentError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import tensor_pb2
from kvservice.wire.tensors import Array, put_tensor, put_type, to_array

Tensor = Any
"""numpy.ndarray or torch.Tensor. torch is not imported for it."""


def put(tensor: Tensor, message: tensor_pb2.Tensor, field: str, find_place: FindPlace) -> None:
    """Put a caller's tensor into a message's field: its bytes, or where in a region they lie."""
    array = _as_array(tensor, field)
    if array.dtype not in TENSOR_DTYPES.values():
        raise InvalidArgumentError(f"is {array.dtype}, not one of {', '.join(TENSOR_DTYPES)}", field=field)
    place = find_place(array)
    if place is None:
        put_tensor(array, message)
    else:
        put_type(array, message)
        message.shared_memory.CopyFrom(place)


def put_place(
    tensor: Tensor,
    shape: tuple[int, ...],
    dtype: str,
    message: tensor_pb2.SharedMemoryPlace,
    field: str,
    find_place: FindPlace,
) -> None:
    """Name a caller's tensor as the place of an output of this shape and type."""
    array = _as_array(tensor, field)
    if array.shape != shape or array.dtype != TENSOR_DTYPES[dtype]:
        raise InvalidArgumentError(
            f"is {array.dtype} of shape {list(array.shape)}, must be {dtype} of {list(shape)}", field=field
        )
    place = find_place(array)
    if place is None:
        raise InvalidArgumentError("does not lie in a region of this session, contiguous", field=field)
    message.CopyFrom(place)


def from_message(message: tensor_pb2.Tensor, like: Tensor, field: str) -> Tensor:
    """An array of its own memory; a torch tensor where `like` is one."""
    array = to_array(message, field).copy()
    if not _is_torch(like):
        return array
    torch = sys.modules["torch"]
    if array.dtype == TENSOR_DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _as_array(tensor: Tensor, field: str) -> Array:
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
