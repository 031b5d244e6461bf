"""A tier that is opened as soon as that succeeds, for example when the daemon before has let go of its files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvservice.logs import LogBudget
from kvservice.store import LeaseClock
from kvservice.tiers.protocol import GetResult, LowerTier, Space, TierError, TierStats, Values

logger = logging.getLogger(__name__)

# The pause in seconds after an attempt that failed. It doubles, up to the longest one.
PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 30.0
# A tier that cannot be opened for so long counts as failed. The attempts go on.
FAILED_AFTER_S: Final = 5.0


class OpeningTier(LowerTier, Protocol):
    """A tier that takes a while to open."""

    async def opened(self) -> None:
        """Wait until values can be found. Raises TierError if the tier cannot be opened."""


class LateTier:
    """The tier that `open_tier` returns, "opening" or "failed" until it is open. `open_tier` raises TierError."""

    def __init__(self, name: str, open_tier: Callable[[], OpeningTier], clock: LeaseClock) -> None:
        """To be called in the event loop: the first attempt is made now."""
        self.name = name
        self._open, self._clock = open_tier, clock
        self._tier: OpeningTier | None = None
        self._opening: asyncio.Task[None] | None = None
        self._began_s = clock.time()
        self._pause_s = PAUSE_S
        self._num_failures = 0
        self._is_closed = False
        self._logged = ""
        self._log = LogBudget(logger, clock.time)
        self._attempt()

    async def lookup(self, space: Space, keys: bytes) -> bytes:
        return await self._opened().lookup(space, keys)

    async def get(self, space: Space, values: Values) -> GetResult:
        return await self._opened().get(space, values)

    async def put(self, space: Space, values: Values) -> bytes:
        return await self._opened().put(space, values)

    async def remove(self, space: Space, keys: bytes) -> int:
        return await self._opened().remove(space, keys)

    async def clear(self, space: Space) -> None:
        await self._opened().clear(space)

    def stats(self) -> TierStats:
        if self._tier is not None:
            stats = self._tier.stats()
            return stats._replace(errors=stats.errors + self._num_failures)
        is_late = self._num_failures and self._clock.time() - self._began_s >= FAILED_AFTER_S
        return TierStats(self.name, state="failed" if is_late else "opening", errors=self._num_failures)

    async def close(self) -> None:
        self._is_closed = True
        if self._tier is not None:
            await self._tier.close()
        if self._opening is not None:
            await asyncio.wait({self._opening})

    def _opened(self) -> LowerTier:
        if self._tier is None:
            raise TierError(f"the tier {self.name} is not open yet")
        return self._tier

    def _attempt(self) -> None:
        if self._is_closed:
            return
        try:
            self._tier = self._open()
        except TierError as error:
            self._fail(error)
        else:
            self._opening = asyncio.ensure_future(self._await_opened(self._tier))

    async def _await_opened(self, tier: OpeningTier) -> None:
        try:
            await tier.opened()
        except TierError as error:
            self._tier = None
            await tier.close()
            self._fail(error)

    def _fail(self, error: TierError) -> None:
        """Log each reason once, and try again after a pause."""
        if self._is_closed:
            return
        self._num_failures += 1
        if str(error) != self._logged:
            self._log.write(logging.WARNING, "the tier %s cannot be opened, trying again: %s", self.name, error)
            self._logged = str(error)
        self._clock.call_later(self._pause_s, self._attempt)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
