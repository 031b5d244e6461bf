"""Pools in host memory and in GPU memory. Their memory has a descriptor, which another process can map."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from kvservice.errors import ResourceExhaustedError
from kvservice.pool.layout import PoolLayout
from kvservice.pool.sealed import SealedMemory, available_bytes

# ---- in host memory: a mapped memory file


class MemorySource(Protocol):
    """Allocates zeroed memory, or opens that of an earlier process. Raises OSError."""

    def __call__(self, name: str, num_bytes: int, /, *, read_only: bool) -> SealedMemory: ...


class CpuPool:
    """A pool in host memory.

    `blocks` is an ndarray `[num_blocks, num_layers, 2, num_kv_heads, head_size * block_size]` of the layout's dtype.
    All memory is allocated up front, so no later write can run out of memory. `fd` is the descriptor for other
    processes, or -1 if there are no blocks. They can write through it only if the pool is `writable_by_others`.
    """

    def __init__(
        self,
        layout: PoolLayout,
        num_blocks: int,
        name: str = "pool",
        field: str = "num_blocks",
        *,
        writable_by_others: bool = False,
        allocate: MemorySource = SealedMemory,
    ) -> None:
        """`field` is the option that sets the size. Raises ResourceExhaustedError naming it."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes
        shape = (num_blocks, *layout.block_shape)
        if num_blocks == 0:
            self.fd = -1
            self.blocks: np.ndarray[Any, Any] = np.empty(shape, layout.numpy_dtype)
            return
        try:
            self._memory = allocate(name, self.num_bytes, read_only=not writable_by_others)
        except OSError as error:
            raise ResourceExhaustedError(
                f"{num_blocks} blocks of {layout.block_bytes} bytes take {self.num_bytes} bytes, "
                f"{available_bytes()} are available: {error.strerror}",
                field=field,
            ) from None
        self.fd = self._memory.shared_fd
        self.blocks = np.frombuffer(self._memory.map, layout.numpy_dtype).reshape(shape)


# ---- in GPU memory: its descriptor outlives the process


# cudaErrorMemoryAllocation
OUT_OF_MEMORY = 2


class CudaPool:
    """A pool of `num_blocks` blocks of the layout at device address `pointer`. Its initial content is undefined.

    `fd` is the descriptor of its memory, which has `mapped_bytes` bytes. Other processes import it.
    """

    def __init__(self, cuda: ModuleType, device: int, layout: PoolLayout, num_blocks: int, field: str) -> None:
        """Allocate the pool. Raises ResourceExhaustedError with the sizes, naming the option `field`, if the GPU does
        not have enough memory."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes
        free, total = cuda.memory_info(device)
        if self.num_bytes > free:
            raise self._too_large(free, total, field)
        try:
            self._memory = cuda.DeviceMemory(device, self.num_bytes)
        except cuda.CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free, total = cuda.memory_info(device)
            raise self._too_large(free, total, field) from None
        self.fd: int = self._memory.export_fd()
        self._opened()

    @classmethod
    def reopen(
        cls, cuda: ModuleType, device: int, layout: PoolLayout, num_blocks: int, fd: int, mapped_bytes: int
    ) -> CudaPool:
        """Map the pool of an earlier process, with its content. The result owns `fd`. Raises InvalidArgumentError if it
        is not memory of `mapped_bytes` bytes that this device can map."""
        pool = cls.__new__(cls)
        pool.layout = layout
        pool.num_blocks = num_blocks
        pool.num_bytes = num_blocks * layout.block_bytes
        pool.fd = fd
        pool._memory = cuda.ImportedMemory(device, fd, mapped_bytes, True)
        pool._opened()
        return pool

    def _opened(self) -> None:
        self.pointer: int = self._memory.pointer
        self.mapped_bytes: int = self._memory.num_bytes

    def _too_large(self, free: int, total: int, field: str) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"{self.num_blocks} blocks of {self.layout.block_bytes} bytes take {self.num_bytes} bytes, the GPU has "
            f"{free} free of {total}",
            field=field,
            wanted=self.num_bytes,
            free=free,
            total=total,
        )

    def close(self) -> None:
        """Unmap the pool. Its memory is free when no process has the descriptor any more."""
        os.close(self.fd)
        self._memory.close()
