"""The order of eviction, compared with a plain list."""

from __future__ import annotations

import random

import numpy as np

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig

NUM_BLOCKS = 14


def test_the_least_recently_used_are_evicted_and_of_a_prompt_the_deepest_first() -> None:
    """Over thousands of hits, so that records of earlier uses pile up and are dropped. Prompt n has n % 4 + 1 full
    blocks, and one token more."""
    manager = BlockManager(BlocksConfig(num_blocks=NUM_BLOCKS, block_size=2, watermark=0.0))
    space, choose = manager.open_namespace(), random.Random(0)
    cached: list[tuple[int, int]] = []
    num_evicted = 0
    for count in range(2500):
        # Long stretches have hits only.
        name = choose.randrange(12) if count % 500 < 100 else choose.randrange(2)
        num_full = name % 4 + 1
        (made,) = manager.allocate(space, [AllocationRequest(0, np.full(2 * num_full + 1, name))])
        hits = [entry for entry in cached if entry[0] == name]
        assert made.num_cached_tokens == 2 * len(hits)
        cached = [entry for entry in cached if entry[0] != name]
        lacking = max(num_full + 1 - len(hits) - (NUM_BLOCKS - len(cached) - len(hits)), 0)
        num_evicted += lacking
        del cached[:lacking]
        assert manager.stats().evicted_blocks == num_evicted
        manager.mark_all_layers(space, manager.open_step(space, [0]).step_id)
        manager.free(space, [0])
        cached += [(name, block) for block in reversed(range(num_full))]
        for other in choose.sample(range(12), 3):
            found = manager.match_prefix(np.full(2 * (other % 4 + 1), other))
            assert found == 2 * sum(entry[0] == other for entry in cached)
    manager.check_integrity()
    assert num_evicted > 100
