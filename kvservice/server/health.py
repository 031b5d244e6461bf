"""Health after grpc.health.v1: the status of each service, to be asked for or watched.

Every watcher sees the latest status, and one that does not read keeps nobody else waiting: neither the other watchers
nor the daemon, which sets the status when it drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from kvservice.wire.status import HEALTH_REASON

SERVICE_NAME = "grpc.health.v1.Health"
Status = health_pb2.HealthCheckResponse


class Health:
    """The statuses, by service name; "" is the daemon as a whole. Used on the event loop only."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        # Why services do not serve. The protocol has no field for it, so a check's metadata tells it.
        self._reasons: dict[str, str] = {}
        # Set, and replaced by another, at each change.
        self._changed = asyncio.Event()

    def set(self, name: str, *, reason: str = "") -> None:
        """The service serves, unless there is a reason why not."""
        self._statuses[name] = Status.NOT_SERVING if reason else Status.SERVING
        self._reasons[name] = reason
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Status:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        if reason := self._reasons[request.service]:
            context.set_trailing_metadata(((HEALTH_REASON, reason),))
        return Status(status=status)

    async def watch(self, request: health_pb2.HealthCheckRequest, write: Callable[[Status], Awaitable[object]]) -> None:
        """Write the status, and each that follows, until the caller is gone."""
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != sent:
                await write(Status(status=status))
                sent = status
            else:
                await changed.wait()
