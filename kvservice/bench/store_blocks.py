"""The blocks that `bench store` moves."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class BlockBatch:
    """Blocks of random bytes, their keys, and an array for the blocks that are read."""

    def __init__(self, block_bytes: int, num_bytes: int) -> None:
        count = max(1, num_bytes // block_bytes)
        rng = np.random.default_rng(block_bytes)
        self.keys = [rng.bytes(32) for _ in range(count)]
        self.values = rng.integers(0, 256, (count, block_bytes), np.uint8)
        self.out = np.zeros_like(self.values)


class BlockWay(Protocol):
    """A way by which the blocks of a batch are put and got."""

    batch: BlockBatch

    def put(self) -> object:
        """Store the blocks, which are missing."""

    def get(self) -> object:
        """Copy the blocks to `batch.out`."""

    def empty(self) -> object:
        """Remove the blocks. This is not timed."""
