"""Whether a daemon can be used now, and when to ask it again. It reads no clock of its own."""

from __future__ import annotations

from collections.abc import Callable

# The first pause after a failure, and the longest. Each failure doubles the pause.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 10.0


class Availability:
    """A daemon is used from its first good answer until an error, and again after the next good answer. `random`
    returns numbers from 0 to below 1; it spreads the attempts of many clients."""

    def __init__(self, clock: Callable[[], float], random: Callable[[], float]) -> None:
        self._clock, self._random = clock, random
        self._failures = 0
        self._next_at = clock()
        self.is_up = False
        self.reason = "it has not answered yet"

    @property
    def has_answered(self) -> bool:
        """Whether an attempt was made, with any result."""
        return self.is_up or self._failures > 0

    def succeed(self, pause_s: float) -> None:
        """Note a good answer. The daemon is asked again after `pause_s` seconds."""
        self.is_up, self.reason, self._failures = True, "", 0
        self._next_at = self._clock() + pause_s

    def fail(self, reason: str) -> None:
        """Note a failure. The daemon is asked again after a pause that doubles each time, less up to half."""
        self.is_up, self.reason = False, reason
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(self._failures, 32))
        self._failures += 1
        self._next_at = self._clock() + pause_s * (1 - self._random() / 2)

    @property
    def pause_s(self) -> float:
        """The seconds until the daemon is to be asked."""
        return max(0.0, self._next_at - self._clock())
