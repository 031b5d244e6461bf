"""This limits what one peer takes of the daemon's gRPC addresses beside calls: connections, time and bytes.

gRPC tells the daemon of calls alone. Frames that are no calls it reads and answers in its one thread, for as long as
they come, so that 20 connections keep all other clients waiting; and none of its options limits that. So the kernel is
asked for the connections (NETLINK_SOCK_DIAG for TCP, SO_PEERCRED for the unix socket), and those of who is over are
closed at gRPC's descriptors. Tried by tests/server/test_peers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from kvservice.config import ServeConfig
from kvservice.logs import LogBudget

logger = logging.getLogger(__name__)

Cause: TypeAlias = Literal["connections", "no_call", "bytes"]
CAUSES: Final[tuple[Cause, ...]] = ("connections", "no_call", "bytes")
# The time between two looks, while a connection sends much without a call, and while nobody does anything.
LOOK_S: Final = 0.1
LOOK_AGAIN_S: Final = 0.025
LOOK_QUIET_S: Final = 1.0
# The time between two looks at the connections to the unix socket: each reads all descriptors of the process.
LOOK_UNIX_S: Final = 1.0
# The bytes that a connection may receive before its first call is accepted, and those that it may have received for as
# long as FIRST_S then: gRPC's windows let a client send the beginning of a large message. An address that has sent more
# has the second limit at once for some time.
FIRST_BYTES: Final = 1 << 20
SUSPECT_BYTES: Final = 64 << 10
FIRST_S: Final = 0.1
SUSPECT_S: Final = 60.0
MAX_ADDRESSES: Final = 4096
# A connection with calls may receive so many of the largest messages between two of them, and one more for each RPC
# that is open on it, or as much as it likes in this time: many calls may be on their way together, and slowly. So may
# the first connection again of an address that has made a call lately, whose first call may be large.
MAX_MESSAGES: Final = 16
BETWEEN_CALLS_S: Final = 1.0
KNOWN_S: Final = 3600.0

_LIBC: Final = ctypes.CDLL(None)

_SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLMSG_DONE = 20, 2, 3
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_INET_DIAG_INFO, _ESTABLISHED = 2, 1
_MESSAGE_BYTES, _HEADER_BYTES = 16, 72
_BYTES_RECEIVED: Final = 128  # the offset of tcpi_bytes_received in struct tcp_info


class TcpConnection(NamedTuple):
    """`peer` is the kernel's address and port of the other end. `num_bytes` were received, TLS included."""

    peer: bytes
    num_bytes: int


class SockDiagError(OSError):
    """The kernel does not list its connections here."""


class SockDiag:
    """Lists the established connections to a TCP address of this network namespace."""

    def __init__(self, address: str) -> None:
        """`address` is a host and a port. Raises OSError if the kernel does not list its connections."""
        host, _, port = address.rpartition(":")
        self._port = int(port)
        # Other servers may have the port at other addresses. None: this one has it at all, or at a name's.
        self._host: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
        with contextlib.suppress(ValueError):
            if not (parsed := ipaddress.ip_address(host.strip("[]").partition("%")[0])).is_unspecified:
                self._host = parsed
        list(self.connections())

    def connections(self) -> Iterator[TcpConnection]:
        """Raises OSError."""
        # A socket whose list was not read to its end gives no other.
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 4) as asking:
            asking.settimeout(5.0)
            for family in (socket.AF_INET, socket.AF_INET6):
                yield from self._of_family(asking, family)

    def _of_family(self, asking: socket.socket, family: int) -> Iterator[TcpConnection]:
        wanted = 1 << (_INET_DIAG_INFO - 1)
        request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, wanted, 1 << _ESTABLISHED)
        request += struct.pack(">H", self._port) + bytes(46)
        header = struct.pack("=IHHII", _MESSAGE_BYTES + len(request), _SOCK_DIAG_BY_FAMILY, _DUMP, 0, 0)
        asking.send(header + request)
        while True:
            data = asking.recv(1 << 18)
            at = 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind == _NLMSG_DONE:
                    return
                if kind == _NLMSG_ERROR:
                    raise SockDiagError(-struct.unpack_from("=i", data, at + _MESSAGE_BYTES)[0], "sock_diag")
                message = data[at : at + length]
                local = _unmapped(message[24 : 40 if family == socket.AF_INET6 else 28])
                if self._host is None or local == self._host.packed:
                    yield _parsed(message, family)
                at += (length + 3) & ~3


def _parsed(message: bytes, family: int) -> TcpConnection:
    size = 4 if family == socket.AF_INET else 16
    host = message[40 : 40 + size]
    peer = host + (message[56:60] if _is_link_local(host) else b"") + message[22:24]
    at, num_bytes = _MESSAGE_BYTES + _HEADER_BYTES, 0
    while at + 4 <= len(message):
        length, kind = struct.unpack_from("=HH", message, at)
        if kind == _INET_DIAG_INFO and length >= 4 + _BYTES_RECEIVED + 8:
            num_bytes = struct.unpack_from("=Q", message, at + 4 + _BYTES_RECEIVED)[0]
        at += max(4, (length + 3) & ~3)
    return TcpConnection(peer, num_bytes)


def _unmapped(host: bytes) -> bytes:
    """Return an address of IPv4 as such: on a socket for both it is mapped."""
    return host[12:] if len(host) == 16 and host.startswith(bytes(10) + b"\xff\xff") else host


def _is_link_local(host: bytes) -> bool:
    """Whether an address is one of a link, which the number of the interface belongs to."""
    return len(host) == 16 and host[0] == 0xFE and host[1] & 0xC0 == 0x80


def name_of(peer: bytes) -> tuple[str, str]:
    """Return gRPC's name of a peer, such as ipv4:10.0.0.1:4711, and its address. A peer is the bytes of its address,
    those of the interface's number if the address is one of a link, and those of the port."""
    host, port = peer[:-2], int.from_bytes(peer[-2:], "big")
    if len(host) == 20:
        address = f"{socket.inet_ntop(socket.AF_INET6, host[:16])}%{int.from_bytes(host[16:], sys.byteorder)}"
        return f"ipv6:%5B{address.replace('%', '%25')}%5D:{port}", address
    host = _unmapped(host)
    if len(host) == 4:
        address = socket.inet_ntop(socket.AF_INET, host)
        return f"ipv4:{address}:{port}", address
    address = socket.inet_ntop(socket.AF_INET6, host)
    return f"ipv6:%5B{address}%5D:{port}", address


@dataclass(slots=True)
class _WatchedConnection:
    """A connection. `num_calls` and `num_bytes` are those at `called_at`, when its latest call was noticed. It has sent
    more than SUSPECT_BYTES without a call since `much_since`."""

    name: str
    address: str
    since: float
    num_calls: int = 0
    num_bytes: int = 0
    called_at: float = 0.0
    much_since: float | None = None


class Peers:
    """`num_closed` counts the connections that were closed, by cause."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_peer = config.peer_connection_limit
        self._first_call_s = config.first_call_s
        self._max_message_bytes = config.max_message_bytes
        # Only the daemon's own user and root can connect otherwise, who may have all of it.
        self._others_connect = bool(int(config.unix_socket_mode, 8) & 0o066)
        self._clock = clock
        self._log = LogBudget(logger, clock)
        self._known: dict[bytes, _WatchedConnection] = {}
        self._calls: dict[str, int] = {}
        self._open: Counter[str] = Counter()
        # Addresses that sent too much without a call, with the time until which they have the lower limit.
        self._suspects: OrderedDict[str, float] = OrderedDict()
        # Addresses that made calls, with the time until which they are known for it.
        self._callers: OrderedDict[str, float] = OrderedDict()
        # The names of calls whose connections the last look did not list: they may have come after the list was made.
        self._unlisted: set[str] = set()
        self._looks_again = False
        # The calls that had begun at the last look, and the connections and their bytes.
        self._num_begun = 0
        self._received = (0, 0)
        self._is_quiet = True
        self._diag: SockDiag | None = None
        self._unix_path = ""
        self._unix_look_at = 0.0
        # The users of the connections to the unix socket, by inode, the oldest first.
        self._unix_users: dict[int, int] = {}
        self.num_closed: dict[Cause, int] = dict.fromkeys(CAUSES, 0)

    def watch_tcp(self, address: str) -> None:
        """`address` is the host and the port."""
        self._port = int(address.rpartition(":")[2])
        try:
            self._diag = SockDiag(address)
        except OSError as error:
            message = "the kernel does not list connections (%s): no limits on those without calls, and of an address"
            logger.warning(message, error.strerror or error)

    def watch_unix(self, bound: str) -> None:
        """`bound` is the path to which the socket was bound, before it was moved to its own."""
        self._unix_path = bound

    def called(self, peer: str) -> None:
        """Note a call that was accepted on a connection. `peer` is gRPC's name of the other end."""
        if self._diag is not None:  # else nobody looks, and forgets it
            self._calls[peer] = self._calls.get(peer, 0) + 1

    @contextlib.contextmanager
    def opened(self, peer: str) -> Iterator[None]:
        """Count an RPC of which a message may be on its way for the duration of the context."""
        self._open[peer] += 1
        try:
            yield
        finally:
            self._open[peer] -= 1
            if not self._open[peer]:
                del self._open[peer]

    async def run(self, num_begun: Callable[[], int]) -> None:
        """Look until cancelled. `num_begun` returns how many calls of all clients have begun. A thread looks, because
        the event loop may be late while it is needed most."""
        stopped = threading.Event()
        looking = threading.Thread(target=self._look_until, args=(stopped, num_begun), name="kvservice-peers")
        looking.start()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
            looking.join()

    def _look_until(self, stopped: threading.Event, num_begun: Callable[[], int]) -> None:
        while not stopped.is_set():
            if self._diag is None and not (self._unix_path and self._others_connect):
                stopped.wait(LOOK_QUIET_S)  # an address that the process could not have may be opened yet
                continue
            pause_s = self.pause_s(num_begun())
            is_quiet = pause_s >= LOOK_QUIET_S
            # A call ends a pause for quiet: it could be kept waiting.
            while pause_s > 0 and not (is_quiet and num_begun() != self._num_begun):
                if stopped.wait(min(pause_s, LOOK_S)):
                    return
                pause_s -= LOOK_S
            try:
                self.look()
            except Exception as error:
                # For example because there are no descriptors left.
                self._log.write(logging.ERROR, "a look at the connections failed: %r", error)

    def pause_s(self, num_begun: int) -> float:
        """Return the time until the next look. While no client does anything, none can be kept waiting."""
        is_quiet, self._num_begun = self._is_quiet and num_begun == self._num_begun, num_begun
        if self._looks_again:
            return LOOK_AGAIN_S
        return LOOK_QUIET_S if is_quiet else LOOK_S

    def look(self) -> None:
        """Close the connections of who is over."""
        now = self._clock()
        if self._unix_path and self._others_connect and now >= self._unix_look_at:
            self._unix_look_at = now + LOOK_UNIX_S
            self._close_unix()
        if self._diag is not None and (over := self.over(self._diag.connections())):
            self._close_tcp(over)

    def over(self, connections: Iterable[TcpConnection]) -> dict[bytes, Cause]:
        """Return the connections that are to be closed, of all that there are now, by peer."""
        now, calls = self._clock(), self._calls.copy()  # the event loop adds to it meanwhile
        found: dict[bytes, Cause] = {}
        present: dict[bytes, _WatchedConnection] = {}
        of_address: Counter[str] = Counter()
        self._looks_again = False
        received = 0
        for peer, num_bytes in connections:
            received += num_bytes
            known = self._known.get(peer)
            if known is None or num_bytes < known.num_bytes:  # another connection has the port
                known = _WatchedConnection(*name_of(peer), since=now, called_at=now)
            present[peer] = known
            of_address[known.address] += 1
            num_calls = calls.get(known.name, 0)
            if num_calls != known.num_calls:
                known.num_calls, known.num_bytes, known.called_at = num_calls, num_bytes, now
            if cause := self._cause(known, num_bytes - known.num_bytes, now):
                found[peer] = cause
        for address, count in of_address.items():
            if count > self._per_peer:
                theirs = [peer for peer, known in present.items() if known.address == address and peer not in found]
                # Those with calls stay first, then the oldest.
                theirs.sort(key=lambda peer: (not present[peer].num_calls, present[peer].since))
                found |= dict.fromkeys(theirs[self._per_peer :], "connections")
        before, self._received = self._received, (len(present), received)
        self._is_quiet = before == self._received
        self._known = present
        unlisted = calls.keys() - {known.name for known in present.values()}
        for name in unlisted & self._unlisted:
            self._calls.pop(name, None)
        self._unlisted = unlisted - self._unlisted
        return found

    def _cause(self, known: _WatchedConnection, num_bytes: int, now: float) -> Cause | None:
        """Return why a connection that received so many bytes since its latest call is to be closed, or None."""
        if known.num_calls:
            _note_address(self._callers, known.address, now + KNOWN_S)
        if self._callers.get(known.address, 0.0) > now and (known.num_calls or now - known.since <= self._first_call_s):
            idle_s = now - known.called_at
            num_messages = MAX_MESSAGES + self._open.get(known.name, 0)
            allowed_bytes = num_messages * self._max_message_bytes + FIRST_BYTES
            return "bytes" if num_bytes > allowed_bytes and idle_s > BETWEEN_CALLS_S else None
        suspect = self._suspects.get(known.address, 0.0) > now
        much = num_bytes > SUSPECT_BYTES
        self._looks_again |= suspect or much
        if much and known.much_since is None:
            known.much_since = now
        late = known.much_since is not None and now - known.much_since >= FIRST_S
        if num_bytes > FIRST_BYTES or (much and (suspect or late)):
            _note_address(self._suspects, known.address, now + SUSPECT_S)
            return "bytes"
        return "no_call" if now - known.since > self._first_call_s else None

    def _close_tcp(self, over: dict[bytes, Cause]) -> None:
        wanted = {name_of(peer)[0]: peer for peer in over}
        for _, opened in own_sockets():
            with opened, contextlib.suppress(OSError):
                if opened.family not in (socket.AF_INET, socket.AF_INET6) or opened.getsockname()[1] != self._port:
                    continue
                host, port, *more = opened.getpeername()
                raw = socket.inet_pton(opened.family, host.partition("%")[0])
                if _is_link_local(raw):
                    raw += more[1].to_bytes(4, sys.byteorder)
                peer = wanted.get(name_of(raw + port.to_bytes(2, "big"))[0])
                if peer is not None:
                    _end(opened)
                    self._note(over[peer], self._known[peer].name if peer in self._known else "")

    def _close_unix(self) -> None:
        """Close the newest connections of users who have more than their share. The daemon's own user and root may have
        all: they could stop the daemon, too."""
        users = {}
        for inode, opened in own_sockets():
            with opened, contextlib.suppress(OSError):
                if opened.family == socket.AF_UNIX and opened.getsockname() == self._unix_path:
                    credentials = opened.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    users[inode] = struct.unpack("=iII", credentials)[1]
        # The numbers of inodes do not tell which is older.
        self._unix_users = {inode: uid for inode, uid in self._unix_users.items() if inode in users} | users
        of_user: Counter[int] = Counter()
        over = set()
        for inode, uid in self._unix_users.items():
            of_user[uid] += 1
            if of_user[uid] > self._per_peer and uid not in (0, os.geteuid()):
                over.add(inode)
        for inode, opened in own_sockets() if over else ():
            with opened, contextlib.suppress(OSError):
                if inode in over:
                    _end(opened)
                    self._note("connections", f"user {users[inode]}")

    def _note(self, cause: Cause, who: str) -> None:
        self.num_closed[cause] += 1
        why = {
            "connections": f"over {self._per_peer} connections (max_connections_per_peer)",
            "no_call": f"no call was accepted for {self._first_call_s:g} s (first_call_s)",
            "bytes": "it sent much without a call",
        }
        self._log.write(logging.WARNING, "a connection of %s is closed: %s", who, why[cause])


def _note_address(addresses: OrderedDict[str, float], address: str, until: float) -> None:
    addresses[address] = until
    addresses.move_to_end(address)
    if len(addresses) > MAX_ADDRESSES:
        addresses.popitem(last=False)


def own_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Yield the inodes and duplicates of the sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            copy = os.dup(int(name))
            try:
                opened = socket.socket(fileno=copy)
            except OSError:  # it is no socket any more
                os.close(copy)
                continue
            yield os.fstat(copy).st_ino, opened


def _end(opened: socket.socket) -> None:
    """Close the connection for its owner in this process, too, with what it has not read yet."""
    if opened.family == socket.AF_UNIX:
        opened.shutdown(socket.SHUT_RDWR)
    else:
        # The address of no family disconnects, with a reset. After a shutdown gRPC would still read what comes.
        _LIBC.connect(opened.fileno(), bytes(16), 16)
