"""A pool in a GPU's memory, made so that it can be handed to another process as a descriptor."""

from __future__ import annotations

from types import ModuleType

from kvservice.errors import ResourceExhaustedError
from kvservice.pool.layout import PoolLayout

# cudaErrorMemoryAllocation
OUT_OF_MEMORY = 2


class CudaPool:
    """`num_blocks` blocks of the layout from `pointer` on. What they hold at first is not known."""

    def __init__(self, cuda: ModuleType, device: int, layout: PoolLayout, num_blocks: int, field: str) -> None:
        """Raises ResourceExhaustedError with the numbers, naming the option `field`, where there is not that much."""
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
        """A new descriptor of the memory, the caller's to close, and the bytes of all of it."""
        return self._memory.export_fd(), self._memory.num_bytes

    def close(self) -> None:
        self._memory.close()
