"""Ends of processes, and whether and when the next one starts."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

# A process that has served this long ends the series of crashes.
SETTLED_S = 60.0
# The fifth crash of a series is the last one. The first restart is immediate.
DELAYS_S = (0.0, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Ending:
    """The end of a process: by itself with an exit status, or by a signal, which is 0 otherwise."""

    exit_status: int
    signal: int = 0

    @classmethod
    def from_wait(cls, wait_status: int) -> Ending:
        """`wait_status` is what os.waitpid returns."""
        if os.WIFSIGNALED(wait_status):
            number = os.WTERMSIG(wait_status)
            return cls(128 + number, number)
        return cls(os.WEXITSTATUS(wait_status))

    def __str__(self) -> str:
        return f"signal {self.signal}" if self.signal else f"status {self.exit_status}"


class CrashLoopError(Exception):
    """The daemon has crashed too often in a row. The message lists the crashes."""


class Restarts:
    """Decides about restarts. A series of crashes ends when a process has served for a minute."""

    def __init__(self) -> None:
        self._series: list[str] = []

    def delay_s(self, ending: Ending, served_s: float | None) -> float:
        """Return the seconds until the next process starts. `served_s` is None for a process that was never ready.

        A process that served and was killed with SIGKILL did not crash: someone killed it, and the next one starts at
        once. Raises CrashLoopError.
        """
        if served_s is not None and served_s >= SETTLED_S:
            self._series.clear()
        if ending.signal == signal.SIGKILL and served_s is not None:
            return 0.0
        self._series.append(f"{ending} {'at its start' if served_s is None else f'after {served_s:.1f} s of service'}")
        if len(self._series) > len(DELAYS_S):
            raise CrashLoopError(
                f"the daemon ended {len(self._series)} times in a row within {SETTLED_S:g} s of service: "
                + ", ".join(self._series)
            )
        return DELAYS_S[len(self._series) - 1]
