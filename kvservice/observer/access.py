"""Access control for the page and the metrics. It runs before any other handler.

request ─▶ GET? ─▶ /metrics: no token is set for them, or bearer ─────▶ app
                └▶ a token is set: bearer, cookie, or /?token= once ──▶ app
                └▶ none, on loopback: Host names this machine ────────▶ app
                └▶ none, off loopback ────────────────────────────────▶ 403
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvservice.logs import LogBudget

logger = logging.getLogger(__name__)

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
    token: str = ""
    metrics_token: str = ""


class Refusals:
    """Counts of requests that were refused for a missing token or a wrong Host header, by target."""

    def __init__(self) -> None:
        self.counts = {"metrics": 0, "page": 0}
        self._log = LogBudget(logger)

    def add(self, request: HTTPConnection, status: int) -> None:
        target = "metrics" if request.url.path == _METRICS_PATH else "page"
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
        if request.url.path == _METRICS_PATH:
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
        presented = request.query_params.get("token", "") if request.url.path == "/" else ""
        if presented and _same(presented, self._options.token):
            answer = RedirectResponse("/", 303)
            encrypted = request.url.scheme == "https"
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
