"""The order of eviction, compared with a plain list."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig, TenantQuota, numpy_memory
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


def cache(manager: BlockManager, tenant: str, num_blocks: int, number: int) -> None:
    """Let a tenant have so many more cached blocks, of a prompt with this number."""
    space = manager.open_namespace()
    space.quota = TenantQuota(tenant, None, None)
    manager.allocate(space, [AllocationRequest(0, np.full(2 * num_blocks, number), ((0, tenant.encode()),))])
    manager.mark_all_layers(space, manager.open_step(space, [0]).step_id)
    manager.close_namespace(space)


@pytest.mark.parametrize("num_tenants", [3, 9])
def test_the_coldest_blocks_are_those_that_are_lost_next(num_tenants: int) -> None:
    """In this order, also when the tenants have changed, and when several are lost at once."""
    choose, names = random.Random(num_tenants), [f"t{number}" for number in range(num_tenants)]
    manager = BlockManager(BlocksConfig(num_blocks=120, block_size=2, watermark=0.0))
    for count in range(12):
        names.append(names.pop(0))
        manager.set_tenants({name: choose.choice([0, 0, 5, 9]) for name in names})
        while manager.stats().free_blocks:
            most = min(choose.randint(1, 12), manager.stats().free_blocks)
            cache(manager, choose.choice(names[count % 2 :]), most, choose.randrange(1 << 20))
        order = manager.loader.coldest(120).tolist()
        assert len(order) == 120
        assert all(manager.loader.coldest(most).tolist() == order[:most] for most in range(1, 121, 7))
        manager.enter(None)
        for first, most in [*((number, 1) for number in range(60)), (60, 20), (80, 40)]:
            lost = manager.device.allocate(most).tolist()
            assert sorted(lost) == sorted(order[first : first + most])
        manager.device.decref(np.arange(120))
        manager.check_integrity()


class ReadStamps(npt.NDArray[np.int64]):
    """Stamps of the eviction queue, which count how many of them are read."""

    num_read: ClassVar[int] = 0

    def __getitem__(self, key: Any) -> Any:
        ReadStamps.num_read += np.size(key)
        return super().__getitem__(key).view(np.ndarray)


class CountingMemory:
    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return numpy_memory.zeros(name, shape, dtype)

    def kept(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike, *, private: bool = False) -> Any:
        array = numpy_memory.kept(name, shape, dtype, private=private)
        return array.view(ReadStamps) if name == "eviction_stamps" else array


def test_many_tenants_cost_no_more_reads_of_the_queue_than_few() -> None:
    config = BlocksConfig(num_blocks=1000, block_size=2, watermark=0.0, max_sequence_tokens=2000)
    manager = BlockManager(config, memory=CountingMemory())
    names = [f"t{number}" for number in range(100)]
    manager.set_tenants(dict.fromkeys(names, 0))
    for number, name in enumerate(names):
        cache(manager, name, 10, number)
    for num_lost in (100, 500):
        ReadStamps.num_read = 0
        assert len(manager.loader.coldest(num_lost)) == num_lost
        assert ReadStamps.num_read <= 2000
    ReadStamps.num_read = 0
    manager.allocate(manager.open_namespace(), [AllocationRequest(0, np.full(1000, 1 << 21))])
    assert 0 < ReadStamps.num_read <= 2000


@pytest.mark.parametrize(("num_tenants", "num_lost"), [(2, 14), (8, 40)])
def test_wrong_counts_end_an_eviction(num_tenants: int, num_lost: int) -> None:
    manager = BlockManager(BlocksConfig(num_blocks=8 * num_tenants, block_size=2, watermark=0.0))
    names = [f"t{number}" for number in range(num_tenants)]
    manager.set_tenants(dict.fromkeys(names, 0))
    for number, name in enumerate(names):
        cache(manager, name, 8, number)
    owners = manager.device.owners
    assert owners is not None
    owners.lose(1, -8)
    with pytest.raises(AssertionError, match="fewer blocks in the queue"):
        manager.device.allocate(num_lost)
