"""Acceptor of HTTP connections. A connection counts as open from the moment it is accepted, including its TLS
handshake, during which it has no protocol yet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from kvservice.observer.connections import Connections

logger = logging.getLogger(__name__)

# Pause after a failed accept. The process is probably out of descriptors until other connections end.
PAUSE_S = 0.1
_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Arrival:
    """An accepted `Connection` until its protocol replaces it."""

    def __init__(self, accepted: socket.socket, address: str) -> None:
        self.accepted = accepted
        self.address = address
        self.connecting: asyncio.Task[None] | None = None

    def abort(self) -> None:
        if self.connecting is not None:
            self.connecting.cancel()


class Acceptor:
    """Accepts connections from a non-blocking listening socket. `make_protocol` gets the arrival that the protocol then
    replaces, by `Connections.replace`. A TLS handshake has the same time limit as a request."""

    def __init__(
        self,
        listening: socket.socket,
        connections: Connections,
        make_protocol: Callable[[Arrival], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        self._listening = listening
        self._connections = connections
        self._make_protocol = make_protocol
        self._context = context

    async def run(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(self._listening)
            except OSError as error:
                logger.warning("no HTTP connection can be accepted: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            arrival = Arrival(accepted, address[0])
            if self._connections.admit(arrival):
                arrival.connecting = asyncio.create_task(self._connect(arrival))
            else:
                self._refuse(accepted)
            # Let the new task start, so that it can be aborted if a later connection displaces it.
            await asyncio.sleep(0)

    def _refuse(self, accepted: socket.socket) -> None:
        with accepted:
            if self._context is None:
                with contextlib.suppress(OSError):
                    accepted.send(_NO_ROOM)

    async def _connect(self, arrival: Arrival) -> None:
        handshake_s = None if self._context is None else self._connections.limits.request_s
        try:
            # A failed handshake raises OSError.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(arrival),
                    arrival.accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=handshake_s,
                )
        finally:
            self._connections.remove(arrival)
