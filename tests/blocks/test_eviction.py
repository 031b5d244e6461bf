"""The order of eviction, compared with a plain list."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig, TenantQuota
from kvservice.errors import InternalError

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


def test_who_is_furthest_above_its_guaranteed_blocks_loses_cached_blocks_first() -> None:
    """And each loses its own oldest. Prompt n is a tenant's, and has n % 5 + 1 full blocks and one token more."""
    choose, guaranteed = random.Random(1), {"a": 0, "b": 8, "c": 30}
    manager = BlockManager(BlocksConfig(num_blocks=64, block_size=2, watermark=0.0))
    spaces = {name: manager.open_namespace() for name in guaranteed}
    for name, space in spaces.items():
        space.quota = TenantQuota(name, None, None)
    manager.set_tenants(guaranteed)

    def found(name: str, number: int) -> int:
        tokens = np.full(2 * (number % 5 + 1), number)
        return manager.match_prefix(tokens, ((0, name.encode()),)) // 2

    # The prompts of each tenant, the oldest first, and how many of their blocks are cached.
    cached: dict[str, dict[int, int]] = {name: {} for name in guaranteed}
    losers: Counter[str] = Counter()
    for _ in range(600):
        name, number = choose.choice("abbccc"), choose.randrange(30)
        num_full = number % 5 + 1
        hits = cached[name].pop(number, 0)
        before, num_evicted = {who: sum(own.values()) for who, own in cached.items()}, manager.stats().evicted_blocks
        prompt = AllocationRequest(0, np.full(2 * num_full + 1, number), ((0, name.encode()),))
        (made,) = manager.allocate(spaces[name], [prompt])
        assert made.num_cached_tokens == 2 * hits
        after = {who: sum(found(who, one) for one in own) for who, own in cached.items()}
        lost = {who: before[who] - after[who] for who in cached}
        assert sum(lost.values()) == manager.stats().evicted_blocks - num_evicted
        excess = {who: after[who] + hits * (who == name) - guaranteed[who] for who in cached}
        furthest = max((excess[who] for who in cached if after[who]), default=-64)
        for who, count in lost.items():
            assert not count or excess[who] >= furthest - 1
            for one in list(cached[who]):  # the oldest prompts lose their blocks, all but the last of these whole
                cached[who][one] -= (taken := min(count, cached[who][one]))
                count -= taken
                assert cached[who][one] == found(who, one)
                if not cached[who][one]:
                    del cached[who][one]
        losers.update(lost)
        manager.mark_all_layers(spaces[name], manager.open_step(spaces[name], [0]).step_id)
        manager.free(spaces[name], [0])
        cached[name][number] = num_full
    manager.check_integrity()
    assert min(losers[who] for who in guaranteed) > 50
    assert manager.device.owners is not None
    manager.device.owners.free(np.zeros(1, np.int64))
    with pytest.raises(InternalError, match="the counts of tenants' blocks are wrong"):
        manager.check_integrity()
