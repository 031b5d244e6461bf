"""Staging memory for tensors between host and device."""

from __future__ import annotations

import collections
import itertools
import mmap
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvservice.devices.base import Array

ALIGNMENT = 256


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def offsets_of(arrays: Iterable[Array]) -> list[int]:
    """Return the offsets of consecutive aligned arrays, and the end of the last one."""
    return list(itertools.accumulate((aligned(array.nbytes) for array in arrays), initial=0))


@dataclass(eq=False)
class StagingBuffer:
    """A range of the arena, on host and device, until it is released."""

    arena: Arena
    start: int
    released: bool = False

    @property
    def host_pointer(self) -> int:
        return self.arena.host_pointer + self.start

    @property
    def device_pointer(self) -> int:
        return self.arena.device_pointer + self.start

    def put(self, offset: int, array: Array) -> None:
        """Copy an array into the host side."""
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin = self.start + offset
        np.copyto(self.arena.host[begin : begin + flat.nbytes], flat)

    def get(self, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a copy of an array on the host side."""
        begin = self.start + offset
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.arena.host[begin : begin + num_bytes].copy().view(dtype).reshape(shape)

    def copy(self, offset: int, to: Array) -> None:
        """Copy an array on the host side to another one, which is contiguous."""
        begin = self.start + offset
        to.reshape(-1).view(np.uint8)[:] = self.arena.host[begin : begin + to.nbytes]


class Arena:
    """A ring buffer with a pinned host side and a device side. Buffers may be released in any order."""

    def __init__(self, cuda: ModuleType, device: int, num_bytes: int) -> None:
        self.num_bytes = aligned(num_bytes)
        self.host: Array = np.frombuffer(mmap.mmap(-1, self.num_bytes), np.uint8)
        self.host_pointer: int = self.host.ctypes.data
        self._registration = cuda.HostRegistration(self.host_pointer, self.num_bytes)
        self._memory = cuda.DeviceMemory(device, self.num_bytes)
        self.device_pointer: int = self._memory.pointer
        self._changed = threading.Condition()
        self._buffers: collections.deque[StagingBuffer] = collections.deque()
        self._head = 0

    def allocate(self, num_bytes: int) -> StagingBuffer:
        """Allocate a buffer. Blocks until there is room."""
        num_bytes = max(ALIGNMENT, aligned(num_bytes))
        assert num_bytes <= self.num_bytes, "the arena is sized for the largest call"
        with self._changed:
            self._changed.wait_for(lambda: self._place(num_bytes) is not None)
            start = self._place(num_bytes)
            assert start is not None
            buffer = StagingBuffer(self, start)
            self._buffers.append(buffer)
            self._head = start + num_bytes
            return buffer

    def has_room(self, num_bytes: int) -> bool:
        with self._changed:
            return self._place(aligned(num_bytes)) is not None

    def release(self, buffer: StagingBuffer) -> None:
        with self._changed:
            buffer.released = True
            while self._buffers and self._buffers[0].released:
                self._buffers.popleft()
            self._changed.notify_all()

    def _place(self, num_bytes: int) -> int | None:
        """Return an offset with `num_bytes` free bytes, after the newest buffer or else before the oldest one. None if
        there is no room."""
        if not self._buffers:
            return 0 if num_bytes <= self.num_bytes else None
        tail = self._buffers[0].start
        if tail < self._head:
            if self._head + num_bytes <= self.num_bytes:
                return self._head
            return 0 if num_bytes < tail else None
        return self._head if self._head + num_bytes < tail else None

    def close(self) -> None:
        self._registration.close()
        self._memory.close()
