"""gRPC's standard services: health and reflection. Their requests are scanned before parsing, like all requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvservice.config import RequestLimits
from kvservice.server.callers import Callers
from kvservice.server.contract import SERVICES
from kvservice.server.health import SERVICE_NAME, Health
from kvservice.server.parsing import check_accepted, parser
from kvservice.server.slots import Handler, Rpc, Slots, answering


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
        f"/{SERVICE_NAME}/Check": grpc.unary_unary_rpc_method_handler(check, parse, serialize),
        f"/{SERVICE_NAME}/Watch": grpc.unary_stream_rpc_method_handler(watch, parse, serialize),
    }


def reflection_handlers(limits: RequestLimits, slots: Slots, callers: Callers) -> dict[str, Handler]:
    """Return the handler of server reflection. It describes the services of the contract and the standard services."""
    names = [*(service.full_name for service in SERVICES), SERVICE_NAME, reflection.SERVICE_NAME]
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
