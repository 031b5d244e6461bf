"""Operations in slices: an operation of unbounded size yields its thread to other work between slices.

Such an operation is a generator. It validates everything, in its first slice or in several, before it changes anything,
and cannot fail afterwards. The state is consistent at each `yield`. `finish` runs an operation without a pause.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator, Iterable, Iterator
from typing import Final, TypeAlias, TypeVar

import numpy as np

from kvservice.blocks.plans import Int64Array

T = TypeVar("T")
Slices: TypeAlias = Generator[None, None, T]
# Slices, some of which yield what the caller has to wait for before the next one.
Waits: TypeAlias = Generator[Awaitable[object] | None, None, T]

# Table entries, or blocks, per slice. A slice takes a few milliseconds.
SLICE_BLOCKS: Final = 16384
# Sequences that one slice processes one by one in Python.
SLICE_SEQUENCES: Final = 128
# Fixed cost of a sequence, in blocks.
_BLOCKS_PER_ROW: Final = 16


def finish(slices: Waits[T]) -> T:
    """Run all slices without a pause. Returns the operation's result. Nothing has to be waited for."""
    while True:
        try:
            event = next(slices)
            assert event is None, "the caller asked for an operation that does not wait"
        except StopIteration as end:
            result: T = end.value
            return result


def in_turn(items: Iterable[T]) -> Generator[None, None, list[T]]:
    """Collect the items, SLICE_SEQUENCES of them per slice. Returns the list of all items."""
    made: list[T] = []
    for item in items:
        if made and len(made) % SLICE_SEQUENCES == 0:
            yield
        made.append(item)
    return made


def cut(blocks: Int64Array) -> Iterator[Int64Array]:
    """Yield blocks int64[n] in slices; nothing if there are no blocks."""
    for first in range(0, len(blocks), SLICE_BLOCKS):
        yield blocks[first : first + SLICE_BLOCKS]


def cut_rows(rows: Int64Array, num_blocks: Int64Array) -> list[Int64Array]:
    """Split rows int64[n], n >= 1, into slices. Their tables have num_blocks int64[n] blocks."""
    costs = np.cumsum(num_blocks + _BLOCKS_PER_ROW)
    if costs[-1] <= SLICE_BLOCKS:
        return [rows]
    return np.split(rows, np.flatnonzero(np.diff(costs // SLICE_BLOCKS)) + 1)
