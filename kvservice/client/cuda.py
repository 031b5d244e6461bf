"""CUDA for the client: the extension, torch's streams, and views of GPU memory as torch tensors. Everything here needs
torch and kvservice built with CUDA, which are imported when they are used."""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

from kvservice.client.tensors import Tensor
from kvservice.client.values import PoolInfo
from kvservice.errors import FailedPreconditionError

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
