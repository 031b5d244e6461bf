"""Values are written to the tiers before they are evicted, and nobody waits for that."""

from __future__ import annotations

import asyncio

import pytest
from blocks_rig import SLAB_BYTES, keys
from chain_rig import ChainRig, soon
from each_row import each_row

from kvservice.store import DONE, PRESENT
from kvservice.tiers import WritePolicy

# The pause after failures of a tier, between a change and a round, and after which a round runs anyway, in seconds.
PAUSE_S, ROUND_S, IDLE_S = 1.0, 0.02, 1.0
# A store of 8 slabs has room for 24 blocks. A seventh of the memory is kept ready for the next ones.
ROOM = 24


def full(**changes: object) -> ChainRig:
    rig = ChainRig(num_slabs=8, **changes)  # type: ignore[arg-type]
    rig.put(*range(ROOM))
    return rig


def test_the_coldest_values_are_written_before_they_are_evicted() -> None:
    rig = full()
    rig.in_memory(*range(ROOM - 6, ROOM))  # the first keys of a call are the newest: these were the coldest

    async def work() -> None:
        await rig.round()
        written = rig.below()
        assert 0 < len(written) <= 6
        assert written == list(range(ROOM - 6 - len(written), ROOM - 6))
        assert rig.store.totals().num_offered == len(written)
        rig.put(100)
        found = rig.store.lookup(rig.namespace, keys(*written))[1]
        assert int.from_bytes(found, "little").bit_count() == len(written) - 1, "one that was written is evicted"
        await rig.round()
        assert len(rig.below()) == len(written) + 1

    rig.run(work())
    assert rig.chain.stats()[0].dropped == 0


def test_a_store_with_room_writes_nothing() -> None:
    rig = ChainRig(num_slabs=8)
    rig.put(1, 2, 3)

    async def work() -> None:
        await rig.round()

    rig.run(work())
    assert rig.below() == []


def test_values_are_written_before_they_are_evicted_for_the_limit_of_a_tenant() -> None:
    rig = ChainRig(num_slabs=64)
    rig.store.tenant_limits = {"": 2 * SLAB_BYTES}

    async def work() -> None:
        for first in range(0, 30, 2):
            rig.put(first, first + 1)
            await rig.round()
        assert rig.in_memory(*range(30)) == list(range(24, 30))
        assert set(rig.below()) >= set(range(24))
        assert rig.chain.stats()[0].dropped == 0
        await rig.round()  # they were used
        rig.put(*range(100, 106))
        rig.put(*range(200, 206))
        await rig.round()
        assert rig.chain.stats()[0].dropped == 6

    rig.run(work())


def test_a_tier_that_is_not_open_drops_nothing() -> None:
    rig = full()
    rig.tier.state = "failed"

    async def work() -> None:
        await rig.round()
        rig.put(*range(100, 110))
        await rig.round()
        assert rig.chain.stats()[0].dropped == 0

    rig.run(work())


def test_nobody_waits_for_a_slow_tier() -> None:
    """What is evicted without having been offered is counted."""
    rig = full()

    async def work() -> None:
        gate = rig.tier.gates["put"] = asyncio.Event()
        await rig.round()
        assert set(rig.put(*range(100, 110))) == {1}
        gate.set()
        await rig.round()
        await rig.round()
        assert rig.chain.stats()[0].dropped > 0

    rig.run(work())


def test_values_that_the_rule_refuses_are_not_written() -> None:
    rig = full(policies={"fake0": WritePolicy("reused")})

    async def work() -> None:
        rig.in_memory(*range(ROOM))  # each is used once
        rig.put(*range(100, 100 + ROOM // 2))
        for _ in range(3):
            await rig.round()
        assert rig.below()
        assert all(number < ROOM for number in rig.below())
        rig.put(*range(200, 200 + 2 * ROOM // 3))
        for _ in range(9):
            await rig.round()

    rig.run(work())
    assert rig.chain.stats()[0].refused > 0
    assert all(number < ROOM for number in rig.below())


def test_values_that_the_tier_has_are_not_written_again() -> None:
    rig = full()
    rig.put_below(*range(ROOM))

    async def work() -> None:
        await rig.round()

    rig.run(work())
    assert "put" not in rig.tier.calls


def test_a_namespace_that_nobody_uses_is_written_as_a_whole() -> None:
    rig = ChainRig(num_slabs=8)
    rig.put(1, 2, 3)

    async def work() -> None:
        rig.store.leave(rig.namespace)
        await rig.round()
        assert rig.below() == [1, 2, 3]

    rig.run(work())


def test_while_a_tier_is_away_nothing_is_offered() -> None:
    rig = full()

    async def work() -> None:
        rig.tier.state = "opening"
        await rig.round()
        assert rig.store.totals().num_offered == 0
        rig.tier.state = "open"
        await rig.round()
        assert rig.below()

    rig.run(work())


def test_a_tier_is_told_what_was_removed_while_it_was_away() -> None:
    rig = ChainRig()
    rig.put_below(1, 2)

    async def work() -> None:
        rig.tier.state = "opening"
        await rig.chain.remove(rig.namespace, keys(1))
        rig.tier.state = "open"
        await rig.round()
        assert rig.below() == [2]

    rig.run(work())


# ---- tiers that get values soon


def test_a_shared_tier_gets_values_when_they_are_stored() -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.put(1, 2)
        await rig.round()
        assert rig.below() == [1, 2]
        rig.put(2, 3)
        await rig.round()
        assert rig.below() == [1, 2, 3]

    rig.run(work())


def test_a_value_that_is_put_again_is_written_where_it_is_missing_now() -> None:
    """Another daemon has removed it, the tier has evicted it, or its master was replaced by an empty one."""
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.put(1, 2)
        await rig.round()
        rig.tier.values.clear()
        assert rig.put(1) == bytes([PRESENT])
        await rig.round()
        assert rig.below() == [1]

    rig.run(work())


def test_a_value_that_is_put_after_its_removal_is_written_again() -> None:
    """It fails if the tier has not got it."""
    with each_row() as row:
        for how in ("remove", "clear"):
            with row(how):
                check_written_again(how)


def check_written_again(how: str) -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.put(1)
        await rig.round()
        if how == "remove":
            assert await rig.chain.remove(rig.namespace, keys(1)) == 1
        else:
            begun = rig.chain.begin_clear(rig.namespace)
            rig.store.remove(rig.namespace, keys(1))
            await rig.chain.finish_clear(begun)
        assert rig.below() == []
        assert rig.put(1) == bytes([DONE])
        await rig.round()
        assert rig.below() == [1]

    rig.run(work())


def test_a_value_that_could_not_be_written_is_written_when_it_is_put_again() -> None:
    """It fails if the tier has not got it."""
    with each_row() as row:
        for how in ("fails", "refuses", "suspended"):
            with row(how):
                check_written_later(how)


def check_written_later(how: str) -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.tier.is_full = how == "refuses"
        rig.tier.faults |= {"put"} if how != "refuses" else set()
        for number in range(3 if how == "suspended" else 1):
            rig.put(number)
            await rig.round()
        assert rig.below() == []
        assert (rig.chain.stats()[0].state == "suspended") == (how == "suspended")
        rig.tier.is_full = False
        rig.tier.faults.clear()
        rig.clock.advance(PAUSE_S)
        rig.put(0)
        await rig.round()
        assert rig.below() == [0]

    rig.run(work())


def test_a_value_that_was_evicted_while_it_waited_is_written_when_it_is_put_again() -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.tier.state = "opening"
        rig.put(1)
        rig.store.remove(rig.namespace, keys(1))
        rig.tier.state = "open"
        await rig.round()
        assert rig.below() == []
        rig.put(1)
        await rig.round()
        assert rig.below() == [1]

    rig.run(work())


def test_a_value_that_is_put_while_its_removal_is_not_done_is_written_after_it() -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.put(1, 2)
        await rig.round()
        gate = rig.tier.gates["remove"] = asyncio.Event()
        removal = asyncio.create_task(rig.chain.remove(rig.namespace, keys(1)))
        await soon()
        rig.put(1, 3)
        await rig.round()
        assert rig.below() == [1, 2, 3], "the removal has not reached the tier"
        gate.set()
        await removal
        assert rig.below() == [2, 3]
        await rig.round()
        assert rig.below() == [1, 2, 3]

    rig.run(work())


def test_a_value_waits_once() -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.tier.state = "opening"
        for _ in range(3):
            rig.put(1, 2)
        rig.tier.state = "open"
        await rig.round()
        assert rig.below() == [1, 2]
        assert (rig.tier.calls["lookup"], rig.tier.calls["put"]) == (1, 1)

    rig.run(work())


def test_a_value_that_is_removed_while_it_waits_is_not_written() -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        gate = rig.tier.gates["lookup"] = asyncio.Event()
        rig.put(1, 2)
        await rig.round()
        removal = asyncio.create_task(rig.chain.remove(rig.namespace, keys(1)))
        await soon()
        gate.set()
        await removal
        await soon()
        assert rig.below() == [2]

    rig.run(work())


def test_a_queue_that_is_full_drops_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.tiers.chain.MAX_QUEUED_KEYS", 2)
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.tier.state = "opening"
        rig.put(1, 2, 3)
        assert rig.chain.stats()[0].dropped == 1
        rig.tier.state = "open"
        await rig.round()
        assert rig.below() == [1, 2]

    rig.run(work())


def test_keys_of_a_namespace_that_gave_way_are_passed_over() -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)}, max_namespaces=1)

    async def work() -> None:
        rig.put(1)
        rig.store.leave(rig.namespace)
        rig.rig.open("another")
        await rig.round()
        assert rig.below() == []

    rig.run(work())


# ---- the loop, and its end


def test_rounds_begin_soon_after_a_change_and_now_and_then() -> None:
    rig = ChainRig(num_slabs=8, policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        rig.chain.start()
        await soon()
        rig.put(1)
        await soon()
        assert rig.below() == []
        rig.clock.advance(ROUND_S)
        await soon()
        assert rig.below() == [1]
        rig.tier.state = "opening"
        rig.put(2)
        rig.clock.advance(ROUND_S)
        await soon()
        rig.tier.state = "open"
        rig.clock.advance(IDLE_S)
        await soon()
        assert rig.below() == [1, 2]

    rig.run(work())


def test_many_new_bytes_begin_a_round_at_once() -> None:
    rig = full()

    async def work() -> None:
        rig.chain.start()
        await soon()
        rig.put(100, 101)
        await soon()
        assert rig.below()

    rig.run(work())


def test_a_flush_writes_all_of_the_memory() -> None:
    rig = full()

    async def work() -> None:
        await rig.chain.flush(10.0)
        assert rig.below() == list(range(ROOM))

    rig.run(work())


def test_a_flush_ends_in_time() -> None:
    rig = full()

    async def work() -> None:
        gate = rig.tier.gates["put"] = asyncio.Event()
        flushing = asyncio.create_task(rig.chain.flush(2.0))
        await soon()
        rig.clock.advance(1.9)
        await soon()
        assert not flushing.done()
        rig.clock.advance(0.2)
        await flushing
        gate.set()

    rig.run(work())


def test_a_small_part_of_the_memory_is_being_written() -> None:
    """Values that nobody uses any more make room for others while they are written."""
    rig = full()

    async def work() -> None:
        gate = rig.tier.gates["put"] = asyncio.Event()
        rig.store.leave(rig.namespace)
        await rig.round()
        assert 0 < rig.store.totals().num_leased <= ROOM // 4
        assert set(rig.put(*range(100, 110))) == {1}
        gate.set()
        await rig.round()

    rig.run(work())


def test_the_end_waits_for_writes_that_touch_the_memory() -> None:
    rig = full()

    async def work() -> None:
        rig.tier.gates["put"] = asyncio.Event()
        await rig.round()
        await rig.chain.close()
        assert rig.tier.is_closed
        assert rig.tier.touching == 0

    rig.run(work())
