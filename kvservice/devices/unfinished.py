"""Blocks whose bytes are still being written, for a process that takes the pool over.

The bookkeeping is ahead of the bytes: it counts a block as moved when its copy is submitted, and a token as computed
when the last layer of its step is submitted. A block whose count is not zero when the process is killed may lack bytes.
"""

from __future__ import annotations

import threading

import numpy as np

from kvservice.blocks.plans import ArrayMemory
from kvservice.devices.base import Array, Int32

_ONE = np.int32(1)


class UnfinishedBlocks:
    """The number of operations in progress that write each block of a tier, int32 `[num_blocks]`, in kept memory."""

    def __init__(self, memory: ArrayMemory, name: str, num_blocks: int) -> None:
        """`name` is "unfinished_device" for the pool and "unfinished_swap" for the swap tier."""
        self.counts: Int32 = memory.kept(name, (num_blocks,), np.int32, private=True)
        self._lock = threading.Lock()

    def begin(self, blocks: Array) -> None:
        """Count an operation that writes these blocks, before the bookkeeping counts on it. A block may be repeated."""
        with self._lock:
            np.add.at(self.counts, blocks, _ONE)

    def end(self, blocks: Array) -> None:
        """End an operation, with the blocks that it began with. Any thread may call this."""
        with self._lock:
            np.subtract.at(self.counts, blocks, _ONE)
