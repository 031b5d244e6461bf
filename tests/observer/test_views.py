"""Blocks, sequences and tables as read by the observer, compared with the bookkeeping."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from observed_pool import ObservedPool, RandomOperations
from page_pool import STATES

from kvservice.blocks import SequenceSnapshot
from kvservice.errors import InvalidArgumentError, UnknownSequenceError
from kvservice.observer.views import MAX_HOLDERS, MAX_TABLE

SEEDS = range(6)
Holder = tuple[int, str, int, int]


def described(pool: ObservedPool) -> Iterator[tuple[int, str, SequenceSnapshot]]:
    for session in pool.sessions:
        for info in pool.manager.describe(session.space, include_blocks=True):
            yield session.session_id, session.name, info


def holders_of(pool: ObservedPool, tier: str) -> dict[int, list[Holder]]:
    """Return the holders of each block, from the tables that clients get."""
    holders: dict[int, list[Holder]] = {}
    for session_id, name, info in described(pool):
        if info.swapped == (tier == "swap"):
            assert info.block_ids is not None
            for position, block in enumerate(info.block_ids.tolist()):
                holders.setdefault(block, []).append((session_id, name, info.sequence_id, position))
    return holders


def expected_states(pool: ObservedPool, tier: str, num_blocks: int) -> tuple[list[str], list[int]]:
    """Return the expected state of each block, from the tables, the prefix index and the pins."""
    counts = Counter({block: len(holders) for block, holders in holders_of(pool, tier).items()})
    findable = set(pool.manager.device.index.blocks.values()) if tier == "device" else set()
    states = []
    for block in range(num_blocks):
        if counts[block]:
            states.append("active" if counts[block] == 1 else "shared")
        elif block in findable:
            states.append("pinned" if pool.manager.pins.counts[block] else "cached")
        else:
            states.append("free")
    return states, [counts[block] for block in range(num_blocks)]


def assert_blocks(pool: ObservedPool, tier: str, num_blocks: int) -> None:
    states, ref_counts = expected_states(pool, tier, num_blocks)
    assert pool.views.blocks(tier, 0, num_blocks) == {"start": 0, "states": states, "ref_counts": ref_counts}
    assert pool.views.blocks(tier, 5, 4) == {"start": 5, "states": states[5:9], "ref_counts": ref_counts[5:9]}
    assert pool.views.blocks(tier, num_blocks - 2, 100)["states"] == states[-2:]
    holders = holders_of(pool, tier)
    for block in range(0, num_blocks, 3):
        found = asyncio.run(pool.views.block(tier, block))
        assert (found["tier"], found["block_id"]) == (tier, block)
        assert (found["state"], found["ref_count"]) == (states[block], ref_counts[block])
        told = [tuple(holder.values()) for holder in found["sequences"]]
        assert sorted(told) == sorted(holders.get(block, []))
        assert found["sequences_left_out"] == 0
        hashes: list[str | None] = [
            each.hex() for each, at in pool.manager.device.index.blocks.items() if at == block and tier == "device"
        ]
        assert [found["hash"]] == (hashes or [None])


def assert_map(pool: ObservedPool) -> None:
    pool_map = pool.views.map()
    assert (pool_map.group, pool_map.group_swap) == (1, 1)
    states, _ = expected_states(pool, "device", 40)
    cells = np.frombuffer(pool_map.device, np.uint8).reshape(40, len(STATES))
    assert cells.tolist() == [[255 * (state == name) for name in STATES] for state in states]
    _, ref_counts = expected_states(pool, "swap", 16)
    cells = np.frombuffer(pool_map.swap, np.uint8).reshape(16, 2)
    assert cells.tolist() == [[0, 255] if held else [255, 0] for held in ref_counts]


def assert_sequences(pool: ObservedPool) -> None:
    for session_id, name, info in described(pool):
        tier = "swap" if info.swapped else "device"
        assert info.block_ids is not None
        table = info.block_ids.tolist()
        states, ref_counts = expected_states(pool, tier, 40)
        assert pool.views.sequence(session_id, info.sequence_id) == {
            "session_id": session_id,
            "session_name": name,
            "sequence_id": info.sequence_id,
            "length": info.length,
            "computed": info.num_computed,
            "swapped": info.swapped,
            "tier": tier,
            "block_ids": table,
            "blocks_left_out": 0,
            "states": [states[block] for block in table],
            "ref_counts": [ref_counts[block] for block in table],
        }


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
def test_all_views_agree_with_the_bookkeeping_after_each_operation(seed: int) -> None:
    pool = ObservedPool()
    operations = RandomOperations(pool, seed)
    for number in range(300):
        operations.step()
        if number % 3 == 0:
            assert_blocks(pool, "device", 40)
            assert_blocks(pool, "swap", 16)
            assert_sequences(pool)
            assert_map(pool)


def test_the_random_operations_reach_every_state() -> None:
    seen: dict[str, set[str]] = {"device": set(), "swap": set()}
    done: set[str] = set()
    for seed in SEEDS:
        pool = ObservedPool()
        operations = RandomOperations(pool, seed)
        for _ in range(300):
            operations.step()
            seen["device"].update(expected_states(pool, "device", 40)[0])
            seen["swap"].update(expected_states(pool, "swap", 16)[0])
        done |= operations.done
    assert seen == {"device": set(STATES), "swap": {"free", "active", "shared"}}
    assert len(done) == 11


def test_the_ages_of_a_block() -> None:
    """Ages are the times since the allocation and since the last reference was dropped, at the time of the request."""
    pool = ObservedPool(clock=lambda: clock)
    clock = taken = time.monotonic() - 100
    session = pool.open()
    pool.compute(session, 1, list(range(8)))
    (block, _) = pool.views.sequence(1, 1)["block_ids"]

    def ages() -> tuple[Any, Any]:
        found = asyncio.run(pool.views.block("device", block))
        return found["age_s"], found["idle_s"]

    before = time.monotonic()
    age, idle = ages()
    assert before - taken <= age <= time.monotonic() - taken
    assert idle is None
    clock = released = taken + 60
    pool.manager.free(session.space, [1])
    for _ in range(2):  # cached, then pinned
        before = time.monotonic()
        age, idle = ages()
        assert before - taken <= age <= time.monotonic() - taken
        assert before - released <= idle <= time.monotonic() - released
        pool.manager.pin(session.space, list(range(8)), ttl_s=1e6)
    pool.manager.reset_prefix_cache()
    pool.close(session)  # and its pin
    pool.manager.reset_prefix_cache()
    assert ages() == (None, None)


def test_blocks_of_the_swap_tier_have_neither_age_nor_hash() -> None:
    pool = ObservedPool()
    session = pool.open()
    pool.compute(session, 1, list(range(8)))
    pool.manager.swap_out(session.space, [1])
    block = pool.views.sequence(1, 1)["block_ids"][0]
    found = asyncio.run(pool.views.block("swap", block))
    assert (found["state"], found["age_s"], found["idle_s"], found["hash"]) == ("active", None, None, None)


def test_holders_are_listed_up_to_a_limit() -> None:
    pool = ObservedPool(max_sequences=200)
    session = pool.open("name")
    pool.compute(session, 0, [1] * 5)
    for count in (MAX_HOLDERS, MAX_HOLDERS + 1, 150):
        made = len(session.space)
        pool.manager.fork(session.space, [0] * (count - made), list(range(made, count)))
        for position, block in enumerate(pool.views.sequence(1, 0)["block_ids"]):
            found = asyncio.run(pool.views.block("device", block))
            assert found["ref_count"] == count
            assert len(found["sequences"]) == MAX_HOLDERS
            assert found["sequences_left_out"] == count - MAX_HOLDERS
            assert {holder["position"] for holder in found["sequences"]} == {position}


def test_tables_are_listed_up_to_a_limit() -> None:
    beyond = 3
    pool = ObservedPool(num_blocks=MAX_TABLE + beyond, block_size=1, max_sequence_tokens=MAX_TABLE + beyond)
    session = pool.open()
    for sequence_id, length in ((1, MAX_TABLE), (2, MAX_TABLE + beyond)):
        pool.compute(session, sequence_id, [7] * length)
        (info,) = pool.manager.describe(session.space, [sequence_id], include_blocks=True)
        assert info.block_ids is not None
        found = pool.views.sequence(1, sequence_id)
        assert found["length"] == length
        assert found["block_ids"] == info.block_ids[:MAX_TABLE].tolist()
        assert len(found["states"]) == len(found["ref_counts"]) == MAX_TABLE
        assert found["blocks_left_out"] == length - MAX_TABLE
        pool.manager.free(session.space, [sequence_id])


def test_a_sequence_is_its_sessions_alone() -> None:
    pool = ObservedPool()
    one, two = pool.open("one"), pool.open("two")
    pool.compute(one, 7, [1] * 4)
    pool.compute(two, 7, [1] * 9)
    assert (pool.views.sequence(1, 7)["session_name"], pool.views.sequence(1, 7)["length"]) == ("one", 4)
    assert (pool.views.sequence(2, 7)["session_name"], pool.views.sequence(2, 7)["length"]) == ("two", 9)
    pool.manager.free(one.space, [7])
    for session_id, sequence_id in ((1, 7), (2, 8), (3, 7), (0, 0), (-1, -1), (2**62, 2**62)):
        with pytest.raises(UnknownSequenceError) as refused:
            pool.views.sequence(session_id, sequence_id)
        assert refused.value.field == "sequence_id"
    pool.close(two)
    with pytest.raises(UnknownSequenceError):
        pool.views.sequence(2, 7)


def test_what_cannot_be_is_refused() -> None:
    views = ObservedPool().views
    for tier, num_blocks in (("device", 40), ("swap", 16)):
        for start in (-1, num_blocks, 2**62):
            with pytest.raises(InvalidArgumentError, match=r"^start: "):
                views.blocks(tier, start, 1)
            with pytest.raises(InvalidArgumentError, match=r"^id: "):
                asyncio.run(views.block(tier, start))
        for count in (-1, 0, 4097):
            with pytest.raises(InvalidArgumentError, match=r"^count: "):
                views.blocks(tier, 0, count)
    with pytest.raises(InvalidArgumentError, match=r"^tier: "):
        views.blocks("disk", 0, 1)
    with pytest.raises(InvalidArgumentError, match=r"^tier: "):
        asyncio.run(views.block("", 0))


def test_without_a_swap_tier_it_has_no_blocks() -> None:
    views = ObservedPool(num_swap_blocks=0).views
    assert views.map().swap == b""
    with pytest.raises(InvalidArgumentError, match=r"^start: "):
        views.blocks("swap", 0, 1)
