"""Histograms of block lifetimes, of idle times before eviction, and of the time until a cached block is reused.

An operation only records the times of its blocks. `fold` adds many records to the histograms at once, so allocating or
releasing blocks costs one array assignment each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import ArrayMemory, Int64Array

LIFETIME, IDLE_BEFORE_EVICTION, REUSE_GAP = range(3)
NUM_HISTOGRAMS = 3
BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 14400, 86400)
# Limits on the records that wait for `fold`: their number, and the number of blocks in them.
_MAX_NOTES = 256
_MAX_NOTED_BLOCKS = 65536

Float64Array = npt.NDArray[np.float64]


class BlockAges:
    """Timestamps of blocks and histograms of their ages.

    `allocated_at` and `released_at` are float64[num_blocks] in seconds of the clock. `counts` int64[3, buckets + 1] and
    `seconds` float64[3] are the histograms, in the order of the constants above.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float], memory: ArrayMemory) -> None:
        self.allocated_at: Float64Array = memory.kept("allocated_at", (num_blocks,), np.float64)
        self.released_at: Float64Array = memory.kept("released_at", (num_blocks,), np.float64)
        self.counts: Int64Array = memory.zeros("age_counts", (NUM_HISTOGRAMS, len(BUCKETS_S) + 1), np.int64)
        self.seconds: Float64Array = memory.zeros("age_seconds", (NUM_HISTOGRAMS,), np.float64)
        self._clock = clock
        self._notes: list[tuple[int, Float64Array, float]] = []
        self._num_noted_blocks = 0

    def allocate(self, blocks: Int64Array) -> None:
        """Record the allocation of these blocks."""
        self.allocated_at[blocks] = self._clock()

    def cache(self, blocks: Int64Array) -> None:
        """Record that these blocks lost their last reference and are cached from now on."""
        self.released_at[blocks] = self._clock()

    def reuse(self, blocks: Int64Array) -> None:
        """Record a prefix-cache hit on these cached blocks."""
        self._note(REUSE_GAP, self.released_at[blocks], self._clock())

    def evict(self, blocks: Int64Array) -> None:
        """Record the eviction of these cached blocks."""
        now = self._clock()
        self._note(IDLE_BEFORE_EVICTION, self.released_at[blocks], now)
        self._note(LIFETIME, self.allocated_at[blocks], now)

    def free(self, blocks: Int64Array) -> None:
        """Record that these blocks were freed."""
        self._note(LIFETIME, self.allocated_at[blocks], self._clock())

    def _note(self, histogram: int, begun: Float64Array, now: float) -> None:
        self._notes.append((histogram, begun, now))
        self._num_noted_blocks += len(begun)
        if len(self._notes) > _MAX_NOTES or self._num_noted_blocks > _MAX_NOTED_BLOCKS:
            self.fold()

    def fold(self) -> None:
        """Add the pending records to the histograms."""
        notes, self._notes, self._num_noted_blocks = self._notes, [], 0
        for histogram in range(NUM_HISTOGRAMS):
            ages = [now - begun for which, begun, now in notes if which == histogram]
            if ages:
                seconds = np.concatenate(ages)
                buckets = np.searchsorted(BUCKETS_S, seconds)
                self.counts[histogram] += np.bincount(buckets, minlength=len(BUCKETS_S) + 1)
                self.seconds[histogram] += seconds.sum()
