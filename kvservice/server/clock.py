"""The clock of sessions: the time, and calls at a later time. Tests pass a clock that they advance."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

# The field of /proc/PID/stat with the start of the process, counted after the name of its program.
_START_FIELD: Final = 19


class Clock(Protocol):
    def time(self) -> float:
        """Return the time in seconds. It never goes back."""

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> asyncio.TimerHandle:
        """Call `callback(*args)` after `delay` seconds, unless the handle is cancelled first."""


class SystemClock:
    """The system's monotonic time and the timers of the running event loop."""

    def time(self) -> float:
        return time.monotonic()

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback, *args)


def process_start_s() -> float:
    """Return when this process was started, in seconds of the monotonic clock."""
    stat = Path("/proc/self/stat").read_bytes()
    start_s = int(stat.rpartition(b")")[2].split()[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - start_s)
