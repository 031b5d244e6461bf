"""The times at which decoding sequences got their latest tokens."""

from __future__ import annotations

import numpy as np

from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.blocks.pool import Float64Array


class TokenTimes:
    """Times in seconds of the sequences of a set, in their order.

    As a rule all sequences get a token in each step, so their times are equal: `_common` is that time then, and the
    array is not kept. It is None while the times differ.
    """

    def __init__(self, capacity: int) -> None:
        self._times = np.zeros(capacity, np.float64)
        self._common: float | None = None
        self._size = 0

    def add(self, time_s: float) -> None:
        if self._size == 0:
            self._common = time_s
        elif time_s != self._common:
            self._spread()
        if self._common is None:
            self._times[self._size] = time_s
        self._size += 1

    def keep(self, kept: BoolArray) -> None:
        """Remove the sequences that are not in `kept` bool[n]. The others keep their order."""
        size = int(np.count_nonzero(kept))
        if self._common is None:
            self._times[:size] = self._times[: self._size][kept]
        self._size = size

    def at(self, index: int) -> float:
        return float(self._times[index]) if self._common is None else self._common

    def advance(self, which: slice | Int64Array, count: int, now_s: float) -> float | Float64Array:
        """Set the times of `count` sequences to `now_s`.

        Returns the seconds since their times before: float64[count] in any order, or one number if they are equal.
        """
        if count == self._size:
            gaps = now_s - (self._times[:count] if self._common is None else self._common)
            self._common = now_s
            return gaps
        self._spread()
        gaps = now_s - self._times[which]
        self._times[which] = now_s
        return gaps

    def _spread(self) -> None:
        """Keep the time of each sequence from now on."""
        if self._common is not None:
            self._times[: self._size] = self._common
            self._common = None
