"""Daemons without a server, whose pool spills to the block store and to tiers below it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from daemon_lives import Life
from fake_tier import FakeTier
from kept_files import HeldFiles
from manual_clock import ManualClock

from kvservice.tiers import TierChain
from kvservice.v1 import blocks_pb2

SIZE = 4
TOKENS = list(range(41))
# Loads are always worth it.
SLOW = {"prefill_tokens_per_s": 1.0}
# The pause before the next look at a pool in which nothing is to be saved.
LOOK_S = 0.05
Start = Callable[..., Life]


@pytest.fixture
def start_spilling(clock: ManualClock) -> Iterator[Start]:
    """Start processes of a daemon. Without `held` each has empty memory, as after a reboot."""
    opened: list[Life] = []

    def start_one(held: HeldFiles | None = None, **options: Any) -> Life:
        opened.append(Life(held or HeldFiles(), clock, **SLOW | options))
        return opened[-1]

    yield start_one
    for life in opened:
        life.kill()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def tier_of(life: Life) -> Any:
    assert life.pool_tier is not None
    return life.pool_tier


def add_tier(life: Life, tier: FakeTier, clock: ManualClock) -> None:
    """Put a tier below the store of a daemon."""
    store = life.core.store
    assert store is not None
    tier.memory = store.memory.map
    object.__setattr__(store, "chain", TierChain(store.blocks, [tier], clock))
    again = type(tier_of(life))(life.config, life.core.engine, store, clock)
    vars(tier_of(life)).update(vars(again))


async def save_all(life: Life) -> None:
    """Save everything that is to be saved."""
    while await tier_of(life).spiller.save_some() != LOOK_S:
        pass


async def forget(life: Life) -> None:
    """Let the pool evict everything."""
    life.manager.reset_prefix_cache()


async def computed(life: Life, session: Any, tokens: list[int], sequence_id: int = 1) -> Any:
    """Compute a sequence, read it back, and free it. Returns its K/V."""
    kv = await life.compute(session, sequence_id, tokens, seed=tokens[0])
    await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[sequence_id]))
    return kv


async def cached(life: Life, session: Any, tokens: list[int], sequence_id: int, *keys: tuple[int, bytes]) -> int:
    """Allocate a sequence. Returns how many of its tokens are cached."""
    extra = [blocks_pb2.ExtraKey(position=at, key=key) for at, key in keys]
    one = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=tokens, extra_keys=extra)
    response = await life.call(session, "allocate", blocks_pb2.AllocateRequest(sequences=[one]))
    count: int = response.num_cached_tokens[0]
    return count
