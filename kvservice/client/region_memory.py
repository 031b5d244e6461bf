"""Memory that a session shares with the daemon: in the host, or on a GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np

from kvservice.client import cuda
from kvservice.client.tensors import Tensor, address_of
from kvservice.errors import InvalidArgumentError, ResourceExhaustedError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import tensor_pb2
from kvservice.wire.tensors import Array


class SharedRegion(ABC):
    """`num_bytes` of memory that is shared with the daemon. `create_region` and `open_region` of a session return it.

    Arrays and torch tensors over it (`array`, and views of those) can be passed wherever a step takes tensors, and as
    `out` and `lse_out`. After a call without an answer (CallTimeoutError, ConnectionLostError, cancellation) the daemon
    may read and write its tensors at any later time, so other calls need other memory. The memory is freed when the
    session has unregistered it and the last array over it is gone.
    `number` identifies the region in lane calls; None: lanes do not support it.
    """

    def __init__(self, name: str, num_bytes: int, address: int, number: int | None) -> None:
        self.name, self.num_bytes, self.number = name, num_bytes, number
        self.address = address

    @abstractmethod
    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Tensor:
        """Return an array over the memory from byte `offset` on. `dtype` is a name as in PoolInfo. Raises
        InvalidArgumentError."""

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the byte offset of a contiguous (row-major) tensor that lies entirely in this memory, else None."""
        address = address_of(tensor)
        if address is None or not tensor.nbytes:
            return None
        offset = address - self.address
        return offset if offset >= 0 and offset + int(tensor.nbytes) <= self.num_bytes else None


class HostRegion(SharedRegion):
    """See SharedRegion. The memory is host memory and its arrays are NumPy arrays."""

    def __init__(self, name: str, descriptor: int, num_bytes: int, number: int | None = None, offset: int = 0) -> None:
        """Map the memory. The caller still owns the descriptor. Raises OSError."""
        self._map = mmap.mmap(descriptor, offset + num_bytes)
        self._begin = offset
        self._file = _file_of(descriptor)
        super().__init__(name, num_bytes, np.frombuffer(self._map, np.uint8).ctypes.data + offset, number)

    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Array:
        """See SharedRegion. `dtype` may also be any dtype of NumPy."""
        kind = np.dtype(TENSOR_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        try:
            if offset < 0:
                raise ValueError("the offset is negative")
            return np.ndarray(shape, kind, self._map, self._begin + offset)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"does not fit into {self.num_bytes} bytes: {error}", field="shape") from None

    def make_private(self) -> None:
        """Replace the memory by a private view of itself: what this process writes from now on is not shared, so the
        daemon goes on seeing the bytes of now. Arrays over the memory keep their addresses and contents. Other threads
        may use them meanwhile. Raises OSError."""
        descriptor = next((number for number in _descriptors() if _file_of(number) == self._file), -1)
        start, length = self.address - self._begin, len(self._map)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        placed = _mmap(start, length, access, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0)
        if placed != start:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return what identifies the file of a descriptor, None if another thread has closed it."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _descriptors() -> list[int]:
    """Return the open descriptors. A mapping of the mmap module has one of its file."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


class GpuRegion(SharedRegion):
    """See SharedRegion. The memory is on a GPU and its arrays are torch tensors. A call may be made while kernels that
    write to them still run."""

    def __init__(self, name: str, num_bytes: int, device: int) -> None:
        """Allocate the memory. Raises ResourceExhaustedError, InvalidArgumentError naming `device`,
        FailedPreconditionError."""
        extension = cuda.extension()
        if not 0 <= device < extension.device_count():
            raise InvalidArgumentError(f"is {device}, there are {extension.device_count()}", field="device")
        try:
            allocation = extension.IpcAllocation(device, num_bytes)
        except extension.CudaError as error:
            if error.code != cuda.OUT_OF_MEMORY:
                raise
            raise ResourceExhaustedError(f"the GPU has no {num_bytes} bytes left: {error}") from None
        super().__init__(name, num_bytes, allocation.pointer, None)
        self.handle: bytes = allocation.handle
        self._bytes = cuda.as_bytes(allocation, num_bytes, device)

    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Tensor:
        try:
            if offset < 0:
                raise ValueError("the offset is negative")
            return cuda.view(self._bytes, (shape,) if isinstance(shape, int) else tuple(shape), dtype, offset)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"does not fit into {self.num_bytes} bytes: {error}", field="shape") from None


class RegionRange(NamedTuple):
    """The location of an array in a region, in bytes."""

    region: SharedRegion
    offset: int
    num_bytes: int

    def message(self) -> tensor_pb2.SharedMemoryPlace:
        return tensor_pb2.SharedMemoryPlace(region=self.region.name, offset=self.offset, byte_size=self.num_bytes)
