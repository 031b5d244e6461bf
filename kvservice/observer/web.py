"""The observer's HTTP API: metrics, the live page, and the data of the page. It is read-only."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from kvservice.errors import InvalidArgumentError, NotFoundError
from kvservice.observer.access import Guard, HttpOptions, Refusals, refusal
from kvservice.observer.stream import FRAME_INTERVAL_S, EventStream, encode
from kvservice.observer.views import Views
from kvservice.telemetry.link import MAX_SEARCH_LENGTH

__all__ = ["HttpOptions", "Refusals", "make_app"]

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
