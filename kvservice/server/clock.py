"""The clock of sessions: the time, and calls at a later time. Tests pass a clock that they advance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Clock(Protocol):
    def time(self) -> float:
        """Return the time in seconds. It never goes back."""

    def call_later(self, delay: float, callback: Callable[..., None], /, *args: Any) -> asyncio.TimerHandle:
        """Call `callback(*args)` after `delay` seconds, unless the handle is cancelled first."""


class SystemClock:
    """The system's monotonic time and the timers of the running event loop."""

    def time(self) -> float:
        return time.monotonic()

    def call_later(self, delay: float, callback: Callable[..., None], /, *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback, *args)
