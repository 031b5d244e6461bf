"""A clock of sessions (kvservice/server/loop.py) that only the test advances."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = itertools.count()
        self._due: dict[tuple[float, int], tuple[asyncio.TimerHandle, Callable[..., object], tuple[Any, ...]]] = {}
        self._loop = asyncio.new_event_loop()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.now + delay, callback, args, self._loop)
        self._due[self.now + delay, next(self._numbers)] = handle, callback, args
        return handle

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass, and make the calls that become due, each at its time."""
        until = self.now + seconds
        while self._due and min(self._due)[0] <= until:
            first = min(self._due)
            handle, callback, args = self._due.pop(first)
            self.now = first[0]
            if not handle.cancelled():
                callback(*args)
        self.now = until

    def close(self) -> None:
        self._loop.close()


@pytest.fixture
def clock() -> Iterator[ManualClock]:
    manual = ManualClock()
    yield manual
    manual.close()
