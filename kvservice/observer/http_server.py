"""The observer's HTTP server: uvicorn with limits on connections.

uvicorn's own limits do not do: it gives headers, TLS handshakes and readers no time limit, and beyond
`limit_concurrency` it refuses the new connections. With 16 of them, 16 clients that sent half a request line kept all
others out for good (uvicorn 0.54). Tried by tests/observer/test_connections.py and test_web_tls.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvservice.auth import Certificates, Reloading

# ---- limits on connections, and the choice of the connection to close when there are too many
#
# A connection is either being answered or awaited. An awaited one waits for its peer to complete the headers of a
# request, or to read what was written, and the peer has a time limit for either. If there is no room for a new
# connection, the connection that has been awaited longest is closed. Idle connections therefore cannot block others,
# not even from the same address.


@dataclass(frozen=True)
class HttpLimits:
    """Limits on HTTP connections. `request_s` is the time for the headers of a request, from the connection or the last
    response on. `stalled_s` is the time in which a peer must read some of the pending output."""

    max_connections: int = 256
    max_per_address: int = 128
    request_s: float = 10.0
    stalled_s: float = 30.0


class Connection(Protocol):
    """An open connection. `abort` closes it immediately and drops pending output."""

    address: str

    def abort(self) -> None: ...


class Connections:
    """The open connections. `clock` is in seconds."""

    def __init__(self, limits: HttpLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._open: set[Connection] = set()
        self._num_from: Counter[str] = Counter()
        # Deadlines of the awaited connections, the longest awaited first.
        self._awaited: dict[Connection, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection) -> bool:
        """Add a new connection, and close an awaited one if there is no room. Returns False if there is no room and no
        awaited connection to close."""
        if self._num_from[connection.address] >= self.limits.max_per_address:
            rivals = [one for one in self._awaited if one.address == connection.address]
        elif len(self._open) >= self.limits.max_connections:
            rivals = list(self._awaited)
        else:
            self._add(connection)
            return True
        if rivals:
            self._close(rivals[0])
            self._add(connection)
        return bool(rivals)

    def _add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._num_from[connection.address] += 1
        self.await_request(connection)

    def replace(self, old: Connection, new: Connection) -> bool:
        """Replace a connection by another one from the same address. Returns False if the old one is not open any
        more."""
        if old not in self._open:
            return False
        self.remove(old)
        self._add(new)
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended. It may have been removed already."""
        if connection not in self._open:
            return
        self._open.remove(connection)
        self._awaited.pop(connection, None)
        self._num_from[connection.address] -= 1
        if not self._num_from[connection.address]:
            del self._num_from[connection.address]

    def await_request(self, connection: Connection) -> None:
        """Wait for a request of the peer. A request that has begun does not extend the deadline."""
        if connection in self._open and connection not in self._awaited:
            self._awaited[connection] = self._clock() + self.limits.request_s

    def await_reading(self, connection: Connection) -> None:
        """Wait for the peer to read, because the output buffer is full."""
        if connection in self._open:
            self._awaited.pop(connection, None)
            self._awaited[connection] = self._clock() + self.limits.stalled_s

    def answer(self, connection: Connection) -> None:
        """Mark the connection as being answered, so that it has no deadline."""
        self._awaited.pop(connection, None)

    def close_late(self) -> None:
        """Close the connections whose deadline has passed."""
        now = self._clock()
        for connection in [one for one, deadline in self._awaited.items() if deadline <= now]:
            self._close(connection)

    def _close(self, connection: Connection) -> None:
        self.remove(connection)
        connection.abort()


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
