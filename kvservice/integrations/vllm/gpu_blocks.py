"""The blocks of vLLM on a GPU, and their copies to and from page-locked memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvservice.integrations.vllm.layout import BlockLayout
from kvservice.ops import cuda
from kvservice.ops.block_pieces import ALIGNMENT, MAX_BLOCK_BYTES, SUMS_PER_BLOCK, BlockPieces, PageLock, page_lock
from kvservice.ops.device_array import HOST, DeviceArray

Numbers = npt.NDArray[np.uint64]
BlockIds = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Save:
    """A copy to host memory. It keeps the memory in which the GPU computes checksums."""

    event: torch.cuda.Event
    sums: torch.Tensor
    values: torch.Tensor

    def synchronize(self) -> None:
        """Wait for the end of the copy."""
        self.event.synchronize()

    def checksums(self) -> Numbers:
        """Return the checksum of each block, after the end of the copy."""
        return self.values.numpy().view(np.uint64)


class GpuBlocks:
    """Copies run on streams of their own, one for each direction. They begin after the computations of their `mark` and
    have ended when the event that they return has passed."""

    def __init__(self, layout: BlockLayout) -> None:
        self._device = layout.memories[0].device
        starts = [memory.data_ptr() + start for memory, start in zip(layout.memories, layout.starts, strict=True)]
        table = np.array([starts, layout.strides, np.cumsum(layout.piece_bytes)], np.int64)
        self._memories = layout.memories
        self._table = torch.from_numpy(table).to(self._device)
        self._pieces = BlockPieces(_array(self._table), layout.num_blocks, layout.block_bytes)
        self._loads = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._saves = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    @staticmethod
    def supports(layout: BlockLayout) -> bool:
        """Whether kvservice has its kernels, and the blocks are aligned as these need it."""
        addresses = [memory.data_ptr() + start for memory, start in zip(layout.memories, layout.starts, strict=True)]
        aligned = all(number % ALIGNMENT == 0 for number in (*addresses, *layout.strides, *layout.piece_bytes))
        one_device = len({memory.device for memory in layout.memories}) == 1
        return aligned and one_device and layout.block_bytes <= MAX_BLOCK_BYTES and cuda.available()

    def mark(self) -> torch.cuda.Event:
        """Return the computations that are queued now."""
        return self._event(torch.cuda.current_stream(self._device))

    def load(self, addresses: Numbers, block_ids: BlockIds, mark: torch.cuda.Event) -> torch.cuda.Event:
        """Fill blocks with the values at `addresses`."""
        self._loads.wait_event(mark)
        self._pieces.load(addresses, block_ids, stream=self._loads.cuda_stream)
        return self._event(self._loads)

    def save(self, addresses: Numbers, block_ids: BlockIds, mark: torch.cuda.Event) -> Save:
        """Copy blocks to `addresses`, and compute their checksums."""
        self._saves.wait_event(mark)
        with torch.cuda.stream(self._saves):
            sums = torch.empty((len(block_ids), SUMS_PER_BLOCK), dtype=torch.int64, device=self._device)
            checksums = torch.empty(len(block_ids), dtype=torch.int64, pin_memory=True)
        self._pieces.save(
            addresses, block_ids, sums=_array(sums), checksums=_array(checksums), stream=self._saves.cuda_stream
        )
        return Save(self._event(self._saves), sums, checksums)

    def settle(self) -> None:
        """Wait for all copies."""
        self._loads.synchronize()
        self._saves.synchronize()

    def page_lock(self, address: int, num_bytes: int, *, read_only: bool) -> PageLock | None:
        """Page-lock memory for copies. Returns None if the system refuses."""
        return page_lock(address, num_bytes, device=self._index, read_only=read_only)

    @property
    def _index(self) -> int:
        index = self._device.index
        assert index is not None, "the tensors are on a device"
        return index

    @staticmethod
    def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event


def _array(tensor: torch.Tensor) -> DeviceArray:
    """Describe a tensor of int64."""
    return DeviceArray(tensor.data_ptr(), tuple(tensor.shape), "int64", tensor.device.index if tensor.is_cuda else HOST)
