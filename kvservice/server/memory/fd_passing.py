"""The fd-passing socket: a unix socket next to the RPC socket that passes file descriptors, which gRPC cannot carry.

A client sends a token of 16 bytes in one message:

    handover token from a response ──▶ one byte with the file descriptors of the token; a token is valid once
    session token ───────────────────▶ a token of 16 bytes; the daemon now knows the user of the session

A single byte of value 1 means that the daemon has no file descriptors left.

The kernel reports the user of the peer. On any error the daemon closes the connection. What the user of a session may
share is decided here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kvservice.config import ServeConfig
from kvservice.errors import (
    InvalidArgumentError,
    PoolNotSharedError,
    QuotaExceededError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    StoreNotSharedError,
)
from kvservice.logs import LogBudget
from kvservice.server.loop import Clock
from kvservice.server.memory.budget import SpareDescriptor
from kvservice.store import Records, WriterRecord

logger = logging.getLogger(__name__)

# struct ucred: pid, uid, gid
_CREDENTIALS = struct.Struct("iII")
_SO_PEERGROUPS = 59
# The largest buffer that Python's getsockopt supports.
_MAX_GROUPS_BYTES = 1024
_READ_AND_WRITE = 0o6


@dataclass(frozen=True)
class Peer:
    """A user: its uid, and the gids of all its groups."""

    uid: int
    gids: frozenset[int]

    def may_read_and_write(self, found: os.stat_result) -> bool:
        """Return whether the kernel would let this user open a file of that owner, group and mode for reading and
        writing. Root gets no special treatment."""
        if found.st_uid == self.uid:
            granted = found.st_mode >> 6
        elif found.st_gid in self.gids:
            granted = found.st_mode >> 3
        else:
            granted = found.st_mode
        return granted & _READ_AND_WRITE == _READ_AND_WRITE


def pid_of(connection: socket.socket) -> int:
    """Return the process that connected, or 0 if it is in a PID namespace that this process does not see."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def peer_of(connection: socket.socket) -> Peer:
    """Return the connected user as reported by the kernel. Raises OSError if the user is in more than 256 groups."""
    _, uid, gid = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    groups = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUPS_BYTES)
    return Peer(uid, frozenset((gid, *struct.unpack(f"{len(groups) // 4}I", groups))))


TOKEN_BYTES = 16
EXHAUSTED = b"\1"
# The lifetime of a handover token.
TOKEN_S = 10.0
# The time in which a connected client must send a token.
PRESENT_S = 2.0
MAX_OFFERS_OF_SESSION = 8
# The limit on connections of one user that have not sent a token. A further connection closes the oldest one.
MAX_SILENT_OF_USER = 32
BACKLOG = 128


OnFetch: TypeAlias = Callable[[socket.socket], object]


@dataclass(frozen=True, slots=True)
class _Offer:
    owner: object
    descriptors: Sequence[int]
    on_fetch: OnFetch


class FdServer:
    """Keeps offers of file descriptors until a client sends their token. It owns the offered descriptors."""

    def __init__(
        self,
        uids: frozenset[int],
        introduce: Callable[[bytes, Peer], bytes | None],
        clock: Clock,
        peer_of: Callable[[socket.socket], Peer] = peer_of,
    ) -> None:
        """`uids` are the users allowed to use the socket. `introduce` maps a session token and the peer to the token to
        send back, or None if there is no such session. `peer_of` returns the user of a connection."""
        self._uids = uids
        self._introduce, self._clock, self._peer_of = introduce, clock, peer_of
        self._offers: dict[bytes, _Offer] = {}
        # The connections that have not sent a token, by user, the oldest first.
        self._silent: dict[int, dict[asyncio.Task[None], None]] = {}
        self._refused_uids: set[int] = set()
        self._log = LogBudget(logger)
        self._spare = SpareDescriptor()
        # False after a failed accept, so that a series of failures is logged once.
        self._accepts = True
        self._listener: socket.socket | None = None

    def offer(self, descriptors: Sequence[int], owner: object, on_fetch: OnFetch = lambda _: None) -> bytes:
        """Offer these descriptors, and return the token that fetches them. The server closes them in any case.

        `on_fetch` gets the connection before they are sent; if it raises OSError, they are not sent. Raises
        QuotaExceededError if the owner has MAX_OFFERS_OF_SESSION pending offers.
        """
        if sum(offer.owner is owner for offer in self._offers.values()) >= MAX_OFFERS_OF_SESSION:
            _close(descriptors)
            raise QuotaExceededError(
                f"{MAX_OFFERS_OF_SESSION} offers wait", limit="offers", value=MAX_OFFERS_OF_SESSION
            )
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = _Offer(owner, descriptors, on_fetch)
        self._clock.call_later(TOKEN_S, self.withdraw, token)
        return token

    def withdraw(self, token: bytes) -> None:
        """Cancel an offer and close its descriptors. Does nothing if there is no such offer."""
        if (offer := self._offers.pop(token, None)) is not None:
            _close(offer.descriptors)

    def withdraw_all(self, owner: object) -> None:
        """Cancel all offers of an owner."""
        for token in [token for token, offer in self._offers.items() if offer.owner is owner]:
            self.withdraw(token)

    def listen(self, listener: socket.socket) -> None:
        """Serve a non-blocking listening socket, which this object owns from now on."""
        self._listener = listener

    async def serve(self) -> None:
        """Serve connections until cancelled."""
        loop = asyncio.get_running_loop()
        while self._listener is not None:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # most likely out of file descriptors, which is temporary
                self._refuse(self._listener, error)
                await asyncio.sleep(0.1)
                continue
            self._accepts = True
            self._admit(connection)
            # A client that has already sent its token gets its answer before other connections are accepted, so it
            # never counts as silent.
            await asyncio.sleep(0)

    def _refuse(self, listener: socket.socket, error: OSError) -> None:
        """Report to the next waiting client that the daemon has no file descriptors left."""
        if self._accepts:
            self._accepts = False
            logger.warning("the fd-passing socket cannot accept: %s", error)
        with contextlib.suppress(OSError), self._spare.lent():
            connection, _ = listener.accept()
            with connection:
                connection.send(EXHAUSTED)

    def _admit(self, connection: socket.socket) -> None:
        """Start to serve a connection if its user is allowed."""
        try:
            peer = self._peer_of(connection)
        except OSError as error:
            self._log.write(logging.WARNING, "a user is not handed anything: %s", error)
            connection.close()
            return
        if peer.uid not in self._uids:
            if peer.uid not in self._refused_uids:
                self._refused_uids.add(peer.uid)
                logger.warning("user %d is not handed anything: see allow_client_shm, trusted_uids", peer.uid)
            connection.close()
            return
        silent = self._silent.setdefault(peer.uid, {})
        silent[asyncio.create_task(self._answer(connection, peer))] = None
        if len(silent) > MAX_SILENT_OF_USER:
            next(iter(silent)).cancel()

    async def _answer(self, connection: socket.socket, peer: Peer) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError):
            try:
                connection.setblocking(False)
                async with asyncio.timeout(PRESENT_S):
                    token = await asyncio.get_running_loop().sock_recv(connection, TOKEN_BYTES)
            finally:
                del self._silent[peer.uid][asyncio.current_task()]  # type: ignore[arg-type]
            if token in self._offers:
                self._hand_over(self._offers.pop(token), connection)
            elif (introduction := self._introduce(token, peer)) is not None:
                connection.send(introduction)

    def _hand_over(self, offer: _Offer, connection: socket.socket) -> None:
        """Send what is offered, if that is possible."""
        try:
            offer.on_fetch(connection)
            socket.send_fds(connection, [b"\0"], list(offer.descriptors))
        except (OSError, ResourceExhaustedError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._log.write(logging.WARNING, "memory is not handed over: %s", reason)
        finally:
            _close(offer.descriptors)

    def close(self) -> None:
        """Close the socket and all offered descriptors."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for token in list(self._offers):
            self.withdraw(token)
        self._spare.close()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


# ---- the processes that fetched memory for writing

MAX_WRITERS = 256
# The fields of /proc/PID/stat after the name of the program, which ends with the last parenthesis.
_START_FIELD = 19


class Writers:
    """Watches the processes that fetched some memory for writing: what they may still write is not used for others
    before they have ended, see kvservice.blocks.quarantine. They are still known after a restart of the daemon."""

    def __init__(self, memory: str, records: Records[WriterRecord], ended: Callable[[int], object]) -> None:
        """`memory` names the memory. `ended` gets the name of a process that has ended."""
        self._memory, self._records, self._on_end = memory, records, ended
        # The descriptor (pidfd_open(2)) and name of each process.
        self._watched: dict[WriterRecord, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, connection: socket.socket) -> int:
        """Watch the process at the other end of a unix socket. Returns its name, which is that of no other process,
        also after a restart. Raises OSError if the process is not visible from here, or if there are MAX_WRITERS, and
        ResourceExhaustedError."""
        pid = pid_of(connection)
        if not pid:
            reason = f"a process may not write to {self._memory}: it is in a PID namespace that is not visible here"
            raise OSError(errno.ESRCH, reason)
        process = WriterRecord(pid, _start_of(pid))
        if process not in self._watched:
            if len(self._watched) >= MAX_WRITERS:
                raise OSError(errno.EMFILE, f"{MAX_WRITERS} processes can write to {self._memory}")
            name = secrets.randbits(63)
            self._records[name] = process
            try:
                self._watch(os.pidfd_open(pid), process, name)
            except OSError:
                self._records.discard(name)
                raise
        return self._watched[process][1]

    def recover(self) -> set[int]:
        """Watch the processes that the daemon's process before knew, if they live. Returns their names."""
        for name, record in self._records.items():
            try:
                descriptor = os.pidfd_open(record.pid)
            except OSError:
                self._records.discard(name)
                continue
            if _start_of(record.pid) == record.start:
                self._watch(descriptor, record, name)
            else:  # another process has the pid now
                os.close(descriptor)
                self._records.discard(name)
        return {name for _, name in self._watched.values()}

    def pids(self, names: Collection[int]) -> list[int]:
        """Return the pids of those of these processes that have not ended."""
        return sorted(process.pid for process, (_, name) in self._watched.items() if name in names)

    def close(self) -> None:
        """Watch no process any more."""
        while self._watched:
            self._forget(next(iter(self._watched)))

    def _watch(self, descriptor: int, process: WriterRecord, name: int) -> None:
        self._watched[process] = descriptor, name
        asyncio.get_running_loop().add_reader(descriptor, self._ended, process)

    def _forget(self, process: WriterRecord) -> int:
        """Return the name of the process."""
        descriptor, name = self._watched.pop(process)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        return name

    def _ended(self, process: WriterRecord) -> None:
        name = self._forget(process)
        self._on_end(name)
        self._records.discard(name)


def _start_of(pid: int) -> int:
    """Return the start time of a process in ticks since the boot, or 0 if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return int(stat.rpartition(b")")[2].split()[_START_FIELD])


# ---- the user of a session's client, and what this user may share

# gRPC does not report the user of a unix socket connection. If the socket's mode allows only the daemon's own user and
# root, every client is one of these. Otherwise a client sends its session token to the fd-passing socket, where the
# kernel reports the user.

# The limit on valid introduction tokens of a session.
MAX_INTRODUCTIONS = 8


@dataclass(frozen=True)
class Trust:
    """The users that the daemon shares memory with.

    `owner` is the daemon's own user. `shm_uids` may have lanes and regions, `pool_uids` may map the pool, `store_uids`
    the block store, and `store_writers` for writing too. `private` is true if only the owner and root can connect to
    the unix socket. `shm` is the option that sets `shm_uids`.
    """

    owner: Peer
    shm_uids: frozenset[int]
    pool_uids: frozenset[int]
    store_uids: frozenset[int]
    store_writers: frozenset[int]
    private: bool
    shm: str

    @staticmethod
    def of(config: ServeConfig) -> Trust:
        owner = Peer(os.geteuid(), frozenset((os.getegid(), *os.getgroups())))
        nobody: frozenset[int] = frozenset()
        own = nobody | {owner.uid, 0}
        trusted = own | config.trusted_uid_set
        return Trust(
            owner,
            shm_uids={"off": nobody, "auto": own, "on": trusted}[config.allow_client_shm],
            pool_uids=nobody if config.share_pool == "off" else trusted,
            store_uids=nobody if config.shares_store == "off" else trusted,
            store_writers={"off": nobody, "read": nobody, "auto": own, "write": trusted}[config.shares_store],
            private=config.unix_socket_is_private,
            shm=f"--allow-client-shm {config.allow_client_shm}",
        )


class SessionUser:
    """The user of one session, if known."""

    def __init__(self, trust: Trust, clock: Clock) -> None:
        self._trust, self._clock = trust, clock
        # The user and the expiry time of each introduction token, the oldest first.
        self._introductions: dict[bytes, tuple[Peer, float]] = {}
        self.forget()

    def forget(self) -> None:
        """Forget the user, because another client holds the session now."""
        self._peer = self._trust.owner if self._trust.private else None
        self._introductions.clear()

    def introduce(self, peer: Peer) -> bytes:
        """Record the user who sent the session token to the fd-passing socket. Returns an introduction token, with
        which a call proves that it comes from this user."""
        self._peer = peer
        if len(self._introductions) == MAX_INTRODUCTIONS:
            del self._introductions[next(iter(self._introductions))]
        token = secrets.token_bytes(TOKEN_BYTES)
        self._introductions[token] = peer, self._clock.time() + TOKEN_S
        return token

    def check_may_share(self) -> None:
        """Raise RegionsNotAllowedError unless the session's client may have lanes and regions."""
        if not self._trust.shm_uids:
            raise RegionsNotAllowedError(f"the daemon runs with {self._trust.shm}")
        if self._peer is None:
            raise RegionsNotAllowedError("the session's token was not sent to the fd-passing socket")
        if self._peer.uid not in self._trust.shm_uids:
            raise RegionsNotAllowedError(f"not for user {self._peer.uid}: the daemon runs with {self._trust.shm}")

    def check_may_map(self) -> None:
        """Raise PoolNotSharedError unless the session's client may map the pool."""
        if self._peer is None or self._peer.uid not in self._trust.pool_uids:
            raise PoolNotSharedError("not for this session's user: see trusted_uids")

    def check_may_map_store(self, *, writable: bool) -> None:
        """Raise StoreNotSharedError unless the session's client may map the block store, for writing if `writable`."""
        if self._peer is None or self._peer.uid not in self._trust.store_uids:
            raise StoreNotSharedError("not for this session's user: see trusted_uids")
        if writable and self._peer.uid not in self._trust.store_writers:
            raise StoreNotSharedError("for writing, not for this session's user: see share_store", field="writable")

    def opening_peer(self, token: bytes) -> Peer:
        """Return the user with whose permissions a call opens a shared memory object by name.

        An introduction token identifies the user and is valid once. Without a token it is the daemon's own user, which
        is allowed only if no other user can connect. The session is no proof of the user, because after a takeover the
        former client still knows the session token. Raises RegionsNotAllowedError, InvalidArgumentError.
        """
        if not token:
            if not self._trust.private:
                raise RegionsNotAllowedError(
                    "other users can connect to the unix socket (unix_socket_mode): objects are opened by their names "
                    "for calls with a handover_token"
                )
            return self._trust.owner
        introduction = self._introductions.pop(token, None)
        if introduction is None or self._clock.time() > introduction[1]:
            raise InvalidArgumentError("is not known, was used, or has expired", field="handover_token")
        return introduction[0]
