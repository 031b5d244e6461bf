"""The observer's HTTP API: metrics, the live page, and the data of the page. It is read-only."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvservice import plain_json
from kvservice.errors import InvalidArgumentError, NotFoundError
from kvservice.logs import LogBudget
from kvservice.observer.views import PoolMap, Views
from kvservice.telemetry.link import MAX_SEARCH_LENGTH

logger = logging.getLogger(__name__)

# ---- access. It is checked before any other handler runs
#
# request ─▶ GET? ─▶ /metrics: no token is set for them, or bearer ─────▶ app
#                 └▶ a token is set: bearer, cookie, or /?token= once ──▶ app
#                 └▶ none, on loopback: Host names this machine ────────▶ app
#                 └▶ none, off loopback ────────────────────────────────▶ 403
#
# The path is the scope's, by which the app routes, and never that of `request.url`: some versions of Starlette build
# the URL from the Host header, so that a client chooses what it says.

# DNS rebinding: a page of another site whose name resolves to 127.0.0.1 still sends that name as Host.
_THIS_MACHINE: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)
_METRICS_PATH: Final = "/metrics"
_COOKIE_AGE_S: Final = 30 * 86400
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True)
class HttpOptions:
    """Options of the HTTP server. `loopback` says that only this host reaches the port. Browsers must present `token`,
    and Prometheus `metrics_token`; an empty token is not required."""

    loopback: bool
    token: str = field(default="", repr=False)
    metrics_token: str = field(default="", repr=False)


class Refusals:
    """Counts of requests that were refused for a missing token or a wrong Host header, by target."""

    def __init__(self) -> None:
        self.counts = {"metrics": 0, "page": 0}
        self._log = LogBudget(logger)

    def add(self, request: HTTPConnection, status: int) -> None:
        target = "metrics" if request.scope["path"] == _METRICS_PATH else "page"
        self.counts[target] += 1
        peer = request.client.host if request.client else "a client"
        self._log.write(logging.WARNING, "HTTP: %s refused to %s with %d", target, peer, status)


class Guard:
    """Middleware that refuses requests without access, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, options: HttpOptions, refusals: Refusals) -> None:
        self._app = app
        self._refusals = refusals
        self._options = options
        # The cookie holds a hash, because the token may have characters that are not allowed in cookies.
        self._cookie = hashlib.sha256(b"kvservice page " + options.token.encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = HTTPConnection(scope)
        answer = self._answer(request, scope["method"])
        if answer is not None and answer.status_code in (401, 403):
            self._refusals.add(request, answer.status_code)
        await (answer or self._app)(scope, receive, send_with_headers)

    def _answer(self, request: HTTPConnection, method: str) -> Response | None:
        """Return the response that refuses or redirects a request, or None if the request has access."""
        if method != "GET":
            return refusal(405, "only GET is served", Allow="GET")
        if request.scope["path"] == _METRICS_PATH:
            if not self._options.metrics_token or _presents(request, self._options.metrics_token):
                return None
            return _unknown("send the header Authorization: Bearer TOKEN")
        if self._options.token:
            return self._token_answer(request)
        if not self._options.loopback:
            return refusal(403, "the page is served off the loopback interface only with a token: set http_token")
        if not _THIS_MACHINE.fullmatch(request.headers.get("host", "")):
            return refusal(403, "the Host header must be localhost, 127.0.0.1 or [::1]")
        return None

    def _token_answer(self, request: HTTPConnection) -> Response | None:
        name = _cookie_name(request)
        presented = request.query_params.get("token", "") if request.scope["path"] == "/" else ""
        if presented and _same(presented, self._options.token):
            answer = RedirectResponse("/", 303)
            encrypted = request.scope["scheme"] == "https"
            answer.set_cookie(
                name, self._cookie, max_age=_COOKIE_AGE_S, httponly=True, samesite="strict", secure=encrypted
            )
            return answer
        if _presents(request, self._options.token):
            return None
        if not presented and _same(request.cookies.get(name, ""), self._cookie):
            return None
        return _unknown("open /?token=TOKEN once, or send the header Authorization: Bearer TOKEN")


def refusal(status: int, error: str, **headers: str) -> JSONResponse:
    return JSONResponse({"error": error}, status, headers)


def _unknown(hint: str) -> JSONResponse:
    return refusal(401, f"a token is needed: {hint}", **{"WWW-Authenticate": "Bearer"})


def _presents(request: HTTPConnection, token: str) -> bool:
    scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and _same(credentials.strip(), token)


def _cookie_name(request: HTTPConnection) -> str:
    """Return the cookie's name, which includes the port. Browsers send a cookie to all ports of a host, and daemons on
    one host must not use each other's."""
    port = re.search(r":(\d{1,5})$", request.headers.get("host", ""))
    return f"kvservice_{port[1]}" if port else "kvservice"


def _same(presented: str, expected: str) -> bool:
    return hmac.compare_digest(presented.encode(), expected.encode())


# ---- server-sent events: one frame per second, computed once for all listeners, and only while there are any
#
# hello   {"info", "history"}            once
# map     {"group", "group_swap", "device", "swap"}   the cells in base64; first, and after each change
# frame   {"snapshot", "sample"}         each second; the sample is the latest of the history, or null


# How long a daemon may take to write current gauges before the last ones are shown. Prometheus waits 4 s for all, as
# deploy/prometheus configures it: it must learn of a daemon that is silent.
FRESH_S: Final = 2.0
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
