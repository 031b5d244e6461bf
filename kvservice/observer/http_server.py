"""The observer's HTTP server: uvicorn, with connections that are counted and awaited."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvservice.auth import Certificates, Reloading
from kvservice.observer.connections import Connections

SWEEP_EVERY_S = 1.0
_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


async def serve_http(
    app: ASGIApp,
    listening: socket.socket,
    connections: Connections,
    certificates: Reloading[Certificates] | None = None,
) -> None:
    """Serve an app on a listening socket until SIGTERM or SIGINT, over TLS if there are certificates."""
    config = uvicorn.Config(
        app,
        http=functools.partial(GuardedProtocol, connections),  # type: ignore[arg-type]
        # An upgraded connection would not be counted.
        ws="none",
        access_log=False,
        log_config=None,
        log_level="warning",
        lifespan="off",
        server_header=False,
    )
    context = None
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        certificates.value.load_into(context)
    sweeping = asyncio.create_task(_sweep(connections, certificates, context))
    try:
        await _Server(config, context, connections.limits.request_s).serve(sockets=[listening])
    finally:
        sweeping.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server, with a time limit for TLS handshakes: connections are counted only after theirs."""

    def __init__(self, config: uvicorn.Config, context: ssl.SSLContext | None, handshake_s: float) -> None:
        super().__init__(config)
        self._context = context
        self._handshake_s = handshake_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        protocol: Any = self.config.http_protocol_class
        make_protocol = functools.partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for listening in sockets or ():
            server = await asyncio.get_running_loop().create_server(
                make_protocol,
                sock=listening,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else self._handshake_s,
                backlog=self.config.backlog,
            )
            self.servers.append(server)


async def _sweep(
    connections: Connections, certificates: Reloading[Certificates] | None, context: ssl.SSLContext | None
) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        connections.close_late()
        if context is not None and certificates is not None and certificates.reload():
            certificates.value.load_into(context)


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP protocol, whose connections are counted and awaited."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self.address = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._connections.admit(self):
            transport.write(_NO_ROOM)
            transport.close()

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
