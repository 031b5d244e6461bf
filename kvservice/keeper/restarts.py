"""Ends of processes, and whether and when the next one starts."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

# A process that has served this long ends the series of crashes.
SETTLED_S = 60.0
# The fifth crash of a series is the last one, unless the keeper holds state. The first restart is immediate.
DELAYS_S = (0.0, 1.0, 2.0, 4.0)
# The signals that a process gets for what it does itself. Others are sent: by an operator, or by the kernel if there is
# no memory.
FAULTS = (
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV, signal.SIGSYS
)  # fmt: skip


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

    @property
    def is_from_outside(self) -> bool:
        """Whether the process was killed, and did not fail by itself."""
        return is_from_outside(str(self))


def is_from_outside(ended: str) -> bool:
    """Return what `Ending.is_from_outside` says of an ending in words, such as "signal 9"."""
    kind, _, number = ended.partition(" ")
    return kind == "signal" and int(number) not in FAULTS


class CrashLoopError(Exception):
    """The daemon has failed too often in a row. The message lists the latest failures."""


class Restarts:
    """Decides about restarts. A series of crashes ends when a process has served for a minute."""

    def __init__(self) -> None:
        self._series: list[str] = []
        self._num_failed = self._num_killed = 0

    def delay_s(self, ending: Ending, served_s: float | None) -> float:
        """Return the seconds until the next process starts. `served_s` is None for a process that was never ready.

        A process that was killed did not fail: if it served, the next one starts at once, else after a longer time with
        each kill, because the kernel may have had no memory. Raises CrashLoopError.
        """
        if served_s is not None:
            self._num_killed = 0
            if served_s >= SETTLED_S:
                self._series.clear()
                self._num_failed = 0
        if ending.is_from_outside:
            if served_s is not None:
                return 0.0
            self._num_killed += 1
            return DELAYS_S[min(self._num_killed, len(DELAYS_S)) - 1]
        self._num_failed += 1
        self._series.append(f"{ending} {'at its start' if served_s is None else f'after {served_s:.1f} s of service'}")
        del self._series[: -len(DELAYS_S) - 1]
        if self._num_failed > len(DELAYS_S):
            raise CrashLoopError(
                f"the daemon ended {self._num_failed} times in a row within {SETTLED_S:g} s of service: "
                + ", ".join(self._series)
            )
        return DELAYS_S[self._num_failed - 1]
