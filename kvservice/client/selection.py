"""Selection of a session's transport: the fastest available one, or the requested one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from kvservice.client.context import Context
from kvservice.client.pools.mapped import MappedPool
from kvservice.client.requests import build
from kvservice.client.transports.base import Transport, TransportName
from kvservice.client.transports.inline import InlineTransport
from kvservice.client.transports.lane import LaneTransport
from kvservice.client.transports.mapped import MappedTransport
from kvservice.client.transports.region import RegionTransport
from kvservice.client.transports.transfer import TransferTransport
from kvservice.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    TransferFailedError,
    TransferOffError,
)
from kvservice.v1 import host_pb2

logger = logging.getLogger(__name__)

AUTO = "auto"


def check_transport(wanted: str) -> None:
    """Raise InvalidArgumentError for what is no transport."""
    if wanted != AUTO and wanted not in _OPEN:
        raise InvalidArgumentError(f"is not one of {AUTO}, {', '.join(_OPEN)}: {wanted!r}", field="transport")


async def open_transport(context: Context, wanted: TransportName | str, session_id: int) -> Transport:
    """Open the transport `wanted`. Raises its errors. "auto" falls back to slower transports and raises only connection
    errors."""
    if wanted != AUTO:
        return await _OPEN[wanted](context, session_id)
    if context.remote.allowed:
        return TransferTransport(context)  # its engine starts with the first large call
    return await _open_first(context, session_id, _allowed(context))


def inline_transport(context: Context) -> Transport:
    """Return the transport that shares no memory with the daemon, so that there is nothing to open."""
    return InlineTransport(context)


async def _open_first(context: Context, session_id: int, names: Iterable[str]) -> Transport:
    """Open the first transport that works, or inline if none does. Logs a warning with the reason for each failure."""
    reasons: list[str] = []
    opened: Transport | None = None
    for name in names:
        try:
            opened = await _OPEN[name](context, session_id)
            break
        except (RegionsNotAllowedError, ResourceExhaustedError, ConnectionLostError, FailedPreconditionError) as error:
            # All lanes are in use, the daemon passes no descriptors to this user, or CUDA is not available here.
            reasons.append(f"{name}: {error}")
            if name in _GIVE_UP:
                call, request = _GIVE_UP[name]
                connection = context.connection
                await connection.call(call, build(request, request_id=connection.next_request_id()))
    opened = opened or inline_transport(context)
    if reasons:
        logger.warning(
            "session %d uses the transport %s, slower than what the daemon offers (%s)",
            session_id,
            opened.name,
            "; ".join(reasons),
        )
    return opened


def _allowed(context: Context) -> Iterator[str]:
    """Yield the transports that the daemon allows, fastest first."""
    if context.fds.path is None:
        return
    info = context.info
    may_write, on_cpu = info.share_pool == "write", info.device == "cpu"
    # Two processes time-share a GPU, and the context switch takes longer than a small call, so the mapped pool is
    # faster than a lane there. A process that has not loaded torch has no GPU tensors.
    if may_write and not on_cpu and "torch" in sys.modules:
        yield "mapped"
    if info.allow_client_shm:
        yield "lane"
    if may_write and on_cpu:
        yield "mapped"
    if info.allow_client_shm:
        yield "region"


async def _open_lane(context: Context, _: int) -> Transport:
    return await LaneTransport.open(context)


async def _open_mapped(context: Context, session_id: int) -> Transport:
    info = context.info
    pool = await MappedPool.open(context, info.share_pool == "write")
    # The transport for calls that this process does not execute; with a pool on a GPU, those with host tensors.
    others = ("region",) if info.device == "cpu" else ("lane", "region")
    rest = await _open_first(context, session_id, others if info.allow_client_shm else ())
    return MappedTransport(context, pool, rest)


async def _open_region(context: Context, _: int) -> Transport:
    if context.fds.path is None or not context.info.allow_client_shm:
        raise RegionsNotAllowedError("regions are for clients on the unix socket, with --allow-client-shm")
    # Creating a region here reports missing permissions now, and not in the middle of a step.
    await context.regions.unregister(await context.regions.create(1))
    return RegionTransport(context)


async def _open_transfer(context: Context, _: int) -> Transport:
    if not context.info.transfer_protocol:
        raise TransferOffError("the daemon has no Transfer Engine")
    if context.fds.path is not None:
        raise FailedPreconditionError("a Transfer Engine is for clients over TCP", field="transport")
    if not context.remote.allowed:
        raise TransferFailedError("there is no Transfer Engine here: install kvservice[mooncake]")
    await context.remote.open()
    return TransferTransport(context)


async def _open_inline(context: Context, _: int) -> Transport:
    return inline_transport(context)


_OPEN: dict[str, Callable[[Context, int], Awaitable[Transport]]] = {
    "lane": _open_lane,
    "mapped": _open_mapped,
    "region": _open_region,
    "transfer": _open_transfer,
    "inline": _open_inline,
}
# The calls that close a transport on the daemon if the client could not open its side.
_GIVE_UP: dict[str, tuple[str, Any]] = {
    "lane": ("close_lane", host_pb2.CloseLaneRequest),
    "mapped": ("unmap_pool", host_pb2.UnmapPoolRequest),
}
