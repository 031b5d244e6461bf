"""Hands descriptors over: a unix socket beside the RPC one, for what gRPC cannot carry.

A client that was given a token over its RPC connection presents it here, once, and gets what the token stands for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvservice.errors import QuotaExceededError

logger = logging.getLogger(__name__)

TOKEN_BYTES = 16
# How long a token is good, and how long a client may take to present it.
TOKEN_S = 10.0
MAX_OFFERS = 1024
MAX_CONNECTIONS = 64
BACKLOG = 128
# struct ucred: pid, uid, gid
_CREDENTIALS = struct.Struct("iII")


class Handover:
    """Offers wait for who presents their token; descriptors in them are the handover's own."""

    def __init__(self, trusted_uids: frozenset[int]) -> None:
        self._trusted = trusted_uids | {0, os.geteuid()}
        # By token: whose offer it is, and what.
        self._offers: dict[bytes, tuple[object, list[int]]] = {}
        # Owners of what was fetched.
        self._served: weakref.WeakSet[Any] = weakref.WeakSet()
        self._connections: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    def offer(self, descriptors: Sequence[int], owner: object = None) -> bytes:
        """A token for duplicates of these. Raises QuotaExceededError while too many wait to be fetched."""
        if len(self._offers) >= MAX_OFFERS:
            raise QuotaExceededError(f"{MAX_OFFERS} offers wait", limit="offers", value=MAX_OFFERS)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._offers[token] = owner, [os.dup(descriptor) for descriptor in descriptors]
        asyncio.get_running_loop().call_later(TOKEN_S, self._withdraw, token)
        return token

    def has_served(self, owner: object) -> bool:
        """Whether a trusted user has fetched something that it offered."""
        return owner in self._served

    def withdraw(self, owner: object) -> None:
        """Nobody fetches what it has offered any more."""
        for token in [token for token, offer in self._offers.items() if offer[0] is owner]:
            self._withdraw(token)

    def _withdraw(self, token: bytes) -> None:
        _, descriptors = self._offers.pop(token, (None, []))
        _close(descriptors)

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
                logger.warning("the handover socket cannot accept: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) >= MAX_CONNECTIONS:
                connection.close()
                continue
            task = asyncio.create_task(self._answer(connection))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    def close(self) -> None:
        """Close the socket and all that was offered."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        for token in list(self._offers):
            self._withdraw(token)

    async def _answer(self, connection: socket.socket) -> None:
        """Whoever is wrong in anything sees the connection close."""
        with connection, contextlib.suppress(OSError, TimeoutError):
            connection.setblocking(False)
            async with asyncio.timeout(TOKEN_S):
                token = await _receive(connection, TOKEN_BYTES)
            uid = _peer_uid(connection)
            if uid not in self._trusted:
                logger.warning("user %d is not handed anything: see trusted_uids", uid)
                return
            if token in self._offers:
                owner, descriptors = self._offers.pop(token)
                if owner is not None:
                    self._served.add(owner)
                try:
                    socket.send_fds(connection, [b"\0"], descriptors)
                finally:
                    _close(descriptors)


def _peer_uid(connection: socket.socket) -> int:
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


async def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or those before the peer's end."""
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < num_bytes and (part := await loop.sock_recv(connection, num_bytes - len(data))):
        data += part
    return data


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
