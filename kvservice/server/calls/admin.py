"""The handlers of SessionService, PoolService and InspectService, and their codec."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from kvservice import __version__
from kvservice.blocks import BlocksStats, Slices
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.engine import CacheEngine
from kvservice.errors import InvalidArgumentError
from kvservice.server.calls.handlers import AnyHandler, WhileDraining, in_session, without_session
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.server.sessions.saved import SavedSessions, SavedSize
from kvservice.server.sessions.session import ServerSession
from kvservice.server.tenants import EVERYONE, OBSERVERS
from kvservice.telemetry.link import MAX_SEARCH_LENGTH, ShownPart
from kvservice.transfer import is_installed
from kvservice.v1 import (
    inspect_pb2,
    pool_pb2,
    session_pb2,
)

MAX_SNAPSHOT_ROWS = 1000


class AdminCalls:
    def __init__(
        self,
        config: ServeConfig,
        engine: CacheEngine,
        sessions: SessionRegistry,
        saved: SavedSessions,
        store_bytes: int,
        snapshot: Callable[[bytes, ShownPart | None], Awaitable[bytes]],
    ) -> None:
        """`store_bytes` is the size of the block store, 0 if there is none. `snapshot` maps a serialized
        GetSnapshotRequest, and the part that it may tell of, to a serialized Snapshot."""
        self._snapshot = snapshot
        self._info = info_response(config, engine.device, store_bytes, __version__)
        self._engine = engine
        self._sessions, self._saved = sessions, saved
        self._max_detach_ttl_s = config.max_detach_ttl_s

    def handlers(self) -> tuple[AnyHandler, ...]:
        return (
            without_session("get_info", pool_pb2.GetInfoRequest, self.get_info, roles=EVERYONE),
            without_session("get_stats", pool_pb2.GetStatsRequest, self.get_stats, roles=EVERYONE),
            without_session("get_snapshot", inspect_pb2.GetSnapshotRequest, self.get_snapshot, roles=OBSERVERS),
            without_session("ping", pool_pb2.PingRequest, self.ping, roles=EVERYONE),
            without_session("open", session_pb2.OpenRequest, self.open, WhileDraining.REFUSED),
            without_session("close", session_pb2.CloseRequest, self.close),
            in_session("detach", session_pb2.DetachRequest, self.detach),
        )

    def get_info(self, _: pool_pb2.GetInfoRequest) -> pool_pb2.GetInfoResponse:
        return self._info

    def get_stats(self, _: pool_pb2.GetStatsRequest) -> pool_pb2.GetStatsResponse:
        return stats_response(self._engine.manager.stats(), len(self._sessions))

    async def get_snapshot(self, request: inspect_pb2.GetSnapshotRequest) -> bytes:
        """Return a serialized Snapshot."""
        check_snapshot_request(request)
        return await self._snapshot(request.SerializeToString(), self._sessions.shown_to_caller())

    def ping(self, request: pool_pb2.PingRequest) -> pool_pb2.PingResponse:
        return pool_pb2.PingResponse(payload=request.payload)

    def open(self, request: session_pb2.OpenRequest) -> session_pb2.OpenResponse:
        token = request.session_token
        if token and self._sessions.find(token) is None and self._saved.has(token):
            raise InvalidArgumentError("is that of a saved session", field="session_token")
        session = self._sessions.open(request.name, request.tenant, request.detachable, request.detach_ttl_s, token)
        return session_pb2.OpenResponse(session_token=session.token, session_id=session.session_id)

    def close(self, request: session_pb2.CloseRequest) -> Slices[session_pb2.CloseResponse]:
        yield from self._sessions.close_for_in_slices(request.session_token, request.holder)
        return session_pb2.CloseResponse()

    async def detach(self, session: ServerSession, request: session_pb2.DetachRequest) -> session_pb2.DetachResponse:
        limit = self._max_detach_ttl_s
        if not (math.isfinite(request.ttl_s) and 0 <= request.ttl_s <= limit):
            raise InvalidArgumentError(
                f"{request.ttl_s} is not between 0 and {limit}: see max_detach_ttl_s", field="ttl_s"
            )
        ttl_s = request.ttl_s or limit
        self._sessions.check_detach(session, ttl_s)
        size = await self._saved.save(session, ttl_s) if request.durable else SavedSize(0, 0)
        session.shared.unmap_pool()
        self._sessions.keep_for(session, ttl_s)
        return session_pb2.DetachResponse(num_sequences=size.num_sequences, num_bytes=size.num_bytes)


# ---- codec


def info_response(config: ServeConfig, device: Device, store_bytes: int, version: str) -> pool_pb2.GetInfoResponse:
    limits = config.request_limits
    return pool_pb2.GetInfoResponse(
        version=version,
        device=config.device,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=device.num_blocks,
        num_swap_blocks=device.num_swap_blocks,
        block_bytes=config.layout.block_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
        max_sequences=config.max_sequences,
        max_sequence_tokens=config.max_sequence_tokens,
        max_message_bytes=config.max_message_bytes,
        max_request_sequences=limits.max_request_sequences,
        max_request_tokens=limits.max_request_tokens,
        max_request_blocks=limits.max_request_blocks,
        session_grace_s=config.session_grace_s,
        kv_cache_dtype=config.layout.dtype,
        batch_invariant=config.batch_invariant,
        allow_client_shm=config.shares_memory,
        share_pool=config.share_pool,
        store_bytes=store_bytes,
        share_store=config.shares_store,
        transfer_protocol=config.transfer_protocol if config.transfer_address and is_installed() else "",
        transfer_address=config.transfer_address,
    )


def stats_response(stats: BlocksStats, num_sessions: int) -> pool_pb2.GetStatsResponse:
    """The fields of the response, except the sessions, have the names of `BlocksStats`."""
    published = pool_pb2.GetStatsResponse.DESCRIPTOR.fields_by_name
    figures = {name: value for name, value in asdict(stats).items() if name in published}
    return pool_pb2.GetStatsResponse(**figures, sessions=num_sessions)


def check_snapshot_request(request: inspect_pb2.GetSnapshotRequest) -> None:
    for field in ("max_sessions", "max_sequences"):
        if not 0 <= getattr(request, field) <= MAX_SNAPSHOT_ROWS:
            raise InvalidArgumentError(f"is not from 0 to {MAX_SNAPSHOT_ROWS}", field=field)
    if len(request.search) > MAX_SEARCH_LENGTH:
        raise InvalidArgumentError(f"has more than {MAX_SEARCH_LENGTH} characters", field="search")
