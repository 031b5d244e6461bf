"""The observer's HTTP server: uvicorn with limits on connections."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvservice import plain_json
from kvservice.auth import Certificates, Reloading
from kvservice.errors import InvalidArgumentError, NotFoundError
from kvservice.observer.access import Guard, HttpOptions, Refusals, refusal
from kvservice.observer.blocks import PoolMap
from kvservice.observer.connections import Connections
from kvservice.observer.views import Views
from kvservice.telemetry.link import MAX_SEARCH_LENGTH

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


# ---- the observer's HTTP API: metrics, the live page, and the data of the page. It is read-only


__all__ = ["HttpOptions", "Refusals", "make_app"]


# ---- server-sent events: one frame per second, computed once for all listeners, and only while there are any
#
# hello   {"info", "history"}            once
# map     {"group", "group_swap", "device", "swap"}   the cells in base64; first, and after each change
# frame   {"snapshot", "sample"}         each second; the sample is the latest of the history, or null


MAX_STREAMS: Final = 64
FRAME_INTERVAL_S: Final = 1.0
# Proxies close idle connections.
KEEP_ALIVE_S: Final = 15.0
# A listener that reads nothing for this long is considered gone.
STALLED_S: Final = 60.0
_RETRY: Final = b"retry: 2000\n\n"
_KEEP_ALIVE: Final = b": still here\n\n"
# Ids have 64 bits, but JavaScript's numbers are exact only up to 53 bits.
_IDS: Final = frozenset({"session_id", "sequence_id"})


@dataclass(frozen=True)
class Tick:
    """The encoded events of one second."""

    number: int
    frame: bytes
    map: bytes


class Ticker:
    """Computes the latest tick. One of the waiting listeners computes it for all."""

    def __init__(self, views: Views, interval_s: float) -> None:
        self._views = views
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._due = 0.0
        self._latest = Tick(0, b"", b"")
        self._map: PoolMap | None = None

    async def newer_than(self, number: int) -> Tick:
        """Return the latest tick, and wait until its number is above `number`. A slow listener skips ticks."""
        if not self._has_newer_than(number):
            async with self._lock:
                if not self._has_newer_than(number):
                    await self._compute_when_due()
        return self._latest

    def _has_newer_than(self, number: int) -> bool:
        return self._latest.number > number and asyncio.get_running_loop().time() < self._due

    async def _compute_when_due(self) -> None:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(self._due - now)
        self._due = max(now, self._due) + self._interval_s
        snapshot = await self._views.snapshot()
        frame = event("frame", {"snapshot": snapshot, "sample": self._views.sample()})
        self._latest = Tick(self._latest.number + 1, frame, self._map_event())

    def hello(self) -> bytes:
        return event("hello", {"info": self._views.info, "history": self._views.history()})

    def _map_event(self) -> bytes:
        """Return the map event, as the identical bytes object if nothing changed, so that it is not sent again."""
        seen = self._views.map()
        if seen == self._map:
            return self._latest.map
        self._map = seen
        cells = {"device": base64.b64encode(seen.device).decode(), "swap": base64.b64encode(seen.swap).decode()}
        return event("map", {"group": seen.group, "group_swap": seen.group_swap, **cells})


class EventStream:
    """The ASGI app of /api/stream."""

    def __init__(
        self,
        views: Views,
        interval_s: float = FRAME_INTERVAL_S,
        keep_alive_s: float = KEEP_ALIVE_S,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._ticker = Ticker(views, interval_s)
        self._keep_alive_s, self._stalled_s = keep_alive_s, stalled_s
        self._num_streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_streams >= MAX_STREAMS:
            await refusal(503, f"{MAX_STREAMS} pages are open, which is the limit")(scope, receive, send)
            return

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._stalled_s):
                await send(message)

        self._num_streams += 1
        try:
            await StreamingResponse(self._events(), media_type="text/event-stream")(scope, receive, send_in_time)
        except TimeoutError:
            pass  # the server closes the connection of an incomplete response
        finally:
            self._num_streams -= 1

    async def _events(self) -> AsyncIterator[bytes]:
        yield _RETRY + self._ticker.hello()
        number, sent_map = 0, b""
        while True:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    tick = await self._ticker.newer_than(number)
            except TimeoutError:
                yield _KEEP_ALIVE
                continue
            yield tick.frame if tick.map is sent_map else tick.map + tick.frame
            number, sent_map = tick.number, tick.map


def event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encode(data))


def encode(data: Any) -> bytes:
    """Return compact JSON in which ids are strings, and numbers that are not finite are null."""
    return plain_json.dumps(_with_text_ids(data), separators=(",", ":")).encode()


def _with_text_ids(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: str(value) if key in _IDS else _with_text_ids(value) for key, value in data.items()}
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return [_with_text_ids(row) for row in data]
    return data


# ---- the API


STATIC: Final = Path(__file__).parent / "static"
MAX_BLOCKS: Final = 4096
_MAX_INT: Final = (1 << 63) - 1


def make_app(
    views: Views,
    http: HttpOptions,
    metrics: Callable[[], Awaitable[tuple[bytes, str]]],
    refusals: Refusals,
    frame_interval_s: float = FRAME_INTERVAL_S,
) -> Starlette:
    """Build the app. `metrics` returns the exposition and its content type. The app counts refused requests in
    `refusals`."""

    async def exposition(_request: Request) -> Response:
        body, content_type = await metrics()
        return Response(body, headers={"Content-Type": content_type})

    api = PageApi(views)
    routes = [
        Route("/", page),
        Route("/metrics", exposition),
        Route("/api/blocks", api.blocks),
        Route("/api/block", api.block),
        Route("/api/sequence", api.sequence),
        Route("/api/search", api.search),
        # Starlette treats an instance of a class as an ASGI app.
        Route("/api/stream", EventStream(views, frame_interval_s)),
        Mount("/static", RevalidatedFiles(directory=STATIC)),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, options=http, refusals=refusals)],
        exception_handlers={InvalidArgumentError: _failure, NotFoundError: _failure, HTTPException: _http_failure},
    )


async def page(_request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


class RevalidatedFiles(StaticFiles):
    """Static files that browsers revalidate on every load, so that modules of two versions never mix."""

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        answer = super().file_response(full_path, stat_result, scope, status_code)
        answer.headers["Cache-Control"] = "no-cache"
        return answer


class PageApi:
    """Handlers of the page's requests. Each validates its parameters, makes one call, and encodes the result."""

    def __init__(self, views: Views) -> None:
        self._views = views

    async def blocks(self, request: Request) -> Response:
        start = _integer(request, "start", default=0)
        count = _integer(request, "count", default=MAX_BLOCKS, least=1, most=MAX_BLOCKS)
        return _json(self._views.blocks(_tier(request), start, count))

    async def block(self, request: Request) -> Response:
        return _json(await self._views.block(_tier(request), _integer(request, "id")))

    async def sequence(self, request: Request) -> Response:
        return _json(self._views.sequence(_integer(request, "session_id"), _integer(request, "sequence_id")))

    async def search(self, request: Request) -> Response:
        text = request.query_params.get("q", "")
        if len(text) > MAX_SEARCH_LENGTH:
            raise InvalidArgumentError(f"longer than {MAX_SEARCH_LENGTH} characters", field="q")
        return _json({"snapshot": await self._views.snapshot(search=text)})


def _tier(request: Request) -> str:
    tier = request.query_params.get("tier", "device")
    if tier not in ("device", "swap"):
        raise InvalidArgumentError("must be device or swap", field="tier")
    return tier


def _integer(request: Request, name: str, default: int | None = None, least: int = 0, most: int = _MAX_INT) -> int:
    text = request.query_params.get(name)
    if text is None and default is not None:
        return default
    # int() would also accept signs, spaces, underscores and any number of digits.
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise InvalidArgumentError(f"must be a whole number from {least} to {most}", field=name)
    return int(text)


def _json(data: object) -> Response:
    return Response(encode(data), media_type="application/json")


async def _failure(_request: Request, error: Exception) -> Response:
    return refusal(404 if isinstance(error, NotFoundError) else 400, str(error))


async def _http_failure(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, error.detail)
