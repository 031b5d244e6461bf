"""Ages of blocks, with an injected clock."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvservice.blocks import (
    AGE_BUCKETS_S,
    IDLE_BEFORE_EVICTION,
    LIFETIME,
    REUSE_GAP,
    AllocationRequest,
    BlockManager,
    BlocksConfig,
)


class Pool:
    def __init__(self, num_blocks: int = 4, **options: Any) -> None:
        self.now = 100.0
        config = BlocksConfig(num_blocks=num_blocks, block_size=2, watermark=0.0, **options)
        self.manager = BlockManager(config, clock=lambda: self.now)
        self.space = self.manager.open_namespace()

    def compute(self, sequence_id: int, tokens: list[int]) -> None:
        self.manager.allocate(self.space, [AllocationRequest(sequence_id, np.array(tokens, np.int32))])
        step = self.manager.open_step(self.space, [sequence_id])
        self.manager.mark_all_layers(self.space, step.step_id)

    def free(self, sequence_id: int) -> None:
        self.manager.free(self.space, [sequence_id])

    def histogram(self, which: int) -> tuple[dict[float, int], float]:
        """Return the counts of a histogram by upper bound, and the sum of its seconds."""
        ages = self.manager.device.ages
        self.manager.device.ages.fold()
        counts = zip((*AGE_BUCKETS_S, float("inf")), ages.counts[which].tolist(), strict=True)
        return {bound: count for bound, count in counts if count}, float(ages.seconds[which])


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_blocks_that_are_not_cached_live_until_they_are_freed(pool: Pool) -> None:
    pool.compute(1, [1])
    pool.now += 3
    pool.free(1)
    assert pool.histogram(LIFETIME) == ({5: 1}, 3.0)
    assert pool.histogram(IDLE_BEFORE_EVICTION) == ({}, 0.0)


def test_cached_blocks_live_until_they_are_evicted(pool: Pool) -> None:
    pool.compute(1, [1, 2, 3, 4])
    pool.now += 1
    pool.free(1)
    pool.now += 40
    assert pool.histogram(LIFETIME) == ({}, 0.0)
    pool.compute(2, [9, 9, 8, 8, 7, 7, 6, 6])
    assert pool.histogram(IDLE_BEFORE_EVICTION) == ({60: 2}, 80.0)
    assert pool.histogram(LIFETIME) == ({60: 2}, 82.0)


def test_what_is_found_again_ends_a_gap_and_not_a_life(pool: Pool) -> None:
    pool.compute(1, [1, 2, 3, 4, 5])
    pool.free(1)  # the last block, not full, ends here
    pool.now += 0.2
    pool.compute(2, [1, 2, 3, 4, 6])
    gaps, seconds = pool.histogram(REUSE_GAP)
    assert gaps == {0.5: 2}
    assert seconds == pytest.approx(0.4)
    pool.now += 7
    pool.free(2)
    pool.now += 1
    pool.manager.reset_prefix_cache()
    lifetimes, seconds = pool.histogram(LIFETIME)
    assert lifetimes == {0.01: 1, 10: 3}
    assert seconds == pytest.approx(0 + 7 + 8.2 * 2)


def test_what_is_shared_while_it_is_held_is_no_reuse(pool: Pool) -> None:
    pool.compute(1, [1, 2, 3])
    pool.compute(2, [1, 2, 4])
    assert pool.histogram(REUSE_GAP) == ({}, 0.0)


def test_folding_loses_nothing_however_much_waits() -> None:
    pool = Pool(100, enable_prefix_caching=False)
    source = np.random.default_rng(0)
    expected: Counter[float] = Counter()
    for number in range(2000):
        pool.compute(number, [1, 2, 3, 4, 5])
        before = pool.now
        pool.now += float(source.exponential(100))
        pool.free(number)
        expected[AGE_BUCKETS_S[bisect_left(AGE_BUCKETS_S, pool.now - before)]] += 3
    assert pool.histogram(LIFETIME)[0] == expected
