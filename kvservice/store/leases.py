"""Leases: each has a deadline, and one timer ends those whose time is up."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

# The heap may have so many entries more than twice the number of leases before it is built again.
_SPARE_ENTRIES = 64


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None: ...


class LeaseClock(Protocol):
    """The time in seconds, and calls at a later time."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[..., object], /) -> Timer: ...


@dataclass(eq=False)
class Lease:
    """Pinned slots. `on_end` is called once, when the lease ends."""

    slots: bytes
    deadline: float
    on_end: Callable[[Lease], None]
    # The earliest entry of the lease in the heap.
    scheduled: float = field(default=float("inf"))


class Leases:
    """All leases of the store."""

    def __init__(self, clock: LeaseClock) -> None:
        self._clock = clock
        self._leases: set[Lease] = set()
        # (time, number, lease): a lease is looked at again at this time. Entries of ended leases are skipped.
        self._heap: list[tuple[float, int, Lease]] = []
        self._numbers = itertools.count()
        self._timer: tuple[float, Timer] | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def deadline(self, ttl_s: float) -> float:
        """Return the time `ttl_s` seconds from now."""
        return self._clock.time() + ttl_s

    def add(self, slots: bytes, deadline: float, on_end: Callable[[Lease], None]) -> Lease:
        """Add a lease that ends at `deadline`, or soon if that has passed."""
        lease = Lease(slots, deadline, on_end)
        self._leases.add(lease)
        self._schedule(lease)
        return lease

    def renew(self, lease: Lease, deadline: float) -> None:
        """Let a lease end at another time."""
        lease.deadline = deadline
        if lease.deadline < lease.scheduled:
            self._schedule(lease)

    def end(self, lease: Lease) -> None:
        """End a lease now."""
        self._leases.remove(lease)
        lease.on_end(lease)

    def close(self) -> None:
        """End no lease any more."""
        if self._timer is not None:
            self._timer[1].cancel()

    def _schedule(self, lease: Lease) -> None:
        if len(self._heap) > 2 * len(self._leases) + _SPARE_ENTRIES:
            self._heap = [(one.deadline, next(self._numbers), one) for one in self._leases if one is not lease]
            for time, _, one in self._heap:
                one.scheduled = time
            heapq.heapify(self._heap)
        lease.scheduled = lease.deadline
        heapq.heappush(self._heap, (lease.deadline, next(self._numbers), lease))
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer to the first entry, unless it comes earlier already."""
        first = self._heap[0][0]
        if self._timer is not None:
            if self._timer[0] <= first:
                return
            self._timer[1].cancel()
        self._timer = first, self._clock.call_later(max(0.0, first - self._clock.time()), self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._clock.time()
        while self._heap and self._heap[0][0] <= now:
            _, _, lease = heapq.heappop(self._heap)
            if lease not in self._leases:
                continue
            if lease.deadline <= now:
                self.end(lease)
            elif lease.scheduled <= now:
                lease.scheduled = lease.deadline
                heapq.heappush(self._heap, (lease.deadline, next(self._numbers), lease))
        if self._heap:
            self._set_timer()
