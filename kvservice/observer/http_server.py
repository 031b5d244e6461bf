"""The observer's HTTP server: uvicorn with limits on connections."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvservice.auth import Certificates, Reloading
from kvservice.observer.accepting import Acceptor, Arrival
from kvservice.observer.connections import Connections

SWEEP_EVERY_S = TICK_S = 1.0


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
