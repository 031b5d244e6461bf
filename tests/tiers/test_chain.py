"""Values are found below memory, brought up, shared between requests, and removed everywhere."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from blocks_rig import SLAB_BYTES, keys
from chain_rig import ChainRig, soon
from each_row import each_row

from kvservice.tiers import WritePolicy

# A call of a tier that takes longer is a failure.
LIMIT_S = 10.0


def test_values_below_are_found_and_brought_up() -> None:
    rig = ChainRig()
    rig.put(1)
    rig.put_below(2, 3)

    async def work() -> None:
        assert await rig.lookup(1, 2, 4) == [1, 2]
        assert rig.in_memory(1, 2, 3, 4) == [1], "a lookup brings nothing up"
        assert await rig.bring_up(1, 2, 3, 4) == [1, 2, 3]
        assert rig.in_memory(1, 2, 3, 4) == [1, 2, 3]
        assert await rig.bring_up(1, 2, 3) == [1, 2, 3]

    rig.run(work())
    assert rig.tier.calls["get"] == 1
    stats = rig.chain.stats()[0]
    assert (stats.name, stats.state, stats.read_values, stats.read_bytes) == ("fake0", "open", 2, 2 * 4096)
    assert (stats.hits, stats.misses) == (3, 2)


def test_without_tiers_only_memory_counts() -> None:
    rig = ChainRig(num_tiers=0)
    rig.put(1)

    async def work() -> None:
        assert await rig.lookup(1, 2) == [1]
        assert await rig.bring_up(1, 2) == [1]
        assert await rig.chain.remove(rig.namespace, keys(1, 2)) == 1

    rig.run(work())


def test_leading_values_only() -> None:
    rig = ChainRig()
    rig.put(1)
    rig.put_below(2, 4)

    async def work() -> None:
        assert await rig.bring_up(1, 2, 3, 4, leading_only=True) == [1, 2]
        assert rig.in_memory(4) == []

    rig.run(work())


def test_the_second_tier_is_asked_for_what_the_first_lacks() -> None:
    rig = ChainRig(num_tiers=2)
    rig.put_below(1, 2, tier=0)
    rig.put_below(2, 3, tier=1)

    async def work() -> None:
        assert await rig.bring_up(1, 2, 3, 4) == [1, 2, 3]

    rig.run(work())
    assert [tier.batches for tier in rig.tiers] == [[2], [1]]


def test_requests_for_one_value_share_a_read() -> None:
    rig = ChainRig()
    rig.put_below(1, 2)

    async def work() -> None:
        gate = rig.tier.gates["get"] = asyncio.Event()
        calls = [asyncio.create_task(rig.bring_up(*numbers)) for numbers in ((1,), (1, 2), (2, 1), (2,))]
        await soon()
        gate.set()
        assert [await call for call in calls] == [[1], [1, 2], [2, 1], [2]]

    rig.run(work())
    assert rig.chain.stats()[0].read_values == 2


def test_what_was_brought_up_stays_until_the_last_request_has_it() -> None:
    """Memory has room for two slabs of three blocks, and others fill it meanwhile."""
    rig = ChainRig(num_slabs=2)
    rig.put_below(1, 2, 3)

    async def work() -> None:
        gates = rig.tier.gates["get"] = asyncio.Event()
        call = asyncio.create_task(rig.chain.bring_up(rig.namespace, keys(1, 2, 3)))
        await soon()
        gates.set()
        await soon()
        rig.put(*range(10, 20))
        pinned = await call
        assert pinned.num_blocks == 3
        rig.put(*range(20, 30))
        assert rig.in_memory(1, 2, 3) == [1, 2, 3]
        rig.store.release(pinned.slots)

    rig.run(work())


def test_more_values_than_memory_has_room_for() -> None:
    """At most half of the memory is reserved for reads; the first values come first."""
    rig = ChainRig(num_slabs=2)
    rig.put_below(*range(20))

    async def work() -> None:
        assert await rig.bring_up(*range(20)) == [0, 1, 2, 3]

    rig.run(work())


def test_more_values_than_the_tenant_may_have() -> None:
    """The first ones come up."""
    rig = ChainRig(num_slabs=64)
    rig.put_below(*range(10))
    rig.store.tenant_limits = {"": 2 * SLAB_BYTES}

    async def work() -> None:
        assert await rig.bring_up(*range(10)) == list(range(6))
        assert await rig.bring_up(6, 7) == [6, 7], "others are evicted for them"
        assert rig.store.bytes_by_tenant() == {"": 2 * SLAB_BYTES}
        held = rig.store.acquire(rig.namespace, keys(*rig.in_memory(*range(10))))
        assert held.num_blocks == 6
        assert await rig.bring_up(8, 9) == []
        rig.store.release(held.slots)

    rig.run(work())


def test_a_damaged_or_vanished_value_is_a_miss() -> None:
    rig = ChainRig()
    rig.put_below(1, 2)

    async def work() -> None:
        gate = rig.tier.gates["get"] = asyncio.Event()
        call = asyncio.create_task(rig.bring_up(1, 2))
        await soon()
        del rig.tier.values[rig.chain.space(rig.namespace).digest, keys(1)]
        gate.set()
        assert await call == [2]
        rig.put(1)
        assert rig.in_memory(1) == [1]

    rig.run(work())


def test_a_tier_that_fails_is_a_miss() -> None:
    """It fails if an error reaches the caller, or if the tier is asked again before its pause is over."""
    with each_row() as row:
        for method in ("lookup", "get"):
            with row(method):
                check_a_failing_tier(method)


def check_a_failing_tier(method: str) -> None:
    rig = ChainRig()
    rig.put(1)
    rig.put_below(2)
    rig.tier.faults.add(method)

    async def work() -> None:
        for _ in range(5):
            assert await rig.bring_up(1, 2) == [1]
        assert rig.tier.calls[method] == 3
        assert rig.chain.stats()[0].state == "suspended"
        rig.tier.faults.clear()
        rig.clock.advance(1.0)
        assert await rig.bring_up(1, 2) == [1, 2]
        assert rig.chain.stats()[0].state == "open"

    rig.run(work())
    assert (rig.chain.stats()[0].errors, rig.chain.stats()[0].suspensions) == (3, 1)


def test_a_tier_that_is_not_open_is_not_called() -> None:
    """It fails if the tier is asked, or if it is not asked after it has opened."""
    with each_row() as row:
        for state in ("opening", "failed"):
            with row(state):
                check_a_tier_in_state(state)


def check_a_tier_in_state(state: str) -> None:
    rig = ChainRig()
    rig.put_below(1)
    rig.tier.state = state

    async def work() -> None:
        assert await rig.bring_up(1) == []
        rig.tier.state = "open"
        assert await rig.bring_up(1) == [1]

    rig.run(work())
    assert rig.tier.calls == {"lookup": 1, "get": 1}


def test_a_request_waits_no_longer_than_it_wants() -> None:
    rig = ChainRig()
    rig.put(1)
    rig.put_below(2)

    async def work() -> None:
        gate = rig.tier.gates["get"] = asyncio.Event()
        call = asyncio.create_task(rig.bring_up(1, 2, max_wait_s=0.5))
        await soon()
        rig.clock.advance(0.49)
        await soon()
        assert not call.done()
        rig.clock.advance(0.02)
        assert await call == [1]
        gate.set()
        await soon()
        assert rig.in_memory(2) == [2], "the read went on"

    rig.run(work())


def test_by_measured_speed_a_value_that_would_take_longer_is_a_miss() -> None:
    """Each value takes a second."""
    rig = ChainRig(num_slabs=40)
    rig.put_below(*range(20))

    async def work() -> None:
        for number in range(3):
            gate = rig.tier.gates["get"] = asyncio.Event()
            call = asyncio.create_task(rig.bring_up(number))
            await soon()
            rig.clock.advance(1.0)
            gate.set()
            assert await call == [number]
        assert await rig.lookup(*range(3, 9), max_wait_s=3.5) == [3, 4, 5]
        assert await rig.lookup(*range(3, 9), max_wait_s=0.9) == []
        assert await rig.lookup(*range(3, 9)) == [3, 4, 5, 6, 7, 8]
        rig.tier.gates.clear()
        assert await rig.bring_up(*range(3, 9), max_wait_s=2.5) == [3, 4]

    rig.run(work())
    assert rig.chain.stats()[0].read_bytes_per_s > 4000


def test_a_tier_without_an_answer_is_a_miss_after_a_while() -> None:
    """It fails if the caller waits for longer, or if the failure is not counted."""
    with each_row() as row:
        for method in ("lookup", "get"):
            with row(method):
                check_a_hanging_tier(method)


def check_a_hanging_tier(method: str) -> None:
    rig = ChainRig()
    rig.put_below(1)

    async def work() -> None:
        rig.tier.gates[method] = asyncio.Event()
        call = asyncio.create_task(rig.bring_up(1))
        await soon()
        rig.clock.advance(LIMIT_S)
        assert await call == []
        assert rig.chain.stats()[0].errors == 1

    rig.run(work())


def test_a_cancelled_request_leaves_the_read_to_others() -> None:
    rig = ChainRig()
    rig.put_below(1)

    async def work() -> None:
        gate = rig.tier.gates["get"] = asyncio.Event()
        calls = [asyncio.create_task(rig.bring_up(1)) for _ in range(2)]
        await soon()
        calls[0].cancel()
        await asyncio.wait({calls[0]})
        gate.set()
        assert await calls[1] == [1]

    rig.run(work())


# ---- removal


def test_removal_reaches_memory_and_all_tiers() -> None:
    rig = ChainRig(num_tiers=2)
    rig.put(1)
    rig.put_below(1, 2, tier=0)
    rig.put_below(2, 3, 4, tier=1)

    async def work() -> None:
        assert await rig.chain.remove(rig.namespace, keys(1, 2, 3, 9, 2)) == 3
        assert await rig.bring_up(1, 2, 3, 4) == [4]

    rig.run(work())
    assert (rig.below(0), rig.below(1)) == ([], [4])


def test_a_read_in_progress_does_not_bring_a_removed_value_back() -> None:
    rig = ChainRig()
    rig.put_below(1, 2)

    async def work() -> None:
        gate = rig.tier.gates["get"] = asyncio.Event()
        call = asyncio.create_task(rig.bring_up(1, 2))
        await soon()
        assert await rig.chain.remove(rig.namespace, keys(1)) == 1
        rig.put(1)  # others store it again at once
        rig.store.remove(rig.namespace, keys(1))
        gate.set()
        assert await call == [2]
        assert await rig.bring_up(1) == []

    rig.run(work())


def test_a_read_after_a_removal_began_does_not_see_the_value() -> None:
    rig = ChainRig()
    rig.put_below(1)

    async def work() -> None:
        gate = rig.tier.gates["remove"] = asyncio.Event()
        removal = asyncio.create_task(rig.chain.remove(rig.namespace, keys(1)))
        await soon()
        assert await rig.bring_up(1) == []
        gate.set()
        assert await removal == 1
        assert await rig.bring_up(1) == []

    rig.run(work())


def test_a_write_in_progress_does_not_bring_a_removed_value_back() -> None:
    rig = ChainRig()
    rig.put(1, 2)

    async def work() -> None:
        gate = rig.tier.gates["put"] = asyncio.Event()
        writing = asyncio.create_task(rig.chain.put(rig.namespace, keys(1, 2)))
        await soon()
        removal = asyncio.create_task(rig.chain.remove(rig.namespace, keys(1)))
        await soon()
        assert "remove" not in rig.tier.calls, "it waits for the write"
        gate.set()
        assert await removal == 1
        assert (await writing).tolist() == [True, True]
        assert rig.below() == [2]

    rig.run(work())


def test_a_write_that_waits_for_its_lookup_does_not_bring_a_removed_value_back() -> None:
    rig = ChainRig()
    rig.put(1, 2)

    async def work() -> None:
        gate = rig.tier.gates["lookup"] = asyncio.Event()
        writing = asyncio.create_task(rig.chain.put(rig.namespace, keys(1, 2)))
        await soon()
        removal = asyncio.create_task(rig.chain.remove(rig.namespace, keys(1)))
        await soon()
        rig.put(1)
        assert "remove" not in rig.tier.calls, "the write could follow it with the bytes from before"
        gate.set()
        assert await removal == 1
        assert (await writing).tolist() == [False, True]
        assert rig.below() == [2]

    rig.run(work())


def test_a_late_removal_does_not_remove_a_newer_value() -> None:
    """A call that took too long may still remove values: no write begins before it has ended."""
    with each_row() as row:
        for call in ("remove", "clear"):
            with row(call):
                check_a_late_removal(call)


def check_a_late_removal(call: str) -> None:
    rig = ChainRig(policies={"fake0": WritePolicy(soon=True)})

    async def work() -> None:
        gate = rig.tier.unstoppable[call] = asyncio.Event()
        remove, clear = rig.chain.remove, rig.chain.finish_clear
        begun = rig.chain.begin_clear(rig.namespace) if call == "clear" else []
        removal = asyncio.create_task(clear(begun) if call == "clear" else remove(rig.namespace, keys(1)))
        await soon()
        rig.clock.advance(LIMIT_S)
        await removal
        rig.put(1)
        for _ in range(2):
            await rig.round()
            assert rig.below() == []
        gate.set()
        await soon()
        await rig.round()  # removes it once more, then writes
        await rig.round()
        assert rig.below() == [1]
        assert await rig.lookup(1) == [1]

    rig.run(work())


def test_a_tier_that_cannot_remove_now_is_told_later() -> None:
    """It fails if a removed value is found meanwhile, or is still there afterwards."""
    with each_row() as row:
        for how in ("opening", "suspended", "hangs"):
            with row(how):
                check_a_postponed_removal(how)


def check_a_postponed_removal(how: str) -> None:
    rig = ChainRig()
    rig.put(1)
    rig.put_below(1, 2, 3)

    async def work() -> None:
        if how == "opening":
            rig.tier.state = "opening"
        elif how == "suspended":
            rig.tier.faults |= {"get", "remove"}
            for _ in range(3):
                await rig.bring_up(2)
        else:
            rig.tier.gates["remove"] = asyncio.Event()
        removal = asyncio.create_task(rig.chain.remove(rig.namespace, keys(1, 2)))
        await soon()
        rig.clock.advance(LIMIT_S)
        assert await removal in (1, 2)
        rig.tier.state = "open"
        rig.tier.faults.clear()
        assert await rig.bring_up(1, 2, 3) == [3]
        assert rig.below() == [1, 2, 3]
        rig.tier.gates.clear()
        await rig.round()
        assert rig.below() == [3]
        assert (await rig.chain.put(rig.namespace, keys(1))).tolist() == [False]
        rig.put(1)
        assert (await rig.chain.put(rig.namespace, keys(1))).tolist() == [True]

    rig.run(work())


def test_too_many_waiting_removals_become_a_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvservice.tiers.links.MAX_WAITING_KEYS", 2)
    rig = ChainRig()
    rig.put_below(1, 2, 3, 4)

    async def work() -> None:
        for numbers, below in (((1, 2), [3, 4]), ((3, 4), [])):
            rig.tier.state = "opening"
            await rig.chain.remove(rig.namespace, keys(numbers[0]))
            await rig.chain.remove(rig.namespace, keys(numbers[1]))
            if below == []:
                await rig.chain.remove(rig.namespace, keys(9))
            rig.tier.state = "open"
            assert await rig.bring_up(*numbers) == []
            await rig.round()
            assert rig.below() == below

    rig.run(work())
    assert rig.tier.calls["clear"] == 1


def test_clearing_reaches_all_tiers() -> None:
    rig = ChainRig(num_tiers=2)
    rig.put_below(1, 2, tier=0)
    rig.put_below(3, tier=1)

    async def work() -> None:
        gate = rig.tier.gates["get"] = asyncio.Event()
        reading = asyncio.create_task(rig.bring_up(1))
        await soon()
        begun = rig.chain.begin_clear(rig.namespace)
        assert await rig.lookup(1, 2, 3) == []
        await rig.chain.finish_clear(begun)
        gate.set()
        assert await reading == []
        assert await rig.lookup(1, 2, 3) == []

    rig.run(work())
    assert (rig.below(0), rig.below(1)) == ([], [])


# ---- writing


def test_values_in_memory_are_written_below_once() -> None:
    rig = ChainRig(num_tiers=2)
    rig.put(1, 2)
    rig.put_below(2)

    async def work() -> None:
        assert (await rig.chain.put(rig.namespace, keys(1, 3, 2))).tolist() == [True, False, True]
        assert (rig.below(0), rig.below(1)) == ([1, 2], [1, 2])
        assert rig.chain.stats()[0].written_values == 1
        rig.store.remove(rig.namespace, keys(1, 2))
        assert await rig.bring_up(1, 2) == [1, 2]

    rig.run(work())


def test_random_calls_keep_the_promises() -> None:
    """Values are whole, and removed ones do not come back, with calls and failures in any order."""
    for seed in range(6):
        _random_calls(seed)


def _random_calls(seed: int) -> None:
    random = np.random.default_rng(seed)
    rig = ChainRig(num_slabs=3, num_tiers=2)

    async def work() -> None:
        calls: set[asyncio.Task[object]] = set()
        for _ in range(300):
            numbers = sorted({int(one) for one in random.integers(0, 30, 5)})
            for tier in rig.tiers:
                for method in ("get", "put", "remove", "lookup"):
                    if method not in tier.gates and random.random() < 0.1:
                        tier.gates[method] = asyncio.Event()
                    elif method in tier.gates and random.random() < 0.4:
                        tier.gates.pop(method).set()
                    (tier.faults.add if random.random() < 0.02 else tier.faults.discard)(method)
            choice = random.random()
            if choice < 0.3:
                rig.put(*numbers)
            elif choice < 0.6:
                calls.add(asyncio.create_task(rig.bring_up(*numbers, leading_only=bool(random.random() < 0.3))))
            elif choice < 0.8:
                calls.add(asyncio.create_task(rig.chain.put(rig.namespace, keys(*numbers))))
            else:
                calls.add(asyncio.create_task(rig.chain.remove(rig.namespace, keys(*numbers))))
            if random.random() < 0.1 and calls:
                calls.pop().cancel()
            await asyncio.sleep(0)
            rig.clock.advance(0.1)
        await _end(rig, calls)
        rig.store.remove(rig.namespace, keys(*range(30)))
        await rig.chain.remove(rig.namespace, keys(*range(30)))
        assert await rig.bring_up(*range(30)) == []
        assert (rig.below(0), rig.below(1)) == ([], [])

    rig.run(work())


async def _end(rig: ChainRig, calls: set[asyncio.Task[object]]) -> None:
    for tier in rig.tiers:
        tier.faults.clear()
        for gate in tier.gates.values():
            gate.set()
        tier.gates.clear()
    await asyncio.gather(*calls, return_exceptions=True)
    for _ in range(3):
        rig.clock.advance(100.0)
        await rig.round()
        await rig.lookup(*range(40, 45))
