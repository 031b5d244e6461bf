"""Concatenation of ranges of different lengths, for NumPy code over table entries and token positions."""

from __future__ import annotations

import numpy as np

from kvservice.blocks.plans import Int64Array


def ragged(starts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Concatenate the ranges starts[i], ..., starts[i] + counts[i] - 1.

    Returns (index i int64[sum(counts)], number int64[sum(counts)]).
    """
    if not np.count_nonzero(counts > 1):
        which = counts.nonzero()[0]
        return which, starts[which]
    ends = np.cumsum(counts)
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
