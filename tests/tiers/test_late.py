"""A tier is opened when that succeeds."""

from __future__ import annotations

import asyncio

import pytest
from fake_tier import FakeTier
from manual_clock import ManualClock

from kvservice.tiers import LateTier, Space, TierError
from kvservice.tiers.late import FAILED_AFTER_S, PAUSE_S

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
        assert late.stats().state == "opening"
        clock.advance(2 * PAUSE_S)
        assert late.stats().state == "open"
        assert await late.lookup(SPACE, bytes(32)) == b"\0"
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


def test_a_closed_tier_is_not_opened() -> None:
    async def work() -> None:
        clock, opener = ManualClock(), Opener(1)
        late = LateTier("disk", opener, clock)
        await late.close()
        clock.advance(100.0)
        assert late.stats().state == "failed"
        clock.close()

    asyncio.run(work())
