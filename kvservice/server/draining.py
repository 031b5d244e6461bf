"""The policy that decides how long a draining daemon waits for work in progress."""

from __future__ import annotations

import logging
from collections.abc import Mapping

logger = logging.getLogger(__name__)


class Drain:
    """Decides whether to keep waiting.

    A drain waits for calls in flight, and for open steps as long as their layers arrive within `stall_s` of each
    other, but never longer than `timeout_s`. The caller passes the time, in seconds of a monotonic clock.
    """

    def __init__(self, timeout_s: float, stall_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._stall_s = stall_s
        self._begun_at = now
        # For each session id: the number of written layers, and the time of its last change.
        self._seen: dict[int, tuple[int, float]] = {}

    def goes_on(self, now: float, calls_in_flight: int, layers_written: Mapping[int, int]) -> bool:
        """Return whether to keep waiting. `layers_written` maps the id of each attached session with partly written
        steps to the number of layers written in these steps."""
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
                "no layer for %g s: no more waiting for half-written steps, sessions %s", self._stall_s, [*self._seen]
            )
        return False

    def _since(self, session_id: int, count: int, now: float) -> float:
        before, since = self._seen.get(session_id, (None, now))
        return since if before == count else now
