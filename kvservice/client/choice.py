"""Which transport a session uses: the best that it may, or the one that it was told."""

from __future__ import annotations

import mmap
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from kvservice.client.lane import LaneTransport
from kvservice.client.mapped import MappedPool, MappedTransport
from kvservice.client.requests import build
from kvservice.client.transports import RegionTransport, StreamTransport, Transport, TransportName
from kvservice.errors import (
    ConnectionLostError,
    InvalidArgumentError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
)
from kvservice.v1 import host_pb2

if TYPE_CHECKING:
    from kvservice.client.core import SessionCore

    Session = SessionCore[Any]

AUTO = "auto"


async def open_transport(session: Session, wanted: TransportName | str, completion: str) -> Transport:
    """Raises the errors of the one that is wanted; of "auto" none but those of the connection."""
    if completion not in ("host", "event"):
        raise InvalidArgumentError(f"is neither host nor event: {completion!r}", field="completion")
    session.completion = completion
    if wanted != AUTO:
        if wanted not in _OPEN:
            raise InvalidArgumentError(f"is none of {AUTO}, {', '.join(_OPEN)}: {wanted!r}", field="transport")
        return await _OPEN[wanted](session)
    for name in _allowed(session):
        try:
            return await _OPEN[name](session)
        except (RegionsNotAllowedError, ResourceExhaustedError, ConnectionLostError):
            # All lanes are taken, or nothing is handed over to this user.
            if name in _GIVE_UP:
                call, request = _GIVE_UP[name]
                await session.call(call, build(request, request_id=session.next_request_id()))
    return StreamTransport(session)


def _allowed(session: Session) -> Iterator[str]:
    """The fastest first."""
    info = session.info
    if session.on_unix_socket and info.allow_client_shm:
        yield "lane"
    if session.on_unix_socket and info.share_pool == "write" and info.device == "cpu":
        yield "mapped"
    if session.on_unix_socket and info.allow_client_shm:
        yield "region"


async def _open_mapped(session: Session) -> Transport:
    return MappedTransport(session, await MappedPool.open(session, session.info.share_pool == "write"))


async def _open_region(session: Session) -> Transport:
    session.check_regions_allowed()
    # Whoever is handed nothing would learn it in the middle of a step.
    await session.unregister_region(await session.create_region(mmap.PAGESIZE))
    return RegionTransport(session)


async def _open_inline(session: Session) -> Transport:
    return StreamTransport(session)


_OPEN: dict[str, Callable[[Session], Awaitable[Transport]]] = {
    "lane": LaneTransport.open,
    "mapped": _open_mapped,
    "region": _open_region,
    "inline": _open_inline,
}
# Ends what was opened and could not be used.
_GIVE_UP: dict[str, tuple[str, Any]] = {
    "lane": ("close_lane", host_pb2.CloseLaneRequest),
    "mapped": ("unmap_pool", host_pb2.UnmapPoolRequest),
}
