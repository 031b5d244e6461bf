"""Deadlines for blocking calls. A thread ends each call that is not done by its deadline."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable


class Watchdog:
    """The deadlines of the calls in flight. The thread starts with the first deadline. It sleeps until the earliest
    deadline it has seen, so a call that starts and ends before then does not wake it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: dict[int, tuple[float, Callable[[], None]]] = {}
        self._numbers = itertools.count()
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, deadline: float, expire: Callable[[], None]) -> int:
        """Call `expire` at the deadline, unless `forget` is called first with the number that is returned."""
        number = next(self._numbers)
        with self._changed:
            self._due[number] = deadline, expire
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="kvservice-deadlines", daemon=True)
                self._thread.start()
            if deadline < self._wakes_at:
                self._changed.notify()
        return number

    def forget(self, number: int) -> None:
        with self._changed:
            self._due.pop(number, None)

    def close(self) -> None:
        """Stop the thread. No further deadline expires."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._clock()
                expired = [number for number, (deadline, _) in self._due.items() if deadline <= now]
                calls = [self._due.pop(number)[1] for number in expired]
                if not calls:
                    self._wakes_at = min((deadline for deadline, _ in self._due.values()), default=math.inf)
                    self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
            for call in calls:
                call()
