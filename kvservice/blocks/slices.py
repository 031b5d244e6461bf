"""Work that grows with what it finds, done in slices: between two slices others may use the thread that does it.

Such an operation is a generator. It changes nothing before it has checked everything, in its first slice or in several,
and cannot fail afterwards; at each `yield` the bookkeeping is whole, and a caller who does not mind the time runs it to
its end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import Final, TypeAlias, TypeVar

import numpy as np

from kvservice.blocks.plans import Int64Array

T = TypeVar("T")
Slices: TypeAlias = Generator[None, None, T]

# Table entries, or blocks, of one slice: a few milliseconds.
SLICE_BLOCKS: Final = 16384
# Sequences of a batch that are looked at one by one in one slice.
SLICE_SEQUENCES: Final = 128
# What a sequence costs besides its blocks, in blocks.
_BLOCKS_PER_ROW: Final = 16


def finish(slices: Slices[T]) -> T:
    """Run to the end without a pause. Returns what the operation returns."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


def in_turn(items: Iterable[T]) -> Generator[None, None, list[T]]:
    """Makes as many items in each slice as it may look at. Returns the list of all."""
    made: list[T] = []
    for item in items:
        if made and len(made) % SLICE_SEQUENCES == 0:
            yield
        made.append(item)
    return made


def cut(blocks: Int64Array) -> Iterator[Int64Array]:
    """Blocks int64[n] in slices; none for no blocks."""
    for first in range(0, len(blocks), SLICE_BLOCKS):
        yield blocks[first : first + SLICE_BLOCKS]


def cut_rows(rows: Int64Array, num_blocks: Int64Array) -> list[Int64Array]:
    """Rows int64[n], n >= 1, whose tables have num_blocks int64[n], in slices."""
    costs = np.cumsum(num_blocks + _BLOCKS_PER_ROW)
    if costs[-1] <= SLICE_BLOCKS:
        return [rows]
    return np.split(rows, np.flatnonzero(np.diff(costs // SLICE_BLOCKS)) + 1)
