"""gRPC's standard services: health and reflection. Their requests are scanned before parsing, like all requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvservice.config import RequestLimits
from kvservice.server.rpc.callers import Callers
from kvservice.server.rpc.contract import HEALTH_SERVICE, SERVICES
from kvservice.server.rpc.requests import check_accepted, parser
from kvservice.server.rpc.slots import Handler, Rpc, Slots, answering
from kvservice.tiers import TierStats
from kvservice.wire.status import HEALTH_NOTE, HEALTH_REASON


def health_handlers(statuses: Health, limits: RequestLimits, slots: Slots, callers: Callers) -> dict[str, Handler]:
    """Return the handlers of Check and Watch by method path."""

    async def check(request: Any, context: Any) -> Any:
        async with answering(context):
            callers.admit(context, is_check=True)
            check_accepted(request)
            return await statuses.check(request, context)

    async def watch(request: Any, context: Any) -> None:
        async with answering(context) as rpc:

            async def write(status: Any) -> None:
                with rpc.waiting():
                    await context.write(status)

            callers.admit(context, is_check=True)
            check_accepted(request)
            with slots.of_peer("health watch", context.peer()):
                await statuses.watch(request, write)

    parse = parser(health_pb2.HealthCheckRequest, limits)
    serialize = health_pb2.HealthCheckResponse.SerializeToString
    return {
        f"/{HEALTH_SERVICE}/Check": grpc.unary_unary_rpc_method_handler(check, parse, serialize),
        f"/{HEALTH_SERVICE}/Watch": grpc.unary_stream_rpc_method_handler(watch, parse, serialize),
    }


def reflection_handlers(limits: RequestLimits, slots: Slots, callers: Callers) -> dict[str, Handler]:
    """Return the handler of server reflection. It describes the services of the contract and the standard services."""
    names = [*(service.full_name for service in SERVICES), HEALTH_SERVICE, reflection.SERVICE_NAME]
    servicer: Any = reflection.aio.ReflectionServicer(names)  # the published type annotations are wrong

    async def info(requests: AsyncIterator[Any], context: Any) -> None:
        async with answering(context) as rpc:
            callers.admit(context, is_check=True)
            with slots.of_peer("reflection", context.peer()):
                async for response in servicer.ServerReflectionInfo(_accepted(requests, rpc), context):
                    with rpc.waiting():
                        await context.write(response)

    parse = parser(reflection_pb2.ServerReflectionRequest, limits)
    serialize = reflection_pb2.ServerReflectionResponse.SerializeToString
    path = f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"
    return {path: grpc.stream_stream_rpc_method_handler(info, parse, serialize)}


async def _accepted(requests: AsyncIterator[Any], rpc: Rpc) -> AsyncIterator[Any]:
    """Yield checked requests. The RPC counts as stalled while it waits for the client's next request."""
    while True:
        with rpc.waiting():
            request = await anext(requests, None)
        if request is None:
            return
        check_accepted(request)
        yield request


# ---- health

Status = health_pb2.HealthCheckResponse
_NOTES = {"opening": "is opening", "suspended": "is suspended", "failed": "has failed"}


def note_of(tiers: Sequence[TierStats], *others: str, disk: str = "", faults: Mapping[str, str] | None = None) -> str:
    """Return which tiers below the block store are not open, and the other notes, of what the daemon serves without; or
    an empty string. `disk` is the directory of the disk tier, `faults` says by name why a tier is not open."""
    notes = [
        f"the tier {tier.name}{f' in {disk}' if disk and tier.name == 'disk' else ''} {_NOTES[tier.state]}"
        f"{f': {faults[tier.name]}' if faults and tier.name in faults else ''}"
        for tier in tiers
        if tier.state in _NOTES
    ]
    return ", ".join(filter(None, (*notes, *others)))


class Health:
    """The status of each service, by name; "" is the whole daemon. Must be used on the event loop.

    Every watcher receives the latest status. One that does not read blocks neither the others nor the daemon.

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
