"""States of blocks, read from the daemon's shared memory, and the pool map."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.errors import InvalidArgumentError
from kvservice.telemetry.arrays import Arrays

MAX_CELLS = 4096
DEVICE, SWAP = "device", "swap"
STATES = ("free", "active", "shared", "cached", "pinned")
FREE, ACTIVE, SHARED, CACHED, PINNED = range(5)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PoolMap:
    """Map of both tiers, in cells of `group` and `group_swap` blocks. The last cell of a tier may have fewer blocks.

    `device` has five bytes per cell: the share of its blocks in each of STATES, as a fraction of 255. `swap` has two
    bytes per cell: free and held.
    """

    group: int
    group_swap: int
    device: bytes
    swap: bytes


class Blocks:
    """Reference counts and states of the blocks of both tiers."""

    def __init__(self, arrays: Arrays) -> None:
        self._ref_counts = {DEVICE: arrays["device_ref_count"], SWAP: arrays["swap_ref_count"]}
        self._indexed, self._pinned = arrays["indexed"], arrays["pinned"]

    def num_blocks(self, tier: str) -> int:
        return len(self._ref_counts[tier])

    def check_tier(self, tier: str) -> None:
        if tier not in self._ref_counts:
            raise InvalidArgumentError(f"{tier!r} is neither {DEVICE} nor {SWAP}", field="tier")

    def ref_counts(self, tier: str, blocks: Any) -> Any:
        """Return the reference counts of blocks, given as a slice, an array or a number."""
        return self._ref_counts[tier][blocks]

    def states(self, tier: str, blocks: Any = slice(None)) -> Bytes:
        """Return uint8[n], indices into STATES. A block of the swap tier is free, active or shared."""
        states: Bytes = np.minimum(self._ref_counts[tier][blocks], SHARED).astype(np.uint8)
        if tier == DEVICE:
            cached = (states == FREE) & self._indexed[blocks]
            states[cached] = CACHED
            states[cached & self._pinned[blocks]] = PINNED
        return states

    def map(self) -> PoolMap:
        group, device = self._cells(DEVICE, len(STATES))
        group_swap, swap = self._cells(SWAP, 2)
        return PoolMap(group, group_swap, device, swap)

    def _cells(self, tier: str, num_states: int) -> tuple[int, bytes]:
        states = np.minimum(self.states(tier), num_states - 1)
        group = max(1, -(-len(states) // MAX_CELLS))
        starts = np.arange(0, len(states), group)
        if not len(starts):
            return group, b""
        sizes = np.minimum(group, len(states) - starts)
        shares = np.empty((len(starts), num_states), np.uint8)
        for state in range(num_states):
            counts = np.add.reduceat(states == state, starts, dtype=np.int64)
            shares[:, state] = counts * 255 // sizes
        return group, shares.tobytes()
