"""gRPC's standard services, health and reflection. Their requests are counted before they are parsed, as all are."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_status import rpc_status

from kvservice.config import RequestLimits
from kvservice.errors import KVServiceError
from kvservice.server import health
from kvservice.server.contract import SERVICES
from kvservice.server.parsing import check_accepted, parser
from kvservice.wire.status import to_status


def health_handler(statuses: health.Health, limits: RequestLimits) -> grpc.GenericRpcHandler:
    """Check and Watch."""

    async def check(request: Any, context: Any) -> Any:
        return await _answered(statuses.check, request, context)

    async def watch(request: Any, context: Any) -> None:
        await _answered(statuses.watch, request, context)

    parse = parser(health_pb2.HealthCheckRequest, limits)
    serialize = health_pb2.HealthCheckResponse.SerializeToString
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(check, parse, serialize),
        "Watch": grpc.unary_stream_rpc_method_handler(watch, parse, serialize),
    }
    return grpc.method_handlers_generic_handler(health.SERVICE_NAME, methods)


async def _answered(answer: Any, request: Any, context: Any) -> Any:
    try:
        check_accepted(request)
        return await answer(request, context)
    except KVServiceError as error:
        return await context.abort_with_status(rpc_status.to_status(to_status(error)))


def reflection_handler(limits: RequestLimits) -> grpc.GenericRpcHandler:
    """What the contract's services, and the standard ones, look like."""
    names = [*(service.full_name for service in SERVICES), health.SERVICE_NAME, reflection.SERVICE_NAME]
    servicer: Any = reflection.aio.ReflectionServicer(names)  # its published types are wrong

    async def info(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for response in servicer.ServerReflectionInfo(_accepted(requests), context):
                yield response
        except KVServiceError as error:
            await context.abort_with_status(rpc_status.to_status(to_status(error)))

    parse = parser(reflection_pb2.ServerReflectionRequest, limits)
    serialize = reflection_pb2.ServerReflectionResponse.SerializeToString
    methods = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(info, parse, serialize)}
    return grpc.method_handlers_generic_handler(reflection.SERVICE_NAME, methods)


async def _accepted(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        check_accepted(request)
        yield request
