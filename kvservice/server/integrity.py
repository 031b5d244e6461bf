"""Integrity checks of the daemon's own bookkeeping. They run in slices while no calls are in flight."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from kvservice.blocks import Slices
from kvservice.errors import InternalError

logger = logging.getLogger(__name__)

# The interval between two slices; each slice takes a fraction of a millisecond.
SLICE_EVERY_S: Final = 0.001


class Activity(Protocol):
    """The number of calls begun since the daemon started, and the number of calls in flight."""

    num_begun: int
    in_flight: int


class IntegrityWatch:
    """Runs integrity checks. `turn` is called at short intervals during a pass.

    `num_checks` counts the passes that succeeded, `num_failures` those that failed. `failure` describes the first
    failed pass. Later successful passes do not clear it, because the consequences of the corruption are unknown.
    """

    def __init__(self, check: Callable[[], Slices[bool]], calls: Activity, on_failure: Callable[[str], object]) -> None:
        """`check` starts a pass, see check_in_slices. `on_failure` is called once, with `failure`."""
        self._check = check
        self._calls = calls
        self._on_failure = on_failure
        self._num_begun = -1
        self.num_checks = self.num_failures = 0
        self.failure = ""
        self.begin()

    def begin(self) -> None:
        """Start another pass."""
        self._slices = self._check()

    def turn(self) -> bool:
        """Run a slice, unless a call has been active since the previous turn. Returns whether the pass is complete."""
        before, self._num_begun = self._num_begun, self._calls.num_begun
        if self._calls.in_flight or self._num_begun != before:
            return False
        try:
            next(self._slices)
        except StopIteration as end:
            self.num_checks += bool(end.value)
            return True
        except Exception as error:  # corrupt state may break the check itself
            self._fail(error)
            return True
        return False

    def _fail(self, error: Exception) -> None:
        self.num_failures += 1
        if self.failure:
            return
        self.failure = f"the bookkeeping is corrupt: {error or type(error).__name__}"
        logger.error("%s", self.failure, exc_info=None if isinstance(error, InternalError) else error)
        self._on_failure(self.failure)

    async def run(self, interval_s: float, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Run passes until cancelled, each `interval_s` seconds after the end of the previous one. 0 runs none."""
        while interval_s:
            await sleep(interval_s)
            self.begin()
            while not self.turn():
                await sleep(SLICE_EVERY_S)
