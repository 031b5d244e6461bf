"""How long blocks live, how long they lie idle before they are evicted, and how soon they are found again.

An operation only notes the times of its blocks. They are put into the histograms later, many at once, so that taking
and releasing blocks costs one array assignment each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvservice.blocks.plans import Int64Array, Zeros

LIFETIME, IDLE_BEFORE_EVICTION, REUSE_GAP = range(3)
NUM_HISTOGRAMS = 3
BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 14400, 86400)
# Notes that may wait for `fold`, and the blocks that they may be about.
_MAX_NOTES = 256
_MAX_NOTED_BLOCKS = 65536

Float64Array = npt.NDArray[np.float64]


class BlockAges:
    """taken_at and released_at float64[num_blocks], in the clock's seconds; counts int64[3, buckets + 1] and seconds
    float64[3] of the histograms, in the order of the constants above."""

    def __init__(self, num_blocks: int, clock: Callable[[], float], zeros: Zeros) -> None:
        self.taken_at: Float64Array = zeros("taken_at", (num_blocks,), np.float64)
        self.released_at: Float64Array = zeros("released_at", (num_blocks,), np.float64)
        self.counts: Int64Array = zeros("age_counts", (NUM_HISTOGRAMS, len(BUCKETS_S) + 1), np.int64)
        self.seconds: Float64Array = zeros("age_seconds", (NUM_HISTOGRAMS,), np.float64)
        self._clock = clock
        self._notes: list[tuple[int, Float64Array, float]] = []
        self._num_noted_blocks = 0

    def take(self, blocks: Int64Array) -> None:
        """They begin to live."""
        self.taken_at[blocks] = self._clock()

    def cache(self, blocks: Int64Array) -> None:
        """Nobody holds them any more, but they can be found."""
        self.released_at[blocks] = self._clock()

    def reuse(self, blocks: Int64Array) -> None:
        """Cached ones were found."""
        self._note(REUSE_GAP, self.released_at[blocks], self._clock())

    def evict(self, blocks: Int64Array) -> None:
        """Cached ones are given up for others."""
        now = self._clock()
        self._note(IDLE_BEFORE_EVICTION, self.released_at[blocks], now)
        self._note(LIFETIME, self.taken_at[blocks], now)

    def free(self, blocks: Int64Array) -> None:
        """They hold nothing any more."""
        self._note(LIFETIME, self.taken_at[blocks], self._clock())

    def _note(self, histogram: int, begun: Float64Array, now: float) -> None:
        self._notes.append((histogram, begun, now))
        self._num_noted_blocks += len(begun)
        if len(self._notes) > _MAX_NOTES or self._num_noted_blocks > _MAX_NOTED_BLOCKS:
            self.fold()

    def fold(self) -> None:
        """Put what was noted into the histograms."""
        notes, self._notes, self._num_noted_blocks = self._notes, [], 0
        for histogram in range(NUM_HISTOGRAMS):
            ages = [now - begun for which, begun, now in notes if which == histogram]
            if ages:
                seconds = np.concatenate(ages)
                buckets = np.searchsorted(BUCKETS_S, seconds)
                self.counts[histogram] += np.bincount(buckets, minlength=len(BUCKETS_S) + 1)
                self.seconds[histogram] += seconds.sum()
