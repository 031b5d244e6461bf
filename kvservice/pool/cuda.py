"""A pool in GPU memory. It is exportable, so its descriptor can be passed to another process."""

from __future__ import annotations

from types import ModuleType

from kvservice.errors import ResourceExhaustedError
from kvservice.pool.layout import PoolLayout

# cudaErrorMemoryAllocation
OUT_OF_MEMORY = 2


class CudaPool:
    """A pool of `num_blocks` blocks of the layout at device address `pointer`. Its initial content is undefined."""

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
        self.pointer: int = self._memory.pointer

    def _too_large(self, free: int, total: int, field: str) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"{self.num_blocks} blocks of {self.layout.block_bytes} bytes take {self.num_bytes} bytes, the GPU has "
            f"{free} free of {total}",
            field=field,
            wanted=self.num_bytes,
            free=free,
            total=total,
        )

    def export(self) -> tuple[int, int]:
        """Return (a new descriptor of the memory, which the caller closes; the size in bytes)."""
        return self._memory.export_fd(), self._memory.num_bytes

    def close(self) -> None:
        self._memory.close()
