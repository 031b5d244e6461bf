"""Selection of a session's transport: the fastest available one, or the requested one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kvservice.client.lane import LaneTransport
from kvservice.client.mapped import MappedPool, MappedTransport
from kvservice.client.requests import build
from kvservice.client.transports import RegionTransport, StreamTransport, Transport, TransportName
from kvservice.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InvalidArgumentError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
)
from kvservice.v1 import host_pb2

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore

    Session = SessionCore[Any]

logger = logging.getLogger(__name__)

AUTO = "auto"


async def open_transport(session: Session, wanted: TransportName | str) -> Transport:
    """Open the transport `wanted`. Raises its errors. "auto" falls back to slower transports and raises only connection
    errors."""
    if wanted != AUTO:
        if wanted not in _OPEN:
            raise InvalidArgumentError(f"is none of {AUTO}, {', '.join(_OPEN)}: {wanted!r}", field="transport")
        return await _OPEN[wanted](session)
    return await _open_first(session, _allowed(session))


async def close_transport(session: Session) -> None:
    """Release the memory that the session shares with the daemon, so that the system can reclaim it when the session
    ends."""
    await session.attending.close()
    session.attending = StreamTransport(session)
    session.forget_regions()


async def _open_first(session: Session, names: Iterable[str]) -> Transport:
    """Open the first transport that works, or inline if none does. Logs a warning with the reason for each failure."""
    reasons: list[str] = []
    opened: Transport | None = None
    for name in names:
        try:
            opened = await _OPEN[name](session)
            break
        except (RegionsNotAllowedError, ResourceExhaustedError, ConnectionLostError, FailedPreconditionError) as error:
            # All lanes are in use, the daemon passes no descriptors to this user, or CUDA is not available here.
            reasons.append(f"{name}: {error}")
            if name in _GIVE_UP:
                call, request = _GIVE_UP[name]
                await session.call(call, build(request, request_id=session.next_request_id()))
    opened = opened or StreamTransport(session)
    if reasons:
        logger.warning(
            "session %d uses the transport %s, slower than what the daemon offers (%s)",
            session.session_id,
            opened.name,
            "; ".join(reasons),
        )
    return opened


def _allowed(session: Session) -> Iterator[str]:
    """Yield the transports that the daemon allows, fastest first."""
    if not session.can_share:
        return
    may_write, on_cpu = session.info.share_pool == "write", session.info.device == "cpu"
    # Two processes time-share a GPU, and the context switch takes longer than a small call, so the mapped pool is
    # faster than a lane there. A process that has not loaded torch has no GPU tensors.
    if may_write and not on_cpu and "torch" in sys.modules:
        yield "mapped"
    if session.info.allow_client_shm:
        yield "lane"
    if may_write and on_cpu:
        yield "mapped"
    if session.info.allow_client_shm:
        yield "region"


async def _open_mapped(session: Session) -> Transport:
    info = session.info
    pool = await MappedPool.open(session, info.share_pool == "write")
    # The transport for calls that this process does not execute; with a pool on a GPU, those with host tensors.
    others = ("region",) if info.device == "cpu" else ("lane", "region")
    return MappedTransport(session, pool, await _open_first(session, others if info.allow_client_shm else ()))


async def _open_region(session: Session) -> Transport:
    session.check_regions_allowed()
    # Creating a region here reports missing permissions now, and not in the middle of a step.
    await session.unregister_region(await session.create_region(1))
    return RegionTransport(session)


async def _open_inline(session: Session) -> Transport:
    return StreamTransport(session)


_OPEN: dict[str, Callable[[Session], Awaitable[Transport]]] = {
    "lane": LaneTransport.open,
    "mapped": _open_mapped,
    "region": _open_region,
    "inline": _open_inline,
}
# The calls that close a transport on the daemon if the client could not open its side.
_GIVE_UP: dict[str, tuple[str, Any]] = {
    "lane": ("close_lane", host_pb2.CloseLaneRequest),
    "mapped": ("unmap_pool", host_pb2.UnmapPoolRequest),
}
