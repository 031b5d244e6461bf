"""The fd-passing socket: a unix socket next to the RPC socket that passes file descriptors, which gRPC cannot carry.

A client sends a token of 16 bytes in one message:

    handover token from a response ──▶ one byte with the file descriptors of the token; a token is valid once
    session token ───────────────────▶ a token of 16 bytes; the daemon now knows the user of the session

A single byte of value 1 means that the daemon has no file descriptors left.

The kernel reports the user of the peer. On any error the daemon closes the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvservice.errors import QuotaExceededError
from kvservice.server.clock import Clock
from kvservice.server.descriptors import Spare
from kvservice.server.peers import Peer, peer_of

logger = logging.getLogger(__name__)

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


OnFetch: TypeAlias = Callable[[socket.socket], None]


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
        self._spare = Spare()
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
            logger.warning("a user is not handed anything: %s", error)
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
                offer = self._offers.pop(token)
                try:
                    offer.on_fetch(connection)
                    socket.send_fds(connection, [b"\0"], list(offer.descriptors))
                finally:
                    _close(offer.descriptors)
            elif (introduction := self._introduce(token, peer)) is not None:
                connection.send(introduction)

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
