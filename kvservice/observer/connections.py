"""Limits on HTTP connections, and the choice of the connection to close when there are too many.

A connection is either being answered or awaited. An awaited one waits for its peer to complete the headers of a
request, or to read what was written, and the peer has a time limit for either. If there is no room for a new
connection, the connection that has been awaited longest is closed. Idle connections therefore cannot block others, not
even from the same address.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class HttpLimits:
    """Limits on HTTP connections. `request_s` is the time for the headers of a request, from the connection or the last
    response on. `stalled_s` is the time in which a peer must read some of the pending output."""

    max_connections: int = 256
    max_per_address: int = 128
    request_s: float = 10.0
    stalled_s: float = 30.0


class Connection(Protocol):
    """An open connection. `abort` closes it immediately and drops pending output."""

    address: str

    def abort(self) -> None: ...


class Connections:
    """The open connections. `clock` is in seconds."""

    def __init__(self, limits: HttpLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._open: set[Connection] = set()
        self._num_from: Counter[str] = Counter()
        # Deadlines of the awaited connections, the longest awaited first.
        self._awaited: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection, and close an awaited one if there is no room. Returns False if there is no room and no
        awaited connection to close."""
        if self._num_from[connection.address] >= self.limits.max_per_address:
            rivals = [one for one in self._awaited if one.address == connection.address]
        elif len(self._open) >= self.limits.max_connections:
            rivals = list(self._awaited)
        else:
            self._add(connection)
            return True
        if rivals:
            self._close(rivals[0])
            self._add(connection)
        return bool(rivals)

    def _add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._num_from[connection.address] += 1
        self.await_request(connection)

    def replace(self, old: Connection, new: Connection) -> bool:
        """Replace a connection by another one from the same address. Returns False if the old one is not open any
        more."""
        if old not in self._open:
            return False
        self.remove(old)
        self._add(new)
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended. It may have been removed already."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._awaited.pop(connection, None)
        self._num_from[connection.address] -= 1
        if not self._num_from[connection.address]:
            del self._num_from[connection.address]

    def await_request(self, connection: Connection) -> None:
        """Wait for a request of the peer. A request that has begun does not extend the deadline."""
        if connection in self._open and connection not in self._awaited:
            self._awaited[connection] = self._clock() + self.limits.request_s

    def await_reading(self, connection: Connection) -> None:
        """Wait for the peer to read, because the output buffer is full."""
        if connection in self._open:
            self._awaited.pop(connection, None)
            self._awaited[connection] = self._clock() + self.limits.stalled_s

    def answer(self, connection: Connection) -> None:
        """Mark the connection as being answered, so that it has no deadline."""
        self._awaited.pop(connection, None)

    def close_late(self) -> None:
        """Close the connections whose deadline has passed."""
        now = self._clock()
        for connection in [one for one, deadline in self._awaited.items() if deadline <= now]:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.abort()
