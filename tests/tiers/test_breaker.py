"""When a tier is left alone after failures, when a call tries it, and when it is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fake_tier import FakeTier
from manual_clock import ManualClock

from kvservice.tiers import Space, Values
from kvservice.tiers.measured import MeasuredTier

SPACE, KEY = Space(bytes(16), 8, "m"), bytes(32)
# Failures in a row after which a tier is left alone; the first pause in seconds, and the longest one.
FAILURES, PAUSE_S, MAX_PAUSE_S = 3, 1.0, 60.0


class Rig:
    """A tier whose calls fail as its `faults` say."""

    def __init__(self) -> None:
        self.memory, self.clock = bytearray(8), ManualClock()
        self.tier = FakeTier(self.memory)
        self.tier.values[SPACE.digest, KEY] = bytes(8), bytes(8)
        self.measured = MeasuredTier(self.tier, self.clock)

    async def lookup(self) -> bool:
        return await self.measured.lookup(SPACE, KEY, 1) == b"\1"

    async def get(self) -> bool:
        return (await self.measured.get(SPACE, Values(KEY, bytes(8)), lambda: None)).found == b"\1"

    async def fail(self, times: int = 1) -> None:
        """Fail as many reads."""
        self.tier.faults.add("get")
        for _ in range(times):
            assert not await self.get()
        self.tier.faults.clear()

    async def suspend(self) -> None:
        await self.fail(FAILURES - 1)
        assert not self.is_suspended
        await self.fail()
        assert self.is_suspended

    async def reaches(self, call: Callable[[], Coroutine[Any, Any, bool]]) -> bool:
        """Make a call. Returns whether it came to the tier."""
        before = sum(self.tier.calls.values())
        await call()
        return sum(self.tier.calls.values()) > before

    @property
    def is_suspended(self) -> bool:
        return self.measured.stats().state == "suspended"

    def held(self, method: str) -> asyncio.Event:
        """Hold back calls of a method until the event is set."""
        gate = self.tier.gates[method] = asyncio.Event()
        return gate


def run(work: Callable[[Rig], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        rig = Rig()
        await work(rig)
        rig.clock.close()

    asyncio.run(whole())


def test_failures_in_a_row_suspend() -> None:
    async def work(rig: Rig) -> None:
        for _ in range(5):
            await rig.fail(FAILURES - 1)
            assert await rig.get()
        assert not rig.is_suspended
        await rig.suspend()
        rig.clock.advance(PAUSE_S - 0.01)
        assert not await rig.reaches(rig.get)

    run(work)


def test_successes_of_another_kind_do_not_count() -> None:
    async def work(rig: Rig) -> None:
        for _ in range(FAILURES):
            assert await rig.lookup()
            await rig.fail()
        assert rig.is_suspended
        rig.clock.advance(PAUSE_S)
        assert await rig.lookup()
        assert rig.is_suspended, "a lookup is no trial of reads"
        assert await rig.get()
        assert not rig.is_suspended

    run(work)


def test_one_trial_at_a_time() -> None:
    async def work(rig: Rig) -> None:
        await rig.suspend()
        rig.clock.advance(PAUSE_S)
        gate = rig.held("get")
        trial = asyncio.create_task(rig.get())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not await rig.reaches(rig.get)
        assert not await rig.reaches(rig.lookup)
        gate.set()
        assert await trial
        assert await rig.reaches(rig.get)
        assert rig.measured.stats().suspensions == 1

    run(work)


def test_a_trial_that_fails_doubles_the_pause() -> None:
    async def work(rig: Rig) -> None:
        await rig.suspend()
        pause_s = PAUSE_S
        rig.clock.advance(pause_s)
        for _ in range(10):
            await rig.fail()
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            rig.clock.advance(pause_s - 0.01)
            assert not await rig.reaches(rig.get)
            rig.clock.advance(0.01)
        assert pause_s == MAX_PAUSE_S
        assert await rig.get()
        await rig.suspend()
        rig.clock.advance(PAUSE_S)
        assert await rig.reaches(rig.get), "the first pause is short again"

    run(work)


def test_a_trial_without_result_makes_place_for_another() -> None:
    async def work(rig: Rig) -> None:
        await rig.suspend()
        rig.clock.advance(PAUSE_S)
        rig.held("get")
        trial = asyncio.create_task(rig.get())
        await asyncio.sleep(0)
        trial.cancel()
        await asyncio.wait({trial})
        rig.tier.gates.clear()
        assert await rig.get()
        assert not rig.is_suspended

    run(work)


def test_calls_from_before_do_not_count() -> None:
    """One fails late, one succeeds late. The failure does not make the pause longer."""

    async def work(rig: Rig) -> None:
        failing, succeeding = rig.held("get"), asyncio.Event()
        rig.tier.faults.add("get")
        late_failure = asyncio.create_task(rig.get())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        rig.tier.gates["get"] = succeeding
        late_success = asyncio.create_task(rig.get())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        rig.tier.gates.clear()
        await rig.fail(FAILURES)
        assert rig.is_suspended
        rig.clock.advance(0.5)
        rig.tier.faults.add("get")
        failing.set()
        assert not await late_failure
        rig.tier.faults.clear()
        succeeding.set()
        assert await late_success
        assert rig.is_suspended
        rig.clock.advance(PAUSE_S - 0.5)
        assert await rig.reaches(rig.get)
        assert not rig.is_suspended

    run(work)
