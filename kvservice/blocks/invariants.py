"""Helpers of the integrity checks: assertions, and iteration in slices."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from kvservice.blocks.plans import Int64Array
from kvservice.errors import InternalError


def require(invariant: bool | np.bool_, broken: str) -> None:
    """Raise InternalError unless the invariant holds."""
    if not invariant:
        raise InternalError(f"integrity: {broken}")


def require_range(numbers: Int64Array, stop: int, what: str) -> None:
    """Check that each of `numbers` int64[n] is an index below `stop`, before they are used as indices."""
    require(((numbers >= 0) & (numbers < stop)).all(), f"{what} is not from 0 to {stop - 1}")


def parts(numbers: Iterable[int], size: int) -> Iterator[Int64Array]:
    """Yield the numbers in arrays int64[n], n <= `size`."""
    left = iter(numbers)
    while len(part := np.fromiter(itertools.islice(left, size), np.int64)):
        yield part


def windows(stop: int, size: int) -> Iterator[slice]:
    """Yield the range 0, ..., stop - 1 in slices of at most `size`."""
    for first in range(0, stop, size):
        yield slice(first, min(first + size, stop))


def pieces(
    rows: Int64Array, first: Int64Array, counts: Int64Array, size: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield the table entries first[i], ..., first[i] + counts[i] - 1 of each row, at most `size` at a time, as (row
    int64[m], entry int64[m])."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for window in windows(total, size):
        numbers = np.arange(window.start, window.stop)
        which = np.searchsorted(ends, numbers, side="right")
        yield rows[which], numbers - (ends - counts - first)[which]
