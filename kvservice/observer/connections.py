"""HTTP connections: how many there may be, and which of them gives way when there are too many.

A connection is either answered or awaited: the server waits for its peer to complete a request's headers, or to read
what was written. A peer has a time limit for either. When there is no room for a new connection, the one that has been
awaited longest is closed; so connections that ask nothing keep nobody out, not even others from the same address.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class HttpLimits:
    """`request_s`: time for a request's headers, from connecting or from the last answer on. `stalled_s`: time in which
    a peer must read some of what waits to be written."""

    max_connections: int = 256
    max_per_address: int = 128
    request_s: float = 10.0
    stalled_s: float = 30.0


class Connection(Protocol):
    """An open connection. `abort` closes it at once, whatever has not been written yet."""

    address: str

    def abort(self) -> None: ...


class Connections:
    """The open connections. `clock` is in seconds."""

    def __init__(self, limits: HttpLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._open: set[Connection] = set()
        self._num_from: Counter[str] = Counter()
        # Deadlines of the awaited connections; the one that has been awaited longest comes first.
        self._awaited: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection. False: there is no room, because all that could give way are being answered."""
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
        """Let a connection take the place of one from the same address. False: that has none any more."""
        if old not in self._open:
            return False
        self.remove(old)
        self._add(new)
        return True

    def remove(self, connection: Connection) -> None:
        """The connection has ended. No error if it is not there."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._awaited.pop(connection, None)
        self._num_from[connection.address] -= 1
        if not self._num_from[connection.address]:
            del self._num_from[connection.address]

    def await_request(self, connection: Connection) -> None:
        """The peer is to send a request. It gets no more time for one that it has begun."""
        if connection in self._open and connection not in self._awaited:
            self._awaited[connection] = self._clock() + self.limits.request_s

    def await_reading(self, connection: Connection) -> None:
        """The peer is to read: more waits to be written than is buffered."""
        if connection in self._open:
            self._awaited.pop(connection, None)
            self._awaited[connection] = self._clock() + self.limits.stalled_s

    def answer(self, connection: Connection) -> None:
        """The peer is not awaited any more."""
        self._awaited.pop(connection, None)

    def close_late(self) -> None:
        """Close those whose peers are past their deadline."""
        now = self._clock()
        for connection in [one for one, deadline in self._awaited.items() if deadline <= now]:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.abort()
