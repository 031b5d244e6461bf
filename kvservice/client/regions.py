"""The shared-memory regions of a session. Calls name tensors in a region instead of sending them."""

from __future__ import annotations

import os
import secrets

from kvservice.client.connection import SessionConnection
from kvservice.client.fd_passing import FdPassing
from kvservice.client.region_memory import GpuRegion, HostRegion, RegionRange, SharedRegion
from kvservice.client.requests import build, whole
from kvservice.client.tensors import Tensor
from kvservice.client.values import RegionInfo, from_message
from kvservice.errors import InvalidArgumentError, RegionNotOpenedError, ResourceExhaustedError
from kvservice.v1 import shared_memory_pb2

SHM_DIRECTORY = "/dev/shm"


class RegionTable:
    """The regions of a session. `version` is incremented whenever the set of regions changes."""

    def __init__(self, connection: SessionConnection, fds: FdPassing) -> None:
        self._connection, self._fds = connection, fds
        self._regions: list[SharedRegion] = []
        self.version = 0

    async def create(
        self, num_bytes: int, *, device: int | None = None, timeout_s: float | None = None
    ) -> SharedRegion:
        """See SessionCore.create_region."""
        num_bytes = whole(num_bytes, "num_bytes")
        if num_bytes <= 0:
            raise InvalidArgumentError(f"{num_bytes} is not above 0", field="num_bytes")
        if device is not None:
            return await self._create_on_gpu(num_bytes, whole(device, "device"), timeout_s)
        await self._fds.introduce_once()
        name = _new_name()
        request = build(
            shared_memory_pb2.CreateRegionRequest,
            request_id=self._connection.next_request_id(),
            name=name,
            byte_size=num_bytes,
        )
        try:
            response = await self._connection.call("create_region", request, timeout_s)
            (descriptor,) = await self._fds.fetch(response.handover_token, 1)
            try:
                region = HostRegion(name, descriptor, num_bytes, response.number)
            finally:
                os.close(descriptor)
        except BaseException as error:  # an interrupted call must not leave a region behind either
            await self._unregister(name)
            if isinstance(error, OSError):
                raise ResourceExhaustedError(f"{num_bytes} bytes cannot be mapped: {error.strerror}") from None
            raise
        self._add(region)
        return region

    async def _create_on_gpu(self, num_bytes: int, device: int, timeout_s: float | None) -> SharedRegion:
        await self._fds.introduce_once()
        region = GpuRegion(_new_name(), num_bytes, device)
        request = build(
            shared_memory_pb2.CudaSharedMemoryRegisterRequest,
            request_id=self._connection.next_request_id(),
            name=region.name,
            raw_handle=region.handle,
            device_id=device,
            byte_size=num_bytes,
        )
        try:
            region.number = (await self._connection.call("cuda_shared_memory_register", request, timeout_s)).number
        except BaseException:
            await self._unregister_on_gpu(region.name)
            raise
        self._add(region)
        return region

    async def open(self, key: str, num_bytes: int, offset: int = 0, *, timeout_s: float | None = None) -> HostRegion:
        """See SessionCore.open_region."""
        num_bytes, offset = whole(num_bytes, "num_bytes"), whole(offset, "offset")
        name = _new_name()
        request = build(
            shared_memory_pb2.SystemSharedMemoryRegisterRequest,
            request_id=self._connection.next_request_id(),
            name=name,
            key=key,
            offset=offset,
            byte_size=num_bytes,
            handover_token=await self._fds.introduce(),
        )
        await self._connection.call("system_shared_memory_register", request, timeout_s)
        try:
            descriptor = os.open(f"{SHM_DIRECTORY}/{key.removeprefix('/')}", os.O_RDWR | os.O_CLOEXEC)
            try:
                region = HostRegion(name, descriptor, num_bytes, offset=offset)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            await self._unregister(name)
            raise RegionNotOpenedError(f"cannot be opened here: {error}", field="key") from None
        self._add(region)
        return region

    async def unregister(self, region: SharedRegion | None = None, *, timeout_s: float | None = None) -> None:
        """See SessionCore.unregister_region."""
        self._regions = [] if region is None else [one for one in self._regions if one is not region]
        self.version += 1
        name = "" if region is None else region.name
        if region is None or isinstance(region, HostRegion):
            await self._unregister(name, timeout_s)
        if region is None or not isinstance(region, HostRegion):
            await self._unregister_on_gpu(name, timeout_s)

    async def _unregister(self, name: str, timeout_s: float | None = None) -> None:
        request = build(
            shared_memory_pb2.SystemSharedMemoryUnregisterRequest,
            request_id=self._connection.next_request_id(),
            name=name,
        )
        await self._connection.call("system_shared_memory_unregister", request, timeout_s)

    async def _unregister_on_gpu(self, name: str, timeout_s: float | None = None) -> None:
        request = build(
            shared_memory_pb2.CudaSharedMemoryUnregisterRequest,
            request_id=self._connection.next_request_id(),
            name=name,
        )
        await self._connection.call("cuda_shared_memory_unregister", request, timeout_s)

    async def status(self, *, timeout_s: float | None = None) -> list[RegionInfo]:
        """See SessionCore.regions."""
        request = build(shared_memory_pb2.SystemSharedMemoryStatusRequest)
        response = await self._connection.call("system_shared_memory_status", request, timeout_s)
        return [from_message(RegionInfo, one) for _, one in sorted(response.regions.items())]

    def _add(self, region: SharedRegion) -> None:
        self._regions.append(region)
        self.version += 1

    def give_up(self, region: HostRegion) -> None:
        """Remove a region here, and make its memory private: a call that was given up may still be executed, and must
        find the bytes that the memory has now."""
        self._regions = [one for one in self._regions if one is not region]
        self.version += 1
        region.make_private()

    def forget(self) -> None:
        """Remove all regions here. The daemon has already removed them, as it does when the session has had no stream
        for its grace period."""
        self._regions = []
        self.version += 1

    def numbered(self) -> list[SharedRegion]:
        """Return the regions that lanes support."""
        return [region for region in self._regions if region.number is not None]

    def has(self, region: SharedRegion) -> bool:
        return any(one is region for one in self._regions)

    def find(self, tensor: Tensor) -> RegionRange | None:
        """Return the location of a tensor in the session's regions, or None if it is in none."""
        for region in self._regions:
            offset = region.offset_of(tensor)
            if offset is not None:
                return RegionRange(region, offset, int(tensor.nbytes))
        return None


def _new_name() -> str:
    return f"kvservice-{os.getpid()}-{secrets.token_hex(8)}"
