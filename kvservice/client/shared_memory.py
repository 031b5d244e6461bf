"""Shared-memory regions of a session. Calls name tensors in a region instead of sending them."""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from kvservice.client import fd_passing
from kvservice.client.requests import build, whole
from kvservice.client.tensors import Tensor, address_of
from kvservice.client.values import RegionInfo, from_message
from kvservice.errors import InvalidArgumentError, RegionNotOpenedError, RegionsNotAllowedError, ResourceExhaustedError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import shared_memory_pb2, tensor_pb2
from kvservice.wire.tensors import Array

SHM_DIRECTORY = "/dev/shm"
T = TypeVar("T")


class Memory(ABC):
    """`num_bytes` of memory that is shared with the daemon. `create_region` and `open_region` of a session return it.

    Arrays and torch tensors over it (`array`, and views of those) can be passed wherever a step takes tensors, and as
    `out` and `lse_out`. The memory is freed when the session has unregistered it and the last array over it is gone.
    `number` identifies the region in lane calls; None: lanes do not support it.
    """

    def __init__(self, name: str, num_bytes: int, address: int, number: int | None) -> None:
        self.name, self.num_bytes, self.number = name, num_bytes, number
        self.address = address

    @abstractmethod
    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Tensor:
        """Return an array over the memory from byte `offset` on. `dtype` is a name as in PoolInfo. Raises
        InvalidArgumentError."""

    def offset_of(self, tensor: Tensor) -> int | None:
        """Return the byte offset of a contiguous (row-major) tensor that lies entirely in this memory, else None."""
        address = address_of(tensor)
        if address is None or not tensor.nbytes:
            return None
        offset = address - self.address
        return offset if offset >= 0 and offset + int(tensor.nbytes) <= self.num_bytes else None


class SharedMemory(Memory):
    """See Memory. The memory is host memory and its arrays are NumPy arrays."""

    def __init__(self, name: str, descriptor: int, num_bytes: int, number: int | None = None, offset: int = 0) -> None:
        """Map the memory. The caller still owns the descriptor. Raises OSError."""
        self._map = mmap.mmap(descriptor, offset + num_bytes)
        self._begin = offset
        super().__init__(name, num_bytes, np.frombuffer(self._map, np.uint8).ctypes.data + offset, number)

    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Array:
        """See Memory. `dtype` may also be any dtype of NumPy."""
        kind = np.dtype(TENSOR_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        try:
            if offset < 0:
                raise ValueError("the offset is negative")
            return np.ndarray(shape, kind, self._map, self._begin + offset)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"does not fit into {self.num_bytes} bytes: {error}", field="shape") from None


class Place(NamedTuple):
    """The location of an array in a region, in bytes."""

    memory: Memory
    offset: int
    num_bytes: int

    def message(self) -> tensor_pb2.SharedMemoryPlace:
        return tensor_pb2.SharedMemoryPlace(region=self.memory.name, offset=self.offset, byte_size=self.num_bytes)


class Stream(Protocol):
    """A session's connection; `SessionConnection` implements it. With the sync API its coroutines never suspend."""

    async def call(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        """Send one call and return its response. `timeout_s` is in seconds; None: the session's default. Raises
        KVServiceError."""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function that blocks; the async API runs it in a thread."""

    def lock(self) -> AbstractAsyncContextManager[object]:
        """Create a lock."""

    def deadline(self, timeout_s: float | None = None) -> float | None:
        """Return the deadline of a call that starts now, for `check` and `left_s`. Raises InvalidArgumentError."""

    def left_s(self, deadline: float | None, most_s: float) -> float:
        """Return the seconds until the deadline, at most `most_s`."""

    def check(self, deadline: float | None = None) -> None:
        """Raise the error that a call would raise while the daemon is away, and CallTimeoutError past the deadline."""


class Call(Protocol):
    """See Stream.call."""

    def __call__(self, name: str, request: Any, timeout_s: float | None = None) -> Awaitable[Any]: ...


class RegionCore:
    """The regions of a session; see SessionCore."""

    def __init__(self, stream: Stream, fd_path: str | None, token: bytes) -> None:
        """`fd_path` is the path of the daemon's fd-passing socket. It is None unless the client uses a unix
        socket and the daemon shares memory."""
        self.stream = stream
        self.call: Call = stream.call
        self.fd_path = fd_path
        self.token = token
        self._request_ids = itertools.count(secrets.randbits(62) + 1)
        # Whether the daemon knows which user owns the session.
        self.is_introduced = False
        self._memories: list[Memory] = []
        # Incremented whenever the set of regions changes.
        self.regions_version = 0

    def next_request_id(self) -> int:
        return next(self._request_ids)

    @property
    def can_share(self) -> bool:
        """Whether the client uses a unix socket of a daemon that shares memory."""
        return self.fd_path is not None

    async def create_region(
        self, num_bytes: int, *, device: int | None = None, timeout_s: float | None = None
    ) -> Memory:
        """Create a shared-memory region that the daemon reads and writes in place.

        Without `device`, the daemon allocates host memory. With `device`, the number of the pool's GPU, this process
        allocates memory on that GPU, and its arrays are torch tensors; this needs torch and kvservice built with CUDA,
        or raises FailedPreconditionError. Only for clients on the unix socket of a daemon that allows regions; others
        get RegionsNotAllowedError.
        """
        num_bytes = whole(num_bytes, "num_bytes")
        if num_bytes <= 0:
            raise InvalidArgumentError(f"{num_bytes} is not above 0", field="num_bytes")
        if device is not None:
            return await self._create_on_gpu(num_bytes, whole(device, "device"), timeout_s)
        await introduce_once(self)
        name = _new_name()
        request = build(
            shared_memory_pb2.CreateRegionRequest, request_id=self.next_request_id(), name=name, byte_size=num_bytes
        )
        try:
            response = await self.call("create_region", request, timeout_s)
            (descriptor,) = await fetch(self, response.handover_token, 1)
            try:
                memory = SharedMemory(name, descriptor, num_bytes, response.number)
            finally:
                os.close(descriptor)
        except BaseException as error:  # an interrupted call must not leave a region behind either
            await self._unregister(name)
            if isinstance(error, OSError):
                raise ResourceExhaustedError(f"{num_bytes} bytes cannot be mapped: {error.strerror}") from None
            raise
        self._add(memory)
        return memory

    async def _create_on_gpu(self, num_bytes: int, device: int, timeout_s: float | None) -> Memory:
        from kvservice.client import gpu

        await introduce_once(self)
        memory = gpu.GpuMemory(_new_name(), num_bytes, device)
        request = build(
            shared_memory_pb2.CudaSharedMemoryRegisterRequest,
            request_id=self.next_request_id(),
            name=memory.name,
            raw_handle=memory.handle,
            device_id=device,
            byte_size=num_bytes,
        )
        try:
            memory.number = (await self.call("cuda_shared_memory_register", request, timeout_s)).number
        except BaseException:
            await self._unregister_on_gpu(memory.name)
            raise
        self._add(memory)
        return memory

    async def open_region(
        self, key: str, num_bytes: int, offset: int = 0, *, timeout_s: float | None = None
    ) -> SharedMemory:
        """Register `num_bytes` of an existing POSIX shared-memory object, from byte `offset` on, as a region.

        `key` is the name of the object, as for shm_open. The user of this process must have read and write permission.
        The daemon copies tensors in such a region. Raises RegionNotOpenedError.
        """
        num_bytes, offset = whole(num_bytes, "num_bytes"), whole(offset, "offset")
        name = _new_name()
        request = build(
            shared_memory_pb2.SystemSharedMemoryRegisterRequest,
            request_id=self.next_request_id(),
            name=name,
            key=key,
            offset=offset,
            byte_size=num_bytes,
            handover_token=await introduce(self),
        )
        await self.call("system_shared_memory_register", request, timeout_s)
        try:
            descriptor = os.open(f"{SHM_DIRECTORY}/{key.removeprefix('/')}", os.O_RDWR | os.O_CLOEXEC)
            try:
                memory = SharedMemory(name, descriptor, num_bytes, offset=offset)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            await self._unregister(name)
            raise RegionNotOpenedError(f"cannot be opened here: {error}", field="key") from None
        self._add(memory)
        return memory

    async def unregister_region(self, memory: Memory | None = None, *, timeout_s: float | None = None) -> None:
        """Unregister a region; None: all regions of the session, including those of a previous client. Arrays over the
        memory stay usable; calls send them in messages from now on."""
        self._memories = [] if memory is None else [one for one in self._memories if one is not memory]
        self.regions_version += 1
        name = "" if memory is None else memory.name
        if memory is None or isinstance(memory, SharedMemory):
            await self._unregister(name, timeout_s)
        if memory is None or not isinstance(memory, SharedMemory):
            await self._unregister_on_gpu(name, timeout_s)

    async def _unregister(self, name: str, timeout_s: float | None = None) -> None:
        request = build(
            shared_memory_pb2.SystemSharedMemoryUnregisterRequest, request_id=self.next_request_id(), name=name
        )
        await self.call("system_shared_memory_unregister", request, timeout_s)

    async def _unregister_on_gpu(self, name: str, timeout_s: float | None = None) -> None:
        request = build(
            shared_memory_pb2.CudaSharedMemoryUnregisterRequest, request_id=self.next_request_id(), name=name
        )
        await self.call("cuda_shared_memory_unregister", request, timeout_s)

    async def regions(self, *, timeout_s: float | None = None) -> list[RegionInfo]:
        """Return the daemon's list of the session's regions in host memory."""
        request = build(shared_memory_pb2.SystemSharedMemoryStatusRequest)
        response = await self.call("system_shared_memory_status", request, timeout_s)
        return [from_message(RegionInfo, one) for _, one in sorted(response.regions.items())]

    def _add(self, memory: Memory) -> None:
        self._memories.append(memory)
        self.regions_version += 1

    def forget_regions(self) -> None:
        """Remove all regions here. The daemon has already removed them, as it does when the session has had no stream
        for its grace period."""
        self._memories = []
        self.regions_version += 1

    def lane_regions(self) -> list[Memory]:
        """Return the regions that lanes support."""
        return [memory for memory in self._memories if memory.number is not None]

    def has_region(self, memory: Memory) -> bool:
        return any(one is memory for one in self._memories)

    def find_place(self, tensor: Tensor) -> Place | None:
        """Return the location of a tensor in the session's regions, or None if it is in none."""
        for memory in self._memories:
            offset = memory.offset_of(tensor)
            if offset is not None:
                return Place(memory, offset, int(tensor.nbytes))
        return None


async def introduce(session: RegionCore) -> bytes:
    """Prove to the daemon which user owns the session. Returns a token that proves it in one call, or b"" if the daemon
    shares no memory. Raises the errors of `fd_passing.introduce`."""
    if session.fd_path is None:
        return b""
    token = await session.stream.run(fd_passing.introduce, session.fd_path, session.token)
    session.is_introduced = True
    return token


async def introduce_once(session: RegionCore) -> None:
    """Call `introduce` unless that has been done. The daemon requires it before it shares memory with the session.
    Raises the errors of `fd_passing.introduce`."""
    if not session.is_introduced:
        await introduce(session)


async def fetch(session: RegionCore, token: bytes, count: int) -> list[int]:
    """Receive the file descriptors for a token; the caller closes them. Raises the errors of `fd_passing.fetch`."""
    if session.fd_path is None:
        raise RegionsNotAllowedError("shared memory is for clients on the unix socket")
    return await session.stream.run(fd_passing.fetch, session.fd_path, token, count)


def _new_name() -> str:
    return f"kvservice-{os.getpid()}-{secrets.token_hex(8)}"
