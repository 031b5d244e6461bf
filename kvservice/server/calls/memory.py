"""The handlers of RegionService, TransferService and HostService: memory that sessions share with clients."""

from __future__ import annotations

import asyncio

from kvservice.blocks import BlockManager, Slices
from kvservice.errors import PoolNotSharedError
from kvservice.server.calls.handlers import AnyHandler, WhileDraining, in_session
from kvservice.server.loop import to_the_end
from kvservice.server.sessions.session import ServerSession
from kvservice.v1 import (
    host_pb2,
    regions_pb2,
    transfer_pb2,
)


class RegionCalls:
    """RegionService: regions of clients on the daemon's host."""

    def handlers(self) -> tuple[AnyHandler, ...]:
        return (
            in_session("create_region", regions_pb2.CreateRegionRequest, self.create_region, WhileDraining.REFUSED),
            in_session("register_region", regions_pb2.RegisterRegionRequest, self.register_region),
            in_session("register_cuda_region", regions_pb2.RegisterCudaRegionRequest, self.register_cuda_region),
            in_session("list_regions", regions_pb2.ListRegionsRequest, self.list_regions),
            in_session("unregister_region", regions_pb2.UnregisterRegionRequest, self.unregister_region),
        )

    def create_region(
        self, session: ServerSession, request: regions_pb2.CreateRegionRequest
    ) -> Slices[regions_pb2.CreateRegionResponse]:
        token, number = yield from session.regions.create_in_slices(request.name, request.byte_size)
        return regions_pb2.CreateRegionResponse(handover_token=token, number=number)

    def register_region(
        self, session: ServerSession, request: regions_pb2.RegisterRegionRequest
    ) -> regions_pb2.RegisterRegionResponse:
        session.regions.register(request.name, request.key, request.offset, request.byte_size, request.handover_token)
        return regions_pb2.RegisterRegionResponse()

    def register_cuda_region(
        self, session: ServerSession, request: regions_pb2.RegisterCudaRegionRequest
    ) -> regions_pb2.RegisterCudaRegionResponse:
        number = session.regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return regions_pb2.RegisterCudaRegionResponse(number=number)

    def list_regions(
        self, session: ServerSession, _: regions_pb2.ListRegionsRequest
    ) -> regions_pb2.ListRegionsResponse:
        return regions_pb2.ListRegionsResponse(
            regions=(
                regions_pb2.Region(
                    name=name,
                    key=region.key,
                    offset=region.offset,
                    byte_size=region.byte_size,
                    device_id=region.device_id,
                )
                for name, region in session.regions.of_host().items()
            )
        )

    def unregister_region(
        self, session: ServerSession, request: regions_pb2.UnregisterRegionRequest
    ) -> regions_pb2.UnregisterRegionResponse:
        session.regions.unregister(request.name)
        return regions_pb2.UnregisterRegionResponse()


class TransferCalls:
    """TransferService: regions for clients on other hosts."""

    def handlers(self) -> tuple[AnyHandler, ...]:
        return (
            in_session(
                "create_remote_region",
                transfer_pb2.CreateRemoteRegionRequest,
                self.create_remote_region,
                WhileDraining.REFUSED,
            ),
            in_session("remove_remote_region", transfer_pb2.RemoveRemoteRegionRequest, self.remove_remote_region),
        )

    async def create_remote_region(
        self, session: ServerSession, request: transfer_pb2.CreateRemoteRegionRequest
    ) -> transfer_pb2.CreateRemoteRegionResponse:
        making = session.regions.create_remote(
            request.name, request.byte_size, request.remote_bytes, request.ports, request.address
        )
        await asyncio.shield(to_the_end(making))
        return transfer_pb2.CreateRemoteRegionResponse()

    def remove_remote_region(
        self, session: ServerSession, request: transfer_pb2.RemoveRemoteRegionRequest
    ) -> transfer_pb2.RemoveRemoteRegionResponse:
        session.regions.remove_remote(request.name)
        return transfer_pb2.RemoveRemoteRegionResponse()


class HostCalls:
    """HostService: the lane and the mapped pool of a client on the daemon's host."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def handlers(self) -> tuple[AnyHandler, ...]:
        return (
            in_session("open_lane", host_pb2.OpenLaneRequest, self.open_lane, WhileDraining.REFUSED),
            in_session("close_lane", host_pb2.CloseLaneRequest, self.close_lane),
            in_session("map_pool", host_pb2.MapPoolRequest, self.map_pool, WhileDraining.REFUSED),
            in_session("unmap_pool", host_pb2.UnmapPoolRequest, self.unmap_pool),
            in_session("commit", host_pb2.CommitRequest, self.commit),
        )

    def open_lane(self, session: ServerSession, _: host_pb2.OpenLaneRequest) -> host_pb2.OpenLaneResponse:
        return host_pb2.OpenLaneResponse(handover_token=session.shared.open_lane())

    def close_lane(self, session: ServerSession, _: host_pb2.CloseLaneRequest) -> host_pb2.CloseLaneResponse:
        session.shared.close_lane()
        return host_pb2.CloseLaneResponse()

    def map_pool(self, session: ServerSession, request: host_pb2.MapPoolRequest) -> host_pb2.MapPoolResponse:
        if not session.tenancy.map_pool:
            raise PoolNotSharedError(f"not for tenant {session.tenant}: the pool has the blocks of all tenants")
        token, pool_bytes, table_bytes = session.shared.map_pool(request.writable)
        return host_pb2.MapPoolResponse(handover_token=token, pool_bytes=pool_bytes, table_bytes=table_bytes)

    def unmap_pool(self, session: ServerSession, _: host_pb2.UnmapPoolRequest) -> host_pb2.UnmapPoolResponse:
        session.shared.unmap_pool()
        return host_pb2.UnmapPoolResponse()

    def commit(self, session: ServerSession, request: host_pb2.CommitRequest) -> host_pb2.CommitResponse:
        session.shared.check_writable()
        if request.layers:
            self._manager.mark_layers(session.namespace, request.step_id, list(request.layers))
        else:
            self._manager.mark_all_layers(session.namespace, request.step_id)
        return host_pb2.CommitResponse()
