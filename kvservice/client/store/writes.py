"""Copies into the mapped memory that are under way."""

from __future__ import annotations

import threading

from kvservice.client.waiting import Signal


class Writes:
    """Counts the copies of a link that write to the mapped memory: a context manager around each one. Threads share
    it."""

    def __init__(self, none_left: Signal) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._none_left = none_left
        self._none_left.set()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._none_left.clear()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._none_left.set()

    async def end(self, timeout_s: float) -> bool:
        """Wait for their end. Returns whether it came within the timeout."""
        return await self._none_left.wait(timeout_s)
