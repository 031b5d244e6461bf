"""A tier is opened when that succeeds."""

from __future__ import annotations

import asyncio

import pytest
from fake_tier import FakeTier
from manual_clock import ManualClock

from kvservice.tiers import LateTier, Space, TierError

# The pause in seconds after the first attempt, and the time after which a tier counts as failed.
PAUSE_S, FAILED_AFTER_S = 0.05, 5.0
SPACE = Space(bytes(16), 4096, "m")


class Opener:
    """Fails so many times."""

    def __init__(self, num_failures: int) -> None:
        self.left, self.tier = num_failures, FakeTier(bytearray())

    def __call__(self) -> FakeTier:
        if self.left:
            self.left -= 1
            raise TierError("in use")
        return self.tier


def test_attempts_go_on_until_one_succeeds() -> None:
    async def work() -> None:
        clock, opener = ManualClock(), Opener(2)
        late = LateTier("disk", opener, clock)
        assert (late.stats().name, late.stats().state, late.stats().errors) == ("disk", "opening", 1)
        with pytest.raises(TierError):
            await late.lookup(SPACE, bytes(32))
        clock.advance(PAUSE_S)
        assert (late.stats().state, late.fault) == ("opening", "in use")
        clock.advance(2 * PAUSE_S)
        assert (late.stats().state, late.fault) == ("open", "")
        assert await late.lookup(SPACE, bytes(32)) == b"\0"
        opener.tier.state = "failed"
        assert late.fault == "", "it was not open for another reason"
        opener.tier.fault = "broken"
        assert late.fault == "broken"
        await late.close()
        assert opener.tier.is_closed
        clock.close()

    asyncio.run(work())


def test_a_tier_that_cannot_be_opened_for_long_has_failed() -> None:
    async def work() -> None:
        clock, opener = ManualClock(), Opener(1000)
        late = LateTier("disk", opener, clock)
        clock.advance(FAILED_AFTER_S)
        assert late.stats().state == "failed"
        opener.left = 0
        clock.advance(30.0)
        assert late.stats().state == "open"
        clock.close()

    asyncio.run(work())


def test_a_tier_that_fails_while_it_opens_is_opened_again(caplog: pytest.LogCaptureFixture) -> None:
    """For example because its file system has no room. Each reason is logged once."""

    async def work() -> None:
        clock, tiers = ManualClock(), [FakeTier(bytearray()) for _ in range(4)]
        for tier in tiers[:3]:
            tier.faults.add("opened")
        left = iter(tiers)
        late = LateTier("disk", lambda: next(left), clock)
        for count in (1, 2, 3):
            while late.stats().errors < count:
                await asyncio.sleep(0)
            assert [tier.is_closed for tier in tiers] == [True] * count + [False] * (4 - count)
            assert late.stats().state == "opening"
            with pytest.raises(TierError):
                await late.lookup(SPACE, bytes(32))
            clock.advance(2 ** (count - 1) * PAUSE_S)
        await asyncio.sleep(0)
        assert (late.stats().state, late.stats().errors) == ("open", 3)
        assert await late.lookup(SPACE, bytes(32)) == b"\0"
        await late.close()
        assert tiers[3].is_closed
        clock.close()

    asyncio.run(work())
    assert [record.getMessage() for record in caplog.records] == [
        "the tier disk cannot be opened, trying again: opened fails"
    ]


def test_a_tier_that_is_closed_while_it_opens_is_not_opened_again() -> None:
    async def work() -> None:
        clock, tier = ManualClock(), FakeTier(bytearray())
        tier.gates["opened"] = asyncio.Event()
        tier.faults.add("opened")
        late = LateTier("disk", lambda: tier, clock)
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(late.close())
        await asyncio.sleep(0)
        tier.gates["opened"].set()
        await closing
        clock.advance(100.0)
        assert tier.calls["opened"] == 1
        clock.close()

    asyncio.run(work())


def test_a_closed_tier_is_not_opened() -> None:
    async def work() -> None:
        clock, opener = ManualClock(), Opener(1)
        late = LateTier("disk", opener, clock)
        await late.close()
        clock.advance(100.0)
        assert late.stats().state == "failed"
        clock.close()

    asyncio.run(work())
