"""The observer's HTTP server: uvicorn with limits on connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvservice.auth import Certificates, Reloading
from kvservice.observer.connections import Connections

# ---- acceptor of HTTP connections
#
# A connection counts as open from the moment it is accepted, including its TLS handshake, during which it has no
# protocol yet.


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


# ---- the server


SWEEP_EVERY_S = TICK_S = 1.0
# No request needs a body. What a client sends with one is read and thrown away, up to this number of bytes.
MAX_BODY_BYTES = 4096


async def serve_http(
    app: ASGIApp,
    listening: socket.socket,
    connections: Connections,
    certificates: Reloading[Certificates] | None = None,
    sweep_every_s: float = SWEEP_EVERY_S,
) -> None:
    """Serve an app on a listening socket until SIGTERM or SIGINT, over TLS if certificates are given. Late connections
    are closed, and new certificates are read, every `sweep_every_s` seconds."""
    config = uvicorn.Config(
        app,
        # Upgraded connections would escape the limits.
        ws="none",
        access_log=False,
        log_config=None,
        # uvicorn's warnings are about requests, so unauthenticated clients could fill the disk with them.
        log_level="error",
        lifespan="off",
        server_header=False,
    )
    context = None
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        certificates.value.load_into(context)
    sweeping = asyncio.create_task(_sweep(connections, certificates, context, sweep_every_s))
    server = _Server(config, connections, context)
    try:
        await server.serve(sockets=[listening])
    finally:
        sweeping.cancel()
        server.accepting.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server with a different acceptor of connections."""

    def __init__(self, config: uvicorn.Config, connections: Connections, context: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self._connections = connections
        self._context = context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None, "they are given"
        await super().startup([])
        (listening,) = sockets
        listening.listen(self.config.backlog)
        listening.setblocking(False)
        acceptor = Acceptor(listening, self._connections, self._make_protocol, self._context)
        self.accepting = asyncio.create_task(acceptor.run())

    async def main_loop(self) -> None:
        """Keep the date of the answers current. uvicorn's own loop would wake ten times a second for that."""
        while not await self.on_tick(0):
            await asyncio.sleep(TICK_S)

    def _make_protocol(self, arrival: Arrival) -> GuardedProtocol:
        state: Any = {"server_state": self.server_state, "app_state": self.lifespan.state}
        return GuardedProtocol(self._connections, arrival, config=self.config, **state)


async def _sweep(
    connections: Connections,
    certificates: Reloading[Certificates] | None,
    context: ssl.SSLContext | None,
    every_s: float,
) -> None:
    while True:
        await asyncio.sleep(every_s)
        connections.close_late()
        if context is not None and certificates is not None and certificates.reload():
            certificates.value.load_into(context)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, with limits on its connections."""

    def __init__(self, connections: Connections, arrival: Arrival, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self._arrival = arrival
        self.address = arrival.address
        self._body_bytes = 0

    def data_received(self, data: bytes) -> None:
        """Close the connection, without an answer, of a peer that sends a longer body than MAX_BODY_BYTES."""
        self._body_bytes = self._body_bytes + len(data) if self.conn.their_state is h11.SEND_BODY else 0
        if self._body_bytes > MAX_BODY_BYTES:
            self.abort()
        else:
            super().data_received(data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._connections.replace(self._arrival, self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()

    def handle_events(self) -> None:
        super().handle_events()
        self._note_state()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_state()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._connections.await_reading(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._connections.answer(self)
        self._note_state()

    def _note_state(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._connections.await_request(self)
        elif not self.flow.write_paused:
            self._connections.answer(self)
