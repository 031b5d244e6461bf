"""Device arrays for tests without torch, from and to NumPy. Every array has its own allocation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvservice.ops.cuda import HOST, DeviceArray, Workspace

Array = npt.NDArray[Any]

# Fill byte of `out` before a call, and of the guards around it. It is NaN in every floating-point type.
POISON = 0xFF
GUARD_BYTES = 1024


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


class GpuMemory:
    """A stream, a workspace, and arrays that are freed at the end."""

    def __init__(self, device: int = 0) -> None:
        from kvservice import _cuda

        self.extension = _cuda
        self.device = device
        _cuda.set_device(device)
        self._stream = _cuda.Stream(device)
        self.stream = self._stream.handle
        self.workspace = Workspace(device, self.stream)
        self._allocations: list[int] = []
        self._guarded: list[DeviceArray] = []
        self._registrations: list[_cuda.HostRegistration] = []

    def __enter__(self) -> GpuMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except self.extension.CudaError:
            if kind is None:
                raise

    def upload(self, array: Array) -> DeviceArray:
        array = np.ascontiguousarray(array)
        there = self._allocate(array.shape, array.dtype.name, 0)
        if array.nbytes:
            self.extension.copy_async(there.pointer, array.ctypes.data, array.nbytes, self.stream)
            self.synchronize()
        return there

    def poisoned(self, shape: Sequence[int], dtype: str) -> DeviceArray:
        """Allocate an array filled with NaN, with the guards around it that `check_guards` checks."""
        there = self._allocate(tuple(shape), dtype, GUARD_BYTES)
        self._guarded.append(there)
        return there

    def download(self, there: DeviceArray) -> Array:
        array = np.empty(there.shape, numpy_dtype(there.dtype))
        if array.nbytes:
            self.extension.copy_async(array.ctypes.data, there.pointer, array.nbytes, self.stream)
        self.synchronize()
        return array

    def page_locked(self, array: Array) -> DeviceArray:
        """Pin the array's memory until the end."""
        assert array.flags.c_contiguous
        self._registrations.append(self.extension.HostRegistration(array.ctypes.data, array.nbytes))
        return DeviceArray(array.ctypes.data, array.shape, array.dtype.name, HOST)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def check_guards(self) -> None:
        """Raise AssertionError if anything was written next to a poisoned array."""
        for array in self._guarded:
            for first in (array.pointer - GUARD_BYTES, array.pointer + array.num_bytes):
                around = self.download(DeviceArray(first, (GUARD_BYTES // 4,), "int32", self.device))
                assert (around == -1).all(), f"written outside an array of shape {array.shape}"

    def release(self) -> None:
        self.synchronize()
        for registration in self._registrations:
            registration.close()
        for pointer in self._allocations:
            self.extension.free_async(pointer, self.stream)
        self.workspace.close()
        self.synchronize()
        self._allocations, self._registrations, self._guarded = [], [], []

    def _allocate(self, shape: tuple[int, ...], dtype: str, guard_bytes: int) -> DeviceArray:
        num_bytes = math.prod(shape) * numpy_dtype(dtype).itemsize + 2 * guard_bytes
        pointer = self.extension.allocate_async(max(num_bytes, 1), self.stream)
        self._allocations.append(pointer)
        self.extension.fill_async(pointer, POISON, num_bytes, self.stream)
        return DeviceArray(pointer + guard_bytes, shape, dtype, self.device)
