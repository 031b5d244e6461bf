"""The observer's HTTP server: uvicorn, with connections that are counted and awaited."""

from __future__ import annotations

import asyncio
import functools
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvservice.observer.connections import Connections

SWEEP_EVERY_S = 1.0
_NO_ROOM = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


async def serve_http(app: ASGIApp, listening: socket.socket, connections: Connections) -> None:
    """Serve an app on a listening socket until SIGTERM or SIGINT."""
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
    closing = asyncio.create_task(_close_late(connections))
    try:
        await uvicorn.Server(config).serve(sockets=[listening])
    finally:
        closing.cancel()


async def _close_late(connections: Connections) -> None:
    while True:
        await asyncio.sleep(SWEEP_EVERY_S)
        connections.close_late()


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
