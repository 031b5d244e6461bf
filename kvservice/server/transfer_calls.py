"""The handlers of TransferService: regions for clients on other hosts."""

from __future__ import annotations

import asyncio

from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.loop import to_the_end
from kvservice.server.memory.region import REMOTE
from kvservice.server.sessions.session import ServerSession
from kvservice.v1 import transfer_pb2


class TransferCalls:
    def handlers(self) -> tuple[Handler, ...]:
        return (
            SessionHandler(
                "create_remote_region",
                transfer_pb2.CreateRemoteRegionRequest,
                self.create_remote_region,
                WhileDraining.REFUSED,
            ),
            SessionHandler("remove_remote_region", transfer_pb2.RemoveRemoteRegionRequest, self.remove_remote_region),
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
