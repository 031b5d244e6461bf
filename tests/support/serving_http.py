"""An HTTP server in a test's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

from waiting import PATIENCE_S

from kvservice.auth import Certificates, Reloading
from kvservice.observer.http_server import Connections, serve_http


@contextlib.asynccontextmanager
async def serving_http(
    app: Any,
    connections: Connections,
    certificates: Reloading[Certificates] | None = None,
    sweep_every_s: float = 0.01,
) -> AsyncIterator[int]:
    """Serve an ASGI app and yield the port. At the end the server stops after the requests in progress, because a
    cancelled request logs an error and leaves a file open."""
    in_progress = 0

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        nonlocal in_progress
        is_request = scope["type"] == "http"
        in_progress += is_request
        try:
            await app(scope, receive, send)
        finally:
            in_progress -= is_request

    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        serving = asyncio.create_task(serve_http(counted, listening, connections, certificates, sweep_every_s))
        try:
            async with asyncio.timeout(PATIENCE_S):
                yield listening.getsockname()[1]
                while in_progress:
                    await asyncio.sleep(0.01)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
