"""The handlers of SharedMemoryService, TransferService and HostService: memory that sessions share with clients."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kvservice.blocks import BlockManager, Slices
from kvservice.errors import PoolNotSharedError
from kvservice.server.calls.handlers import AnyHandler, WhileDraining, in_session
from kvservice.server.loop import to_the_end
from kvservice.server.memory.region import GPU, HOST, REMOTE, Region
from kvservice.server.sessions.session import ServerSession
from kvservice.v1 import (
    host_pb2,
    shared_memory_pb2,
    transfer_pb2,
)


class RegionCalls:
    """SharedMemoryService: regions of clients on the daemon's host."""

    def handlers(self) -> tuple[AnyHandler, ...]:
        return (
            in_session(
                "system_shared_memory_status",
                shared_memory_pb2.SystemSharedMemoryStatusRequest,
                self.system_shared_memory_status,
            ),
            in_session(
                "system_shared_memory_register",
                shared_memory_pb2.SystemSharedMemoryRegisterRequest,
                self.system_shared_memory_register,
            ),
            in_session(
                "system_shared_memory_unregister",
                shared_memory_pb2.SystemSharedMemoryUnregisterRequest,
                self.system_shared_memory_unregister,
            ),
            in_session(
                "cuda_shared_memory_status",
                shared_memory_pb2.CudaSharedMemoryStatusRequest,
                self.cuda_shared_memory_status,
            ),
            in_session(
                "cuda_shared_memory_register",
                shared_memory_pb2.CudaSharedMemoryRegisterRequest,
                self.cuda_shared_memory_register,
            ),
            in_session(
                "cuda_shared_memory_unregister",
                shared_memory_pb2.CudaSharedMemoryUnregisterRequest,
                self.cuda_shared_memory_unregister,
            ),
            in_session(
                "create_region",
                shared_memory_pb2.CreateRegionRequest,
                self.create_region,
                WhileDraining.REFUSED,
            ),
        )

    def system_shared_memory_status(
        self, session: ServerSession, request: shared_memory_pb2.SystemSharedMemoryStatusRequest
    ) -> shared_memory_pb2.SystemSharedMemoryStatusResponse:
        return system_region_status(session.regions.status(request.name, HOST))

    def system_shared_memory_register(
        self, session: ServerSession, request: shared_memory_pb2.SystemSharedMemoryRegisterRequest
    ) -> shared_memory_pb2.SystemSharedMemoryRegisterResponse:
        session.regions.register(request.name, request.key, request.offset, request.byte_size, request.handover_token)
        return shared_memory_pb2.SystemSharedMemoryRegisterResponse()

    def system_shared_memory_unregister(
        self, session: ServerSession, request: shared_memory_pb2.SystemSharedMemoryUnregisterRequest
    ) -> shared_memory_pb2.SystemSharedMemoryUnregisterResponse:
        session.regions.unregister(request.name, HOST)
        return shared_memory_pb2.SystemSharedMemoryUnregisterResponse()

    def cuda_shared_memory_status(
        self, session: ServerSession, request: shared_memory_pb2.CudaSharedMemoryStatusRequest
    ) -> shared_memory_pb2.CudaSharedMemoryStatusResponse:
        return cuda_region_status(session.regions.status(request.name, GPU))

    def cuda_shared_memory_register(
        self, session: ServerSession, request: shared_memory_pb2.CudaSharedMemoryRegisterRequest
    ) -> shared_memory_pb2.CudaSharedMemoryRegisterResponse:
        number = session.regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return shared_memory_pb2.CudaSharedMemoryRegisterResponse(number=number)

    def cuda_shared_memory_unregister(
        self, session: ServerSession, request: shared_memory_pb2.CudaSharedMemoryUnregisterRequest
    ) -> shared_memory_pb2.CudaSharedMemoryUnregisterResponse:
        session.regions.unregister(request.name, GPU)
        return shared_memory_pb2.CudaSharedMemoryUnregisterResponse()

    def create_region(
        self, session: ServerSession, request: shared_memory_pb2.CreateRegionRequest
    ) -> Slices[shared_memory_pb2.CreateRegionResponse]:
        token, number = yield from session.regions.create_in_slices(request.name, request.byte_size)
        return shared_memory_pb2.CreateRegionResponse(handover_token=token, number=number)


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
        session.regions.unregister(request.name, REMOTE)
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


# ---- codec


def system_region_status(regions: Mapping[str, Region]) -> shared_memory_pb2.SystemSharedMemoryStatusResponse:
    kind = shared_memory_pb2.SystemSharedMemoryStatusResponse.RegionStatus
    return shared_memory_pb2.SystemSharedMemoryStatusResponse(
        regions={
            name: kind(name=name, key=region.key, offset=region.offset, byte_size=region.byte_size)
            for name, region in regions.items()
        }
    )


def cuda_region_status(regions: Mapping[str, Region]) -> shared_memory_pb2.CudaSharedMemoryStatusResponse:
    kind = shared_memory_pb2.CudaSharedMemoryStatusResponse.RegionStatus
    return shared_memory_pb2.CudaSharedMemoryStatusResponse(
        regions={
            name: kind(name=name, device_id=region.device_id, byte_size=region.byte_size)
            for name, region in regions.items()
        }
    )
