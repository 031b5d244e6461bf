"""Reuse distances of a trace: what share of the prompt tokens a cache of any capacity finds (Mattson's stack distances
of an LRU cache).

The blocks of a prompt are used from the last to the first, as the daemon evicts leaves before roots: a block that is
cached then has the blocks before it cached too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.planning.trace import Trace

Int64Array = npt.NDArray[np.int64]


def stack_distances(accesses: Int64Array) -> Int64Array:
    """Return for each access to a block the number of different blocks since the one before, with itself: the smallest
    capacity of an LRU cache that finds it. -1: it is the first access to the block."""
    previous = _previous(accesses)
    found = previous >= 0
    between = np.arange(len(accesses)) - previous
    # Blocks that are used twice in between count once: leave out accesses whose next one is in between too.
    return np.where(found, between - _greater_before(previous), -1)


def hit_share(trace: Trace, distances: Int64Array, capacity_tokens: float) -> float:
    """Return the share of prompt tokens that an LRU cache of this capacity finds."""
    hits = int(((distances > 0) & (distances <= capacity_tokens // trace.block_size)).sum())
    return hits * trace.block_size / max(1, trace.input_tokens)


def accesses_of(trace: Trace) -> Int64Array:
    """Return the blocks of all prompts in the order of their use."""
    return np.array([block for request in trace.requests for block in reversed(request.blocks)], np.int64)


def _previous(accesses: Int64Array) -> Int64Array:
    """Return the position of the access before to the same block, or -1."""
    order = np.argsort(accesses, kind="stable")
    previous = np.full(len(accesses), -1, np.int64)
    same = accesses[order[1:]] == accesses[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _greater_before(values: Int64Array) -> Int64Array:
    """Return for each value how many of those before it are greater, by merging sorted halves."""
    size = max(1, 1 << (len(values) - 1).bit_length()) if len(values) else 1
    counts = np.zeros(size, np.int64)
    # Padding lies at the end and is less than all, so that it counts for none.
    padded = np.full(size, -2, np.int64)
    padded[: len(values)] = values
    stride = size + 3  # the values of a pair of halves lie between those of its neighbours
    width = 1
    while width < size:
        halves = padded.reshape(-1, 2, width)
        pairs = np.arange(len(halves), dtype=np.int64)[:, None]
        left = np.sort(halves[:, 0], axis=1) + pairs * stride
        right = halves[:, 1] + pairs * stride
        not_greater = np.searchsorted(left.ravel(), right.ravel(), side="right").reshape(right.shape)
        counts.reshape(-1, 2, width)[:, 1] += (pairs + 1) * width - not_greater
        width *= 2
    return counts[: len(values)]
