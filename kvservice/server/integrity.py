"""The daemon checks its own bookkeeping while nobody calls it, a slice at a time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from kvservice.blocks import Slices
from kvservice.errors import InternalError

logger = logging.getLogger(__name__)

# Between two slices, of which each takes a fraction of a millisecond.
SLICE_EVERY_S: Final = 0.001


class Activity(Protocol):
    """Calls that were begun since the start, and those of them that are not answered yet."""

    num_begun: int
    in_flight: int


class IntegrityWatch:
    """`turn` is called at short intervals while a pass lasts. `num_checks` counts the passes that found all in order,
    `num_failures` those that did not; `failure` is what the first of these found, for good: what it led to until then
    is not known, so later passes that find nothing do not take it back."""

    def __init__(self, check: Callable[[], Slices[bool]], calls: Activity, on_failure: Callable[[str], object]) -> None:
        """`check` begins a pass, see check_in_slices; `on_failure` is called once, with `failure`."""
        self._check = check
        self._calls = calls
        self._on_failure = on_failure
        self._num_begun = -1
        self.num_checks = self.num_failures = 0
        self.failure = ""
        self.begin()

    def begin(self) -> None:
        """Another pass."""
        self._slices = self._check()

    def turn(self) -> bool:
        """Do a slice, unless a call has been at work since the turn before. Returns whether the pass is over."""
        before, self._num_begun = self._num_begun, self._calls.num_begun
        if self._calls.in_flight or self._num_begun != before:
            return False
        try:
            next(self._slices)
        except StopIteration as end:
            self.num_checks += bool(end.value)
            return True
        except Exception as error:  # a corruption may break the check itself
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

    async def run(self, interval_s: float) -> None:
        """Until cancelled: a pass, and `interval_s` after its end the next. 0: none."""
        while interval_s:
            await asyncio.sleep(interval_s)
            self.begin()
            while not self.turn():
                await asyncio.sleep(SLICE_EVERY_S)
