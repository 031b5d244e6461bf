"""The service grpc.health.v1: clients check or watch the status of each service.

Every watcher receives the latest status. A watcher that does not read blocks neither the other watchers nor the daemon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from kvservice.tiers import TierStats
from kvservice.wire.status import HEALTH_NOTE, HEALTH_REASON

SERVICE_NAME = "grpc.health.v1.Health"
Status = health_pb2.HealthCheckResponse
_NOTES = {"opening": "is opening", "suspended": "is suspended", "failed": "has failed"}


def note_of(tiers: Sequence[TierStats], *others: str) -> str:
    """Return which tiers below the block store are not open, and the other notes, of what the daemon serves without; or
    an empty string."""
    notes = [f"the tier {tier.name} {_NOTES[tier.state]}" for tier in tiers if tier.state in _NOTES]
    return ", ".join(filter(None, (*notes, *others)))


class Health:
    """The status of each service, by name; "" is the whole daemon. Must be used on the event loop.

    `note` returns what a check says beside the status, or an empty string.
    """

    def __init__(self, note: Callable[[], str] = str) -> None:
        self._note = note
        self._statuses: dict[str, Any] = {}
        # The reasons why services do not serve. The protocol has no field for texts, so Check sends them as metadata.
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
        texts = ((HEALTH_REASON, self._reasons[request.service]), (HEALTH_NOTE, self._note()))
        if metadata := tuple((key, text) for key, text in texts if text):
            context.set_trailing_metadata(metadata)
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
