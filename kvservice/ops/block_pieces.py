"""Blocks in device memory whose bytes lie in pieces, for example one per layer, and their copies to and from host
memory, where a block is contiguous.

They pass through memory of the device: its copy engines move whole blocks over the link, and a kernel gathers and
scatters their pieces. So a copy costs the driver a call for each block, and the kernels that compute meanwhile little.
Work is enqueued on the given stream. Of a load all of it is at once; a save waits, so that at most the copies of two
parts are enqueued: the driver's queues are short, and hold up all threads when they are full.
"""

from __future__ import annotations

from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvservice.ops.cuda import HOST, DeviceArray, as_int, check_array, load_extension, require

# Addresses, strides and sizes are multiples of it.
ALIGNMENT = 16
# Numbers that a checksum is made of.
SUMS_PER_BLOCK = 16
# The most bytes of a block.
MAX_BLOCK_BYTES = 1 << 34
# Memory of the device through which blocks pass, for each direction. While the link moves one half, in about a
# millisecond, the kernel has time for the other.
STAGE_BYTES = 64 << 20


class PageLock(Protocol):
    """Pinned memory of this process."""

    def close(self) -> None:
        """Unlock the memory. No copy may use it any more."""


class StreamMark(Protocol):
    """A mark stands for the work that was on a stream when it was made."""

    def make_wait(self, stream: int) -> None:
        """Let what is put on another stream from now on wait for it."""

    def synchronize(self) -> None:
        """Wait for it."""


def stream_mark(stream: int, *, device: int) -> StreamMark:
    """Return a mark of what is on a stream now. No other thread gets the interpreter lock meanwhile."""
    mark: StreamMark = load_extension().StreamMark(device, stream)
    return mark


class BlockPieces:
    """`num_blocks` blocks of `block_bytes` bytes. `table` is int64[3, num_pieces] on the device: piece p of block b
    starts at the address table[0, p] + b * table[1, p], and ends before byte table[2, p] of the block. All numbers are
    multiples of 16. The content of the table is not checked. `stage_bytes`, a multiple of 64 KiB, are the memory of the
    device through which the blocks of one direction pass."""

    def __init__(self, table: DeviceArray, num_blocks: int, block_bytes: int, stage_bytes: int = STAGE_BYTES) -> None:
        """Raises InvalidArgumentError naming the argument, and the extension's CudaError if the device has too little
        memory."""
        check_array(table, "table", "int64", (3, None))
        require(table.device >= 0, "table", "is not on a device")
        require(table.shape[1] > 0, "table", "has no pieces")
        in_range = ALIGNMENT <= as_int(block_bytes, "block_bytes", 0) <= MAX_BLOCK_BYTES
        require(in_range and block_bytes % ALIGNMENT == 0, "block_bytes", "is not a multiple of 16 up to 16 GiB")
        self._table, self._num_blocks, self._block_bytes = table, as_int(num_blocks, "num_blocks", 1), block_bytes
        extension = load_extension()
        self._loads = extension.BlockStage(table.device, stage_bytes)
        self._saves = extension.BlockStage(table.device, stage_bytes)

    def load(self, addresses: npt.NDArray[np.uint64], block_ids: npt.NDArray[np.int64], *, stream: int) -> None:
        """Copy the values at `addresses` to blocks. Both are `[num_copies]`, in host memory, and not read after the
        call. The memory at the addresses is pinned, and may be read before the stream has reached this; no block may
        occur twice. All loads use the same stream."""
        _, *arguments = self._arguments(addresses, block_ids)
        self._loads.load(*arguments, stream)

    def save(
        self,
        addresses: npt.NDArray[np.uint64],
        block_ids: npt.NDArray[np.int64],
        *,
        sums: DeviceArray,
        checksums: DeviceArray,
        stream: int,
    ) -> npt.NDArray[np.intp]:
        """Copy blocks to `addresses`, the inverse of `load`, and write their checksums, which csrc/store/checksum.h
        defines, to `checksums`, int64[num_copies] in pinned memory. `sums` is int64[num_copies, 16], scratch
        memory on the device. No address may occur twice. All saves use the same stream. Returns the order of the
        checksums: of which copy each is."""
        check_array(sums, "sums", "int64", (block_ids.size, SUMS_PER_BLOCK), self._table.device)
        check_array(checksums, "checksums", "int64", (block_ids.size,))
        require(checksums.device == HOST, "checksums", "is not in host memory")
        order, *arguments = self._arguments(addresses, block_ids)
        self._saves.save(*arguments, sums.pointer, checksums.pointer, stream)
        return order

    def wait_for_copies(self) -> None:
        """Wait for all copies over the link, also those of a call that has failed in the middle."""
        self._loads.synchronize()
        self._saves.synchronize()

    def _arguments(
        self, addresses: npt.NDArray[np.uint64], block_ids: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.intp], int, int, int, npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """Return the copies by their addresses in host memory, where blocks that follow each other are one copy over
        the link, with the place of each."""
        for array, field, dtype in ((addresses, "addresses", np.uint64), (block_ids, "block_ids", np.int64)):
            require(
                isinstance(array, np.ndarray) and array.dtype == dtype, field, f"is not an array of {dtype.__name__}"
            )
            require(array.shape == (block_ids.size,), field, f"has shape {array.shape}, expected ({block_ids.size},)")
        inside = not block_ids.size or (block_ids.min() >= 0 and block_ids.max() < self._num_blocks)
        require(inside, "block_ids", f"are not all from 0 to {self._num_blocks - 1}")
        order = np.argsort(addresses)
        arrays = addresses[order], block_ids[order]
        return order, self._table.pointer, self._table.shape[1], self._block_bytes, *arrays


def page_lock(address: int, num_bytes: int, *, device: int, read_only: bool) -> PageLock | None:
    """Page-lock memory of this process for all devices until the result is closed. Memory that is mapped for reading
    only needs `read_only`. Returns None if the system refuses."""
    extension = use_device(device)
    try:
        lock: PageLock = extension.HostRegistration(address, num_bytes, read_only)
    except extension.CudaError:
        return None
    return lock


def use_device(device: int) -> ModuleType:
    """Make a device the current one of this thread. Otherwise CUDA would take memory of device 0 for it. Returns the
    extension."""
    extension = load_extension()
    extension.set_device(device)
    return extension
