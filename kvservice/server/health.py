"""The service grpc.health.v1: clients check or watch the status of each service.

Every watcher receives the latest status. A watcher that does not read blocks neither the other watchers nor the daemon.
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
    """The status of each service, by name; "" is the whole daemon. Must be used on the event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, Any] = {}
        # The reasons why services do not serve. The protocol has no field for them, so Check sends them as metadata.
        self._reasons: dict[str, str] = {}
        # Each change sets this event and replaces it with a new one.
        self._changed = asyncio.Event()

    def set(self, name: str, *, reason: str = "") -> None:
        """Set the status of a service: serving without a `reason`, else not serving."""
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
        """Write the status and each change of it until cancelled."""
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != sent:
                await write(Status(status=status))
                sent = status
            else:
                await changed.wait()
