"""The handlers of SharedMemoryService: regions that a session shares with its client."""

from __future__ import annotations

from kvservice.blocks import Slices
from kvservice.server import codec
from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.memory.region import GPU, HOST
from kvservice.server.sessions.session import ServerSession
from kvservice.v1 import shared_memory_pb2


class RegionCalls:
    def handlers(self) -> tuple[Handler, ...]:
        return (
            SessionHandler(
                "system_shared_memory_status",
                shared_memory_pb2.SystemSharedMemoryStatusRequest,
                self.system_shared_memory_status,
            ),
            SessionHandler(
                "system_shared_memory_register",
                shared_memory_pb2.SystemSharedMemoryRegisterRequest,
                self.system_shared_memory_register,
            ),
            SessionHandler(
                "system_shared_memory_unregister",
                shared_memory_pb2.SystemSharedMemoryUnregisterRequest,
                self.system_shared_memory_unregister,
            ),
            SessionHandler(
                "cuda_shared_memory_status",
                shared_memory_pb2.CudaSharedMemoryStatusRequest,
                self.cuda_shared_memory_status,
            ),
            SessionHandler(
                "cuda_shared_memory_register",
                shared_memory_pb2.CudaSharedMemoryRegisterRequest,
                self.cuda_shared_memory_register,
            ),
            SessionHandler(
                "cuda_shared_memory_unregister",
                shared_memory_pb2.CudaSharedMemoryUnregisterRequest,
                self.cuda_shared_memory_unregister,
            ),
            SessionHandler(
                "create_region",
                shared_memory_pb2.CreateRegionRequest,
                self.create_region,
                WhileDraining.REFUSED,
            ),
        )

    def system_shared_memory_status(
        self, session: ServerSession, request: shared_memory_pb2.SystemSharedMemoryStatusRequest
    ) -> shared_memory_pb2.SystemSharedMemoryStatusResponse:
        return codec.system_region_status(session.regions.status(request.name, HOST))

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
        return codec.cuda_region_status(session.regions.status(request.name, GPU))

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
