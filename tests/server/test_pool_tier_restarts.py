"""Blocks that the pool has saved below: what a reset, a restart and a failing tier leave of them."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life
from fake_tier import FakeTier
from kept_files import HeldFiles, at_every_line
from manual_clock import ManualClock
from spill_rig import TOKENS, Start, add_tier, cached, computed, forget, run, save_all, tier_of

from kvservice.v1 import blocks_pb2

# Options with which a daemon has little state to copy.
FEW: dict[str, Any] = {"max_sessions": 4, "store_gib": 1 / 64}

# ---- reset


def test_what_is_reset_does_not_come_back(start_spilling: Start, clock: ManualClock) -> None:
    life = start_spilling(weights="w")
    tier = FakeTier(None)

    async def scenario() -> None:
        add_tier(life, tier, clock)
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        namespace = tier_of(life).namespace.find()
        missing = life.manager.loader.missing(np.array(TOKENS, np.int32), {}, np.zeros(0, np.int64), 100)
        keys = b"".join(life.manager.loader.chain_hashes(np.flatnonzero(life.manager.device.indexed)))
        assert missing is not None
        assert (await life.core.store.chain.put(namespace, keys)).all()  # type: ignore[union-attr]
        assert len(tier.values) == 10
        await life.call(session, "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        assert tier.values == {}
        assert await cached(life, session, TOKENS, 2) == 0

    run(scenario())


def test_a_load_that_a_reset_overtakes_is_not_published(start_spilling: Start) -> None:
    life = start_spilling()

    async def scenario() -> None:
        session = life.open()
        await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        right, gate, began = life.core.device.load_blocks, asyncio.Event(), asyncio.Event()

        async def late(*arguments: Any) -> Any:
            began.set()
            await gate.wait()
            return await right(*arguments)

        life.core.device.load_blocks = late  # type: ignore[method-assign]
        loading = asyncio.ensure_future(cached(life, session, TOKENS, 2))
        await began.wait()
        await life.call(session, "reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        gate.set()
        assert await loading == 0
        life.manager.check_integrity()

    run(scenario())


# ---- restarts and tiers below


def test_after_a_kill_what_was_saved_is_loaded(start_spilling: Start) -> None:
    held = HeldFiles()
    life = start_spilling(held)

    async def before() -> Any:
        session = life.open()
        kv = await computed(life, session, TOKENS)
        await save_all(life)
        await forget(life)
        return kv

    kv = run(before())
    life.kill()
    after = start_spilling(held)

    async def then() -> None:
        session = after.open()
        assert await cached(after, session, TOKENS, 2) == 40
        np.testing.assert_array_equal(await after.read(session, 2, 40), kv[:, :, :40])

    run(then())
    held.close()


@pytest.mark.parametrize("weights", ["w", ""])
def test_after_a_reboot_named_weights_come_from_the_tier_below(
    start_spilling: Start, clock: ManualClock, weights: str
) -> None:
    tier = FakeTier(None)
    life = start_spilling(weights=weights)

    async def before() -> Any:
        add_tier(life, tier, clock)
        session = life.open()
        kv = await computed(life, session, TOKENS)
        keys = b"".join(life.manager.loader.chain_hashes(np.flatnonzero(life.manager.device.indexed)))
        await save_all(life)
        await life.core.store.chain.put(tier_of(life).namespace.find(), keys)  # type: ignore[union-attr]
        return kv

    kv = run(before())
    rebooted = start_spilling(weights=weights)

    async def then() -> None:
        add_tier(rebooted, tier, clock)
        session = rebooted.open()
        assert await cached(rebooted, session, TOKENS, 2) == (40 if weights else 0)
        if weights:
            np.testing.assert_array_equal(await rebooted.read(session, 2, 40), kv[:, :, :40])

    run(then())


def test_a_tier_that_fails_is_a_miss(start_spilling: Start, clock: ManualClock) -> None:
    tier = FakeTier(None)
    tier.faults = {"lookup", "get"}
    life = start_spilling(weights="w")

    async def scenario() -> None:
        add_tier(life, tier, clock)
        session = life.open()
        assert await cached(life, session, TOKENS, 1) == 0
        assert tier.calls["lookup"] == 1

    run(scenario())


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_line_of_a_save_and_a_load(start_spilling: Start, stride: int) -> None:
    """Or at every ninth line."""
    held, lines = HeldFiles(), itertools.count()
    life = start_spilling(held, **FEW)
    states: dict[tuple[tuple[str, bytes], ...], None] = {}
    files = ("server/tiering/pool_tier.py", "blocks/loading.py", "store/store.py")

    def note() -> None:
        if next(lines) % stride == 0:
            states.setdefault(held.content())

    async def scenario() -> Any:
        session = life.open()
        kv = await computed(life, session, TOKENS[:21])
        with at_every_line(files, note):
            await save_all(life)
            await forget(life)
            assert await cached(life, session, TOKENS[:21], 2) == 20
        return kv

    kv = run(scenario())
    assert len(states) >= (8 if stride == 1 else 3)
    for state in states:
        copies = HeldFiles.of(state)
        again = start_spilling(copies, **FEW)

        async def then(again: Life = again) -> None:
            again.manager.check_integrity()
            session = again.open()
            num_cached = await cached(again, session, TOKENS[:21], 3)
            np.testing.assert_array_equal(await again.read(session, 3, num_cached), kv[:, :, :num_cached])
            assert again.core.store is not None
            assert again.core.store.blocks.totals().num_reserved == 0

        run(then())
        copies.close()
    held.close()
