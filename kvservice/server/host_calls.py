"""The handlers of HostService: the lane and the mapped pool of a client on the daemon's host."""

from __future__ import annotations

from kvservice.blocks import BlockManager
from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.sessions.session import ServerSession
from kvservice.v1 import host_pb2


class HostCalls:
    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def handlers(self) -> tuple[Handler, ...]:
        return (
            SessionHandler("open_lane", host_pb2.OpenLaneRequest, self.open_lane, WhileDraining.REFUSED),
            SessionHandler("close_lane", host_pb2.CloseLaneRequest, self.close_lane),
            SessionHandler("map_pool", host_pb2.MapPoolRequest, self.map_pool, WhileDraining.REFUSED),
            SessionHandler("unmap_pool", host_pb2.UnmapPoolRequest, self.unmap_pool),
            SessionHandler("commit", host_pb2.CommitRequest, self.commit),
        )

    def open_lane(self, session: ServerSession, _: host_pb2.OpenLaneRequest) -> host_pb2.OpenLaneResponse:
        return host_pb2.OpenLaneResponse(handover_token=session.access.open_lane())

    def close_lane(self, session: ServerSession, _: host_pb2.CloseLaneRequest) -> host_pb2.CloseLaneResponse:
        session.access.close_lane()
        return host_pb2.CloseLaneResponse()

    def map_pool(self, session: ServerSession, request: host_pb2.MapPoolRequest) -> host_pb2.MapPoolResponse:
        token, pool_bytes, table_bytes = session.access.map_pool(request.writable)
        return host_pb2.MapPoolResponse(handover_token=token, pool_bytes=pool_bytes, table_bytes=table_bytes)

    def unmap_pool(self, session: ServerSession, _: host_pb2.UnmapPoolRequest) -> host_pb2.UnmapPoolResponse:
        session.access.unmap_pool()
        return host_pb2.UnmapPoolResponse()

    def commit(self, session: ServerSession, request: host_pb2.CommitRequest) -> host_pb2.CommitResponse:
        session.access.check_writable()
        if request.layers:
            self._manager.mark_layers(session.namespace, request.step_id, list(request.layers))
        else:
            self._manager.mark_all_layers(session.namespace, request.step_id)
        return host_pb2.CommitResponse()
