"""The handlers of calls that need no session: SessionService, PoolService and InspectService."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvservice import __version__
from kvservice.blocks import Slices
from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.server import codec
from kvservice.server.handlers import Handler, OpenHandler, WhileDraining
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.v1 import inspect_pb2, pool_pb2, session_pb2


class OpenCalls:
    def __init__(
        self,
        config: ServeConfig,
        engine: CacheEngine,
        sessions: SessionRegistry,
        store_bytes: int,
        snapshot: Callable[[bytes], Awaitable[bytes]],
    ) -> None:
        """`store_bytes` is the size of the block store, 0 if there is none. `snapshot` maps a serialized
        GetSnapshotRequest to a serialized Snapshot."""
        self._snapshot = snapshot
        self._info = codec.info_response(config, engine.device, store_bytes, __version__)
        self._engine = engine
        self._sessions = sessions

    def handlers(self) -> tuple[Handler, ...]:
        return (
            OpenHandler("get_info", pool_pb2.GetInfoRequest, self.get_info),
            OpenHandler("get_stats", pool_pb2.GetStatsRequest, self.get_stats),
            OpenHandler("get_snapshot", inspect_pb2.GetSnapshotRequest, self.get_snapshot),
            OpenHandler("ping", pool_pb2.PingRequest, self.ping),
            OpenHandler("open", session_pb2.OpenRequest, self.open, WhileDraining.REFUSED),
            OpenHandler("close", session_pb2.CloseRequest, self.close),
        )

    def get_info(self, _: pool_pb2.GetInfoRequest) -> pool_pb2.GetInfoResponse:
        return self._info

    def get_stats(self, _: pool_pb2.GetStatsRequest) -> pool_pb2.GetStatsResponse:
        return codec.stats_response(self._engine.manager.stats(), len(self._sessions))

    async def get_snapshot(self, request: inspect_pb2.GetSnapshotRequest) -> bytes:
        """Return a serialized Snapshot."""
        codec.check_snapshot_request(request)
        return await self._snapshot(request.SerializeToString())

    def ping(self, request: pool_pb2.PingRequest) -> pool_pb2.PingResponse:
        return pool_pb2.PingResponse(payload=request.payload)

    def open(self, request: session_pb2.OpenRequest) -> session_pb2.OpenResponse:
        session = self._sessions.open(request.name, request.tenant, request.detachable, request.detach_ttl_s)
        return session_pb2.OpenResponse(session_token=session.token, session_id=session.session_id)

    def close(self, request: session_pb2.CloseRequest) -> Slices[session_pb2.CloseResponse]:
        yield from self._sessions.close_for_in_slices(request.session_token, request.holder)
        return session_pb2.CloseResponse()
