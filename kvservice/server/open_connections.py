"""Warns when an address has as many connections as it may have.

gRPC closes further connections without a notice to the daemon, so the connections are counted in the kernel's tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
    """Counts the connections of the daemon's gRPC addresses, and logs when an address has reached the limit. `num_unix`
    and `num_tcp` are the latest counts."""

    def __init__(self, limit: int) -> None:
        self.num_unix = self.num_tcp = 0
        self._limit = limit
        self._unix_socket = self._unix_bound = self._tcp_address = ""
        self._full: set[str] = set()
        self._log = LogBudget(logger)

    def add_unix(self, path: str, bound: str) -> None:
        """`bound` is the path to which the socket was bound, before it was moved to `path`."""
        self._unix_socket, self._unix_bound = path, bound

    def add_tcp(self, address: str) -> None:
        """`address` is host:port."""
        self._tcp_address = address

    @property
    def addresses(self) -> list[str]:
        return [address for address in (self._unix_socket, self._tcp_address) if address]

    async def run(self) -> None:
        """Count until cancelled. The first count is at once, so that its thread is there from the start."""
        while True:
            self.note(*await asyncio.to_thread(self.count))
            await asyncio.sleep(COUNT_EVERY_S)

    def count(self) -> tuple[int, int]:
        """Return the number of connections on the unix socket and over TCP. Reads tables that can be long."""
        num_unix = count_unix(self._unix_bound) if self._unix_socket else 0
        num_tcp = count_tcp(int(self._tcp_address.rpartition(":")[2])) if self._tcp_address else 0
        return num_unix, num_tcp

    def note(self, num_unix: int, num_tcp: int) -> None:
        """Keep the counts, and log the addresses that have reached the limit since the last time."""
        self.num_unix, self.num_tcp = num_unix, num_tcp
        counts = {self._unix_socket: num_unix, self._tcp_address: num_tcp}
        full = {address for address, count in counts.items() if count >= self._limit}
        for address in sorted(full - self._full):
            message = "%s has %d connections, and max_connections is %d: further ones are closed at once"
            self._log.write(logging.WARNING, message, address, counts[address], self._limit)
        self._full = full
