"""Warns when an address has as many connections as it may have.

gRPC closes further connections without a notice to the daemon, so the connections are counted in the kernel's tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from kvservice.logs import LogBudget

logger = logging.getLogger(__name__)

COUNT_EVERY_S = 10.0
# The states of a connected socket in /proc/net/tcp and in /proc/net/unix.
_TCP_ESTABLISHED, _UNIX_CONNECTED = b"01", b"03"


def count_tcp(port: int, tables: Path = Path("/proc/net")) -> int:
    """Return the number of connections to a TCP port of this network namespace."""
    end = b":%04X" % port
    count = 0
    for name in ("tcp", "tcp6"):
        for fields in _rows(tables / name):
            count += fields[1].endswith(end) and fields[3] == _TCP_ESTABLISHED
    return count


def count_unix(path: str, tables: Path = Path("/proc/net")) -> int:
    """Return the number of connections to a unix socket. A table's row of a connection has the path of the socket on
    the accepting side only."""
    wanted = path.encode()
    rows = _rows(tables / "unix", 7)
    return sum(len(fields) == 8 and fields[7] == wanted and fields[5] == _UNIX_CONNECTED for fields in rows)


def _rows(table: Path, max_splits: int = -1) -> list[list[bytes]]:
    with contextlib.suppress(OSError):  # for example without IPv6
        return [line.split(None, max_splits) for line in table.read_bytes().splitlines()[1:]]
    return []


class ConnectionWatch:
    """Counts the connections of each address, and logs when an address has reached the limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[str, Callable[[], int]] = {}
        self._full: set[str] = set()
        self._log = LogBudget(logger)

    def add(self, address: str, count: Callable[[], int]) -> None:
        """Watch an address. `count` returns the number of its connections; it runs on a thread."""
        self._counts[address] = count

    @property
    def addresses(self) -> list[str]:
        return [*self._counts]

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            await asyncio.sleep(COUNT_EVERY_S)
            self.note(await asyncio.to_thread(lambda: {name: count() for name, count in self._counts.items()}))

    def note(self, counts: Mapping[str, int]) -> None:
        """Log the addresses that have reached the limit since the last time."""
        full = {address for address, count in counts.items() if count >= self._limit}
        for address in sorted(full - self._full):
            message = "%s has %d connections, and max_connections is %d: further ones are closed at once"
            self._log.write(logging.WARNING, message, address, counts[address], self._limit)
        self._full = full
