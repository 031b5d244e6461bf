"""Handlers for calls of clients on the daemon's host: regions, the lane, the mapped pool."""

from __future__ import annotations

from kvservice.blocks import BlockManager
from kvservice.server import codec
from kvservice.server.region import GPU, HOST
from kvservice.server.sessions import Session
from kvservice.server.slices import Answer, in_slices
from kvservice.v1 import host_pb2, shared_memory_pb2


class HostCalls:
    """Calls `(session, request) -> response`, or a task of the response, as in `Calls`."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def system_shared_memory_status(
        self, session: Session, request: shared_memory_pb2.SystemSharedMemoryStatusRequest
    ) -> shared_memory_pb2.SystemSharedMemoryStatusResponse:
        return codec.system_region_status(session.regions.status(request.name, HOST))

    def system_shared_memory_register(
        self, session: Session, request: shared_memory_pb2.SystemSharedMemoryRegisterRequest
    ) -> shared_memory_pb2.SystemSharedMemoryRegisterResponse:
        session.regions.register(request.name, request.key, request.offset, request.byte_size, request.handover_token)
        return shared_memory_pb2.SystemSharedMemoryRegisterResponse()

    def system_shared_memory_unregister(
        self, session: Session, request: shared_memory_pb2.SystemSharedMemoryUnregisterRequest
    ) -> shared_memory_pb2.SystemSharedMemoryUnregisterResponse:
        session.regions.unregister(request.name, HOST)
        return shared_memory_pb2.SystemSharedMemoryUnregisterResponse()

    def cuda_shared_memory_status(
        self, session: Session, request: shared_memory_pb2.CudaSharedMemoryStatusRequest
    ) -> shared_memory_pb2.CudaSharedMemoryStatusResponse:
        return codec.cuda_region_status(session.regions.status(request.name, GPU))

    def cuda_shared_memory_register(
        self, session: Session, request: shared_memory_pb2.CudaSharedMemoryRegisterRequest
    ) -> shared_memory_pb2.CudaSharedMemoryRegisterResponse:
        number = session.regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return shared_memory_pb2.CudaSharedMemoryRegisterResponse(number=number)

    def cuda_shared_memory_unregister(
        self, session: Session, request: shared_memory_pb2.CudaSharedMemoryUnregisterRequest
    ) -> shared_memory_pb2.CudaSharedMemoryUnregisterResponse:
        session.regions.unregister(request.name, GPU)
        return shared_memory_pb2.CudaSharedMemoryUnregisterResponse()

    def create_region(
        self, session: Session, request: shared_memory_pb2.CreateRegionRequest
    ) -> Answer[shared_memory_pb2.CreateRegionResponse]:
        creating = session.regions.create_in_slices(request.name, request.byte_size)
        return in_slices(
            creating, lambda made: shared_memory_pb2.CreateRegionResponse(handover_token=made[0], number=made[1])
        )

    def open_lane(self, session: Session, _: host_pb2.OpenLaneRequest) -> host_pb2.OpenLaneResponse:
        token, event_handle = session.access.open_lane()
        return host_pb2.OpenLaneResponse(handover_token=token, event_handle=event_handle)

    def close_lane(self, session: Session, _: host_pb2.CloseLaneRequest) -> host_pb2.CloseLaneResponse:
        session.access.close_lane()
        return host_pb2.CloseLaneResponse()

    def map_pool(self, session: Session, request: host_pb2.MapPoolRequest) -> host_pb2.MapPoolResponse:
        token, pool_bytes, table_bytes = session.access.map_pool(request.writable)
        return host_pb2.MapPoolResponse(handover_token=token, pool_bytes=pool_bytes, table_bytes=table_bytes)

    def unmap_pool(self, session: Session, _: host_pb2.UnmapPoolRequest) -> host_pb2.UnmapPoolResponse:
        session.access.unmap_pool()
        return host_pb2.UnmapPoolResponse()

    def commit(self, session: Session, request: host_pb2.CommitRequest) -> host_pb2.CommitResponse:
        session.access.check_writable()
        self._manager.mark_all_layers(session.space, request.step_id)
        return host_pb2.CommitResponse()
