"""Blocks in device memory whose bytes lie in pieces, for example one per layer, and their copies to and from host
memory, where a block is contiguous.

Nothing is copied in between. Large pieces take the copy engines of the GPU, so that kernels that run meanwhile keep
all SMs; small pieces, for which these take too long, are copied by a kernel. All work is enqueued on the
given stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvservice.ops.cuda import load_extension
from kvservice.ops.device_array import HOST, DeviceArray, as_int, check_array, require

# Addresses, strides and sizes are multiples of it.
ALIGNMENT = 16
# Numbers that a checksum is made of.
SUMS_PER_BLOCK = 16
# The most bytes of a block.
MAX_BLOCK_BYTES = 1 << 34


class PageLock(Protocol):
    """Pinned memory of this process."""

    def close(self) -> None:
        """Unlock the memory. No copy may use it any more."""


@dataclass(frozen=True, eq=False)
class BlockPieces:
    """`num_blocks` blocks of `block_bytes` bytes. `table` is int64[3, num_pieces] on the device: piece p of block b
    starts at the address table[0, p] + b * table[1, p], and ends before byte table[2, p] of the block. All numbers are
    multiples of 16. The content of the table is not checked. `host_table` is the same in host memory; None: a kernel
    copies pieces of any size."""

    table: DeviceArray
    num_blocks: int
    block_bytes: int
    host_table: npt.NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        check_array(self.table, "table", "int64", (3, None))
        require(self.table.device >= 0, "table", "is not on a device")
        require(self.table.shape[1] > 0, "table", "has no pieces")
        as_int(self.num_blocks, "num_blocks", 1)
        if self.host_table is not None:
            same = self.host_table.dtype == np.int64 and self.host_table.shape == self.table.shape
            require(same, "host_table", "does not have the dtype and shape of the table")
        in_range = ALIGNMENT <= as_int(self.block_bytes, "block_bytes", 0) <= MAX_BLOCK_BYTES
        require(in_range and self.block_bytes % ALIGNMENT == 0, "block_bytes", "is not a multiple of 16 up to 16 GiB")

    def load(
        self,
        addresses: npt.NDArray[np.uint64],
        block_ids: npt.NDArray[np.int64],
        *,
        stream: int,
        at_once: bool = False,
    ) -> None:
        """Copy the values at `addresses` to blocks. Both are `[num_copies]`, in host memory, and not read after the
        call. The memory at the addresses is pinned; no block may occur twice. `at_once`: a kernel copies, because
        the caller has no time for a microsecond for each piece, and what computes waits for the load in any case."""
        arguments = self._arguments(addresses, block_ids)
        _extension(self.table.device).load_blocks(*arguments, stream, None if at_once else self._host_pieces)

    def save(
        self,
        addresses: npt.NDArray[np.uint64],
        block_ids: npt.NDArray[np.int64],
        *,
        sums: DeviceArray,
        checksums: DeviceArray,
        stream: int,
    ) -> None:
        """Copy blocks to `addresses`, the inverse of `load`, and write their checksums, which csrc/store/checksum.h
        defines, to `checksums`, int64[num_copies] in pinned memory. `sums` is int64[num_copies, 16], scratch
        memory on the device. No address may occur twice."""
        check_array(sums, "sums", "int64", (block_ids.size, SUMS_PER_BLOCK), self.table.device)
        check_array(checksums, "checksums", "int64", (block_ids.size,))
        require(checksums.device == HOST, "checksums", "is not in host memory")
        arguments = self._arguments(addresses, block_ids)
        extension = _extension(self.table.device)
        extension.save_blocks(*arguments, sums.pointer, checksums.pointer, stream, self._host_pieces)

    @property
    def _host_pieces(self) -> npt.NDArray[np.int64] | None:
        return None if self.host_table is None else np.ascontiguousarray(self.host_table).ravel()

    def _arguments(
        self, addresses: npt.NDArray[np.uint64], block_ids: npt.NDArray[np.int64]
    ) -> tuple[int, int, int, npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        for array, field, dtype in ((addresses, "addresses", np.uint64), (block_ids, "block_ids", np.int64)):
            require(
                isinstance(array, np.ndarray) and array.dtype == dtype, field, f"is not an array of {dtype.__name__}"
            )
            require(array.shape == (block_ids.size,), field, f"has shape {array.shape}, expected ({block_ids.size},)")
        inside = not block_ids.size or (block_ids.min() >= 0 and block_ids.max() < self.num_blocks)
        require(inside, "block_ids", f"are not all from 0 to {self.num_blocks - 1}")
        arrays = np.ascontiguousarray(addresses), np.ascontiguousarray(block_ids)
        return self.table.pointer, self.table.shape[1], self.block_bytes, *arrays


def page_lock(address: int, num_bytes: int, *, device: int, read_only: bool) -> PageLock | None:
    """Page-lock memory of this process for all devices until the result is closed. Memory that is mapped for reading
    only needs `read_only`. Returns None if the system refuses."""
    extension = _extension(device)
    try:
        lock: PageLock = extension.HostRegistration(address, num_bytes, read_only)
    except extension.CudaError:
        return None
    return lock


def _extension(device: int) -> ModuleType:
    """Return the extension, with the device current in this thread."""
    extension = load_extension()
    extension.set_device(device)
    return extension
