"""Ages of blocks, with an injected clock."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import pytest

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig
from kvservice.blocks.ages import BUCKETS_S, IDLE_BEFORE_EVICTION, LIFETIME, REUSE_GAP, BlockAges
from kvservice.blocks.plans import numpy_memory


class Pool:
    def __init__(self) -> None:
        self.now = 100.0
        config = BlocksConfig(num_blocks=4, block_size=2, watermark=0.0)
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
        ages = self.manager.state.device.ages
        ages.fold()
        counts = zip((*BUCKETS_S, float("inf")), ages.counts[which].tolist(), strict=True)
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
    now = [0.0]
    ages = BlockAges(100, lambda: now[0], numpy_memory)
    source = np.random.default_rng(0)
    expected = np.zeros(len(BUCKETS_S) + 1, np.int64)
    for _ in range(2000):
        blocks = source.choice(100, size=3, replace=False)
        ages.allocate(blocks)
        age = float(source.exponential(100))
        now[0] += age
        ages.free(blocks)
        expected[bisect_left(BUCKETS_S, now[0] - (now[0] - age))] += 3
    ages.fold()
    assert ages.counts[LIFETIME].tolist() == expected.tolist()
