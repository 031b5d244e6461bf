"""Staging memory for tensors between host and device, and the tables of steps that pass through it."""

from __future__ import annotations

import collections
import itertools
import mmap
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from kvservice.blocks import StepPlan
from kvservice.devices.base import Array, Int32

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


# ---- lengths, block tables and slots of a step on the device. They are uploaded once for all layers.


def common_blocks(block_tables: Int32, most: int) -> int:
    """Return how many of the first `most` blocks are common to all of several tables. It reads few more entries than
    these."""
    start, width = 0, 1
    while len(block_tables) > 1 and start < most:
        end = min(start + width, most)
        same = (block_tables[1:, start:end] == block_tables[0, start:end]).all(axis=0)
        if not same.all():
            return start + int(same.argmin())
        start, width = end, 2 * width
    return start


class DeviceStepTables:
    """Addresses of a step's tables on the device, and the host's information about them."""

    def __init__(self, step: StepPlan, allocate: Callable[[int], int]) -> None:
        self.host_block_tables = step.block_tables  # gathered now, because they are valid only while the step is live
        self.written_blocks = step.slot_mapping // step.block_size
        self.num_seqs, self.max_blocks = self.host_block_tables.shape
        self.num_tokens = len(step.slot_mapping)
        self.max_query_len = int(step.query_lens.max())
        query_lens, context_lens = step.query_lens.astype(np.int64), step.context_lens.astype(np.int64)
        self.num_context_tokens = int(context_lens.sum())
        self.num_scores = int((query_lens * context_lens).sum())
        num_before = int((context_lens - query_lens).min()) // step.block_size
        self.num_common_blocks = common_blocks(self.host_block_tables, num_before)
        parts: list[Array] = [step.slot_mapping, step.query_lens, step.context_lens, self.host_block_tables]
        *offsets, self.num_bytes = offsets_of(parts)
        # Tables that are not uploaded yet, as (offset, array). The list is empty after the upload.
        self.pending = list(zip(offsets, parts, strict=True))
        self.pointer = allocate(self.num_bytes)
        addresses = (self.pointer + offset for offset, _ in self.pending)
        self.slots, self.query_lens, self.context_lens, self.block_tables = addresses

    @property
    def num_pending_bytes(self) -> int:
        return self.num_bytes if self.pending else 0


class LiveTables:
    """Tables of all steps that still exist. The memory of the others is freed in stream order."""

    def __init__(self, allocate: Callable[[int], int]) -> None:
        self._allocate = allocate
        self._tables: weakref.WeakKeyDictionary[StepPlan, DeviceStepTables] = weakref.WeakKeyDictionary()
        # A step may be collected on any thread. The next launch frees its memory, after all calls that use it.
        self.garbage: collections.deque[int] = collections.deque()

    def of(self, step: StepPlan) -> DeviceStepTables:
        tables = self._tables.get(step)
        if tables is None:
            tables = self._tables[step] = DeviceStepTables(step, self._allocate)
            weakref.finalize(step, self.garbage.append, tables.pointer).atexit = False
        return tables
