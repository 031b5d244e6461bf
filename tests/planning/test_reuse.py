"""Stack distances against a cache that is simulated."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvservice.planning.reuse import accesses_of, hit_share, stack_distances
from kvservice.planning.trace import Trace, TracedRequest


def test_distances_of_a_small_example() -> None:
    accesses = np.array([1, 2, 3, 2, 1, 1, 3])
    assert stack_distances(accesses).tolist() == [-1, -1, -1, 2, 3, 1, 3]


@given(st.lists(st.integers(0, 9), max_size=70))
def test_distances_are_positions_in_the_list_of_latest_uses(accesses: list[int]) -> None:
    latest: list[int] = []
    expected = []
    for block in accesses:
        expected.append(latest.index(block) + 1 if block in latest else -1)
        if block in latest:
            latest.remove(block)
        latest.insert(0, block)
    assert stack_distances(np.array(accesses, np.int64)).tolist() == expected


def test_the_hit_share_grows_with_the_capacity() -> None:
    prompts = [(0, 1, 2), (0, 5, 6), (0, 1, 2)]
    trace = Trace("t", 10, tuple(TracedRequest(n, 30, 1, blocks, n) for n, blocks in enumerate(prompts)))
    distances = stack_distances(accesses_of(trace))
    # The third prompt needs all five blocks for its last two; the root comes last in each prompt.
    assert [hit_share(trace, distances, 10 * blocks) for blocks in (1, 2, 3, 4, 5)] == [0, 0, 2 / 9, 2 / 9, 4 / 9]
