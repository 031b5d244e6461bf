"""A pool in host memory. It is a mapped memory file, so its descriptor can be passed to another process."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from kvservice.errors import ResourceExhaustedError
from kvservice.pool.available import available_bytes
from kvservice.pool.layout import PoolLayout
from kvservice.pool.sealed import SealedMemory


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
