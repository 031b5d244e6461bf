"""A circuit breaker: after several failures in a row a tier is left alone for a while, then one call tries it.

closed ── FAILURES in a row ──▶ suspended ── the pause is over ──▶ one trial ── succeeds ──▶ closed
                                    ◀── fails: the pause doubles ──┘

Failures are counted for each kind of call, because one kind says little about another: a disk whose reads fail still
answers lookups from its index. The trial is of the kind that failed. Other calls are admitted too after the pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Failures in a row after which a tier is suspended.
FAILURES: Final = 3
# The first pause in seconds, and the longest one.
PAUSE_S: Final = 1.0
MAX_PAUSE_S: Final = 60.0


@dataclass(frozen=True, eq=False)
class Attempt:
    """A call that the breaker admitted. Only the attempts of the current `era` count."""

    kind: str
    era: int


class Breaker:
    """Decides which calls reach a tier. The caller passes the time, in seconds of a monotonic clock."""

    def __init__(self) -> None:
        # Failures in a row by kind of call.
        self._failures: dict[str, int] = {}
        self._pause_s = PAUSE_S
        # The kind of calls that failed, and when the next trial may begin; None: the breaker is closed.
        self._suspended: tuple[str, float] | None = None
        self._trial: Attempt | None = None
        # Changes whenever the breaker opens or closes, so that calls from before do not count.
        self._era = 0
        self.num_suspensions = 0

    @property
    def is_suspended(self) -> bool:
        return self._suspended is not None

    def admits(self, now: float) -> bool:
        """Return whether a call may begin now."""
        return self._suspended is None or (self._trial is None and now >= self._suspended[1])

    def begin(self, kind: str, now: float) -> Attempt | None:
        """Admit a call, or return None. Each attempt ends with one of the methods below."""
        if not self.admits(now):
            return None
        attempt = Attempt(kind, self._era)
        if self._suspended is not None and self._suspended[0] == kind:
            self._trial = attempt
        return attempt

    def succeeded(self, attempt: Attempt) -> bool:
        """Return whether the breaker closed with this."""
        if attempt.era != self._era:
            return False
        self._failures.pop(attempt.kind, None)
        if attempt is not self._trial:
            return False
        self._suspended = self._trial = None
        self._failures.clear()
        self._pause_s = PAUSE_S
        self._era += 1
        return True

    def failed(self, attempt: Attempt, now: float) -> bool:
        """Return whether the breaker opened with this."""
        if attempt.era != self._era:
            return False
        if self._suspended is not None:
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            self._suspended, self._trial = (self._suspended[0], now + self._pause_s), None
            return False
        failures = self._failures[attempt.kind] = self._failures.get(attempt.kind, 0) + 1
        if failures < FAILURES:
            return False
        self._suspended = attempt.kind, now + self._pause_s
        self._era += 1
        self.num_suspensions += 1
        return True

    def abandoned(self, attempt: Attempt) -> None:
        """End an attempt that says nothing about the tier."""
        if attempt is self._trial:
            self._trial = None
