"""The user of a session's client, and the memory of the daemon that this user may share.

gRPC does not report the user of a unix socket connection. If the socket's mode allows only the daemon's own user and
root, every client is one of these. Otherwise a client sends its session token to the fd-passing socket, where the
kernel reports the user.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError, PoolNotSharedError, RegionsNotAllowedError, StoreNotSharedError
from kvservice.server.fd_passing import TOKEN_BYTES, TOKEN_S
from kvservice.server.loop import Clock
from kvservice.server.peers import Peer

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
