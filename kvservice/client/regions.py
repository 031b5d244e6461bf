"""The shared-memory regions of a session. Calls name tensors in a region instead of sending them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from typing import Any

from kvservice.client.connection import SessionConnection
from kvservice.client.fd_passing import FdPassing
from kvservice.client.region_memory import GpuRegion, HostRegion, RegionRange, SharedRegion
from kvservice.client.requests import build, whole
from kvservice.client.tensors import Tensor
from kvservice.client.values import RegionInfo, from_message
from kvservice.errors import InvalidArgumentError, RegionNotOpenedError, ResourceExhaustedError
from kvservice.v1 import shared_memory_pb2

SHM_DIRECTORY = "/dev/shm"
# The calls that unregister regions of host memory and of GPU memory, and their requests.
_HOST, _GPU = "system_shared_memory_unregister", "cuda_shared_memory_unregister"
_UNREGISTER = {
    _HOST: shared_memory_pb2.SystemSharedMemoryUnregisterRequest,
    _GPU: shared_memory_pb2.CudaSharedMemoryUnregisterRequest,
}


class RegionTable:
    """The regions of a session. `version` is incremented whenever the set of regions changes."""

    def __init__(self, connection: SessionConnection, fds: FdPassing) -> None:
        self._connection, self._fds = connection, fds
        self._regions: list[SharedRegion] = []
        # The names of regions that are not used any more but that the daemon may still have, with their calls to
        # unregister them.
        self._dropped: dict[str, str] = {}
        self.version = 0

    @property
    def connected(self) -> bool:
        """Whether the session is connected to the daemon, whose fd-passing socket may be out of reach all the same."""
        return self._connection.connected

    async def create(
        self, num_bytes: int, *, device: int | None = None, timeout_s: float | None = None
    ) -> SharedRegion:
        """See SessionCore.create_region."""
        return await self.create_until(self._connection.deadline(timeout_s), num_bytes, device)

    async def create_until(self, deadline: float | None, num_bytes: int, device: int | None = None) -> SharedRegion:
        """Create a region, as `create`, until a deadline of the connection. The daemon has released the regions that
        were dropped before it makes this one."""
        num_bytes = whole_bytes(num_bytes)
        return await self._connection.with_one_process(lambda: self._create(deadline, num_bytes, device), deadline)

    async def _create(self, deadline: float | None, num_bytes: int, device: int | None) -> SharedRegion:
        for name, call in list(self._dropped.items()):
            await self._unregister(call, name, deadline)
            self._dropped.pop(name, None)
        await self._fds.introduce_once()
        if device is None:
            region: SharedRegion = await self._create_on_host(num_bytes, deadline)
        else:
            region = await self._create_on_gpu(num_bytes, whole(device, "device"), deadline)
        self._add(region)
        return region

    async def _create_on_host(self, num_bytes: int, deadline: float | None) -> HostRegion:
        name = _new_name()
        request = build(
            shared_memory_pb2.CreateRegionRequest,
            request_id=self._connection.next_request_id(),
            name=name,
            byte_size=num_bytes,
        )
        with self._dropped_on_error(_HOST, name):
            response = await self._connection.call_until(deadline, "create_region", request)
            (descriptor,) = await self._fds.fetch(response.handover_token, 1)
            try:
                return HostRegion(name, descriptor, num_bytes, response.number)
            except OSError as error:
                raise ResourceExhaustedError(f"{num_bytes} bytes cannot be mapped: {error.strerror}") from None
            finally:
                os.close(descriptor)

    async def _create_on_gpu(self, num_bytes: int, device: int, deadline: float | None) -> GpuRegion:
        region = GpuRegion(_new_name(), num_bytes, device)
        request = build(
            shared_memory_pb2.CudaSharedMemoryRegisterRequest,
            request_id=self._connection.next_request_id(),
            name=region.name,
            raw_handle=region.handle,
            device_id=device,
            byte_size=num_bytes,
        )
        with self._dropped_on_error(_GPU, region.name):
            response = await self._connection.call_until(deadline, "cuda_shared_memory_register", request)
        region.number = response.number
        return region

    async def open(self, key: str, num_bytes: int, offset: int = 0, *, timeout_s: float | None = None) -> HostRegion:
        """See SessionCore.open_region."""
        num_bytes, offset = whole(num_bytes, "num_bytes"), whole(offset, "offset")
        return await self._connection.with_one_process(lambda: self._open(key, num_bytes, offset, timeout_s))

    async def _open(self, key: str, num_bytes: int, offset: int, timeout_s: float | None) -> HostRegion:
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
        with self._dropped_on_error(_HOST, name):
            await self._connection.call("system_shared_memory_register", request, timeout_s)
            try:
                descriptor = os.open(f"{SHM_DIRECTORY}/{key.removeprefix('/')}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    region = HostRegion(name, descriptor, num_bytes, offset=offset)
                finally:
                    os.close(descriptor)
            except (OSError, ValueError) as error:
                raise RegionNotOpenedError(f"cannot be opened here: {error}", field="key") from None
        self._add(region)
        return region

    async def unregister(self, region: SharedRegion | None = None, *, timeout_s: float | None = None) -> None:
        """See SessionCore.unregister_region."""
        deadline = self._connection.deadline(timeout_s)
        self._remove(region)
        name = "" if region is None else region.name
        if region is None or isinstance(region, HostRegion):
            await self._unregister(_HOST, name, deadline)
        if region is None or not isinstance(region, HostRegion):
            await self._unregister(_GPU, name, deadline)

    def drop(self, region: SharedRegion) -> None:
        """Unregister a region without waiting for the daemon, which may still execute calls that use it. It keeps the
        memory until they are done."""
        if self.has(region):
            self._remove(region)
            self._drop(_HOST if isinstance(region, HostRegion) else _GPU, region.name)

    @contextlib.contextmanager
    def _dropped_on_error(self, call: str, name: str) -> Iterator[None]:
        """Drop a region that the daemon may have made for an operation that fails or is interrupted."""
        try:
            yield
        except BaseException:
            self._drop(call, name)
            raise

    def _drop(self, call: str, name: str) -> None:
        """Ask the daemon to unregister a region. `create_until` repeats that, because the connection may be broken."""
        self._dropped[name] = call
        self._connection.post(call, self._request(call, name))

    async def _unregister(self, call: str, name: str, deadline: float | None) -> None:
        await self._connection.call_until(deadline, call, self._request(call, name))

    def _request(self, call: str, name: str) -> Any:
        return build(_UNREGISTER[call], request_id=self._connection.next_request_id(), name=name)

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
        self._remove(region)
        region.make_private()

    def _remove(self, region: SharedRegion | None) -> None:
        """Remove a region, or all, so that no further call uses it."""
        self._regions = [] if region is None else [one for one in self._regions if one is not region]
        self.version += 1

    def forget(self) -> None:
        """Remove all regions here. The daemon has already removed them, as it does when the session has had no stream
        for its grace period, or is another process now."""
        self._remove(None)
        self._dropped.clear()

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


def whole_bytes(num_bytes: int) -> int:
    """Return the size of a region. Raises InvalidArgumentError."""
    num_bytes = whole(num_bytes, "num_bytes")
    if not 0 < num_bytes < 1 << 63:
        raise InvalidArgumentError(f"{num_bytes} is not above 0 and below 2^63", field="num_bytes")
    return num_bytes


def _new_name() -> str:
    return f"kvservice-{os.getpid()}-{secrets.token_hex(8)}"
