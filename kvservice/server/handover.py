"""The handover socket: a unix socket beside the RPC one, for what gRPC cannot carry.

A client sends a token of 16 bytes, in one piece:

    the token of a call's answer ──▶ a byte and the descriptors that the token stands for; a token is good once
    a session's token ─────────────▶ a token of 16 bytes: from now on it is known whose session it is

A byte of 1, and nothing else: the daemon has no file descriptor left.

The kernel says which user is at the other end. Whoever is wrong in anything sees the connection close.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from kvservice.errors import QuotaExceededError
from kvservice.server.descriptors import Spare
from kvservice.server.peers import Peer, peer_of

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
EXHAUSTED = b"\1"
# How long a token is good.
TOKEN_S = 10.0
# How long a client may take to present it.
PRESENT_S = 2.0
MAX_OFFERS_OF_SESSION = 8
# Connections of one user that have not presented a token. When another comes, the oldest is closed.
MAX_SILENT_OF_USER = 32
BACKLOG = 128


class Handover:
    """Offers wait for who presents their token; descriptors in them are the handover's own."""

    def __init__(self, uids: frozenset[int], introduce: Callable[[bytes, Peer], bytes | None]) -> None:
        """`uids` are the users who are answered. `introduce` takes a session's token and returns the answer; None for a
        session that does not exist."""
        self._uids = uids
        self._introduce = introduce
        # By token: whose offer it is, and what.
        self._offers: dict[bytes, tuple[object, Sequence[int]]] = {}
        # By user, the oldest first.
        self._silent: dict[int, dict[asyncio.Task[None], None]] = {}
        self._refused_uids: set[int] = set()
        self._spare = Spare()
        # Since the last time that it could not; so that the log says it once.
        self._accepts = True
        self._listener: socket.socket | None = None

    def offer(self, descriptors: Sequence[int], owner: object) -> bytes:
        """A token for these, which become the handover's. Raises QuotaExceededError, with them closed, while too many
        of the owner's wait to be fetched."""
        if sum(offer[0] is owner for offer in self._offers.values()) >= MAX_OFFERS_OF_SESSION:
            _close(descriptors)
            raise QuotaExceededError(
                f"{MAX_OFFERS_OF_SESSION} offers wait", limit="offers", value=MAX_OFFERS_OF_SESSION
            )
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = owner, descriptors
        asyncio.get_running_loop().call_later(TOKEN_S, self.withdraw, token)
        return token

    def withdraw(self, token: bytes) -> None:
        """Nobody fetches it any more. No error if it is not there."""
        _, descriptors = self._offers.pop(token, (None, ()))
        _close(descriptors)

    def withdraw_all(self, owner: object) -> None:
        """Nobody fetches what the owner has offered any more."""
        for token in [token for token, offer in self._offers.items() if offer[0] is owner]:
            self.withdraw(token)

    def listen(self, path: Path, mode: int) -> None:
        """Open the socket at a path where nobody listens. Raises OSError."""
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        umask = os.umask(0o177)
        try:
            self._listener.bind(str(path))
        finally:
            os.umask(umask)
        os.chmod(path, mode)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._path = path

    async def serve(self) -> None:
        """Answer until cancelled."""
        loop = asyncio.get_running_loop()
        while self._listener is not None:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # out of descriptors, most likely: they come back
                self._refuse(self._listener, error)
                await asyncio.sleep(0.1)
                continue
            self._accepts = True
            self._admit(connection)
            # Whoever has sent its token already is answered before others are accepted, and is never silent.
            await asyncio.sleep(0)

    def _refuse(self, listener: socket.socket, error: OSError) -> None:
        """Tell whoever waits that the daemon has no descriptor left."""
        if self._accepts:
            self._accepts = False
            logger.warning("the handover socket cannot accept: %s", error)
        with contextlib.suppress(OSError), self._spare.lent():
            connection, _ = listener.accept()
            with connection:
                connection.send(EXHAUSTED)

    def _admit(self, connection: socket.socket) -> None:
        """Begin to answer, if it is somebody who is answered."""
        try:
            peer = peer_of(connection)
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
                _, descriptors = self._offers.pop(token)
                try:
                    socket.send_fds(connection, [b"\0"], descriptors)
                finally:
                    _close(descriptors)
            elif (introduction := self._introduce(token, peer)) is not None:
                connection.send(introduction)

    def close(self) -> None:
        """Close the socket and all that was offered."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        for token in list(self._offers):
            self.withdraw(token)
        self._spare.close()


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
