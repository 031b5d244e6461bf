"""For how long a daemon that shuts down waits for the work that has begun."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Drain:
    """Waits for calls in flight, and for steps while their layers come; never longer than `timeout_s`. Times are
    seconds of a monotonic clock, read by the caller."""

    def __init__(self, timeout_s: float, stall_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._begun_at = now
        # The layers that a session's steps had, and since when they have as many.
        self._seen: dict[int, tuple[int, float]] = {}

    def goes_on(self, now: float, calls_in_flight: int, layers_written: Mapping[int, int]) -> bool:
        """Whether there is something to wait for. `layers_written`: for the id of each attached session whose steps
        are half written, how many layers of these are."""
        if now - self._begun_at > self._timeout_s:
            logger.warning("still busy after %g s of draining", self._timeout_s)
            return False
        self._seen = {
            session_id: (count, self._since(session_id, count, now)) for session_id, count in layers_written.items()
        }
        if calls_in_flight or any(now - since <= self._stall_s for _, since in self._seen.values()):
            return True
        if self._seen:
            logger.warning(
                "no layer for %g s: half-written steps are given up, sessions %s", self._stall_s, [*self._seen]
            )
        return False

    def _since(self, session_id: int, count: int, now: float) -> float:
        before, since = self._seen.get(session_id, (None, now))
        return since if before == count else now
