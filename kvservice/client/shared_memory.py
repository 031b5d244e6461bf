"""Memory that a client shares with its daemon, for tensors that do not travel."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import secrets
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from kvservice.client.requests import build, whole
from kvservice.client.values import RegionInfo, from_message
from kvservice.errors import InvalidArgumentError, ResourceExhaustedError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import shared_memory_pb2, tensor_pb2
from kvservice.wire.tensors import Array

SHM_DIRECTORY = "/dev/shm"


class SharedMemory:
    """`num_bytes` of shared memory, zeroed; made and registered by a session's `create_region`.

    Arrays and torch tensors over it (`array`, and views of those) may be given wherever a step takes tensors, and as
    `out` and `lse_out`. It is freed when the session has given it up and the last array over it is gone.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.name = f"kvservice-{os.getpid()}-{secrets.token_hex(8)}"
        self._path = f"{SHM_DIRECTORY}/{self.name}"
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceExhaustedError(f"no shared memory can be made: {error.strerror}") from None
        try:
            # All of it now: a page that is not there later is a SIGBUS.
            os.posix_fallocate(descriptor, 0, num_bytes)
            self._map = mmap.mmap(descriptor, num_bytes)
        except OSError as error:
            self.unlink()
            raise ResourceExhaustedError(f"no {num_bytes} bytes of shared memory: {error.strerror}") from None
        finally:
            os.close(descriptor)
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data

    def unlink(self) -> None:
        """Take its name away: who has it open keeps it, and nothing is left behind when all have ended."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Array:
        """An array over the bytes from `offset` on. `dtype`: a name as in PoolInfo, or what NumPy takes."""
        kind = np.dtype(TENSOR_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        try:
            return np.ndarray(shape, kind, self._map, offset)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"does not fit into {self.num_bytes} bytes: {error}", field="shape") from None

    def offset_of(self, array: Array) -> int | None:
        """Where the array's elements begin, if they all lie here, in row-major order and without gaps."""
        offset = int(array.__array_interface__["data"][0]) - self._address
        inside = offset >= 0 and offset + array.nbytes <= self.num_bytes
        return offset if inside and array.nbytes and array.flags.c_contiguous else None


# Where an array lies in a registered region; None: nowhere.
FindPlace = Callable[[Array], tensor_pb2.SharedMemoryPlace | None]


class Transport(Protocol):
    """Sends one call of a session and returns its answer. Raises KVServiceError."""

    async def call(self, name: str, request: Any) -> Any: ...


class RegionCore:
    """What of a session is about regions; see SessionCore."""

    def __init__(self, transport: Transport) -> None:
        self.call = transport.call
        self._request_ids = itertools.count(secrets.randbits(62) + 1)
        self._memories: list[SharedMemory] = []

    async def create_region(self, num_bytes: int) -> SharedMemory:
        """Shared memory that the daemon reads tensors from and puts outputs into. For clients on the unix socket of a
        daemon that allows it; others get RegionsNotAllowedError."""
        num_bytes = whole(num_bytes, "num_bytes")
        if num_bytes <= 0:
            raise InvalidArgumentError(f"{num_bytes} is not above 0", field="num_bytes")
        memory = SharedMemory(num_bytes)
        try:
            request = build(
                shared_memory_pb2.SystemSharedMemoryRegisterRequest,
                request_id=next(self._request_ids),
                name=memory.name,
                key=f"/{memory.name}",
                byte_size=num_bytes,
            )
            await self.call("system_shared_memory_register", request)
        finally:
            memory.unlink()
        self._memories.append(memory)
        return memory

    async def unregister_region(self, memory: SharedMemory | None = None) -> None:
        """Give shared memory up; None: all that the session has, a former owner's too. Arrays over it can still be
        used, and travel inside messages from now on."""
        request = build(
            shared_memory_pb2.SystemSharedMemoryUnregisterRequest,
            request_id=next(self._request_ids),
            name=None if memory is None else memory.name,
        )
        self._memories = [] if memory is None else [one for one in self._memories if one is not memory]
        await self.call("system_shared_memory_unregister", request)

    async def regions(self) -> list[RegionInfo]:
        """What the daemon knows of the session's regions."""
        response = await self.call(
            "system_shared_memory_status", build(shared_memory_pb2.SystemSharedMemoryStatusRequest)
        )
        return [from_message(RegionInfo, one) for _, one in sorted(response.regions.items())]

    def find_place(self, array: Array) -> tensor_pb2.SharedMemoryPlace | None:
        """Where an array lies in the session's regions, if it does."""
        for memory in self._memories:
            offset = memory.offset_of(array)
            if offset is not None:
                return tensor_pb2.SharedMemoryPlace(region=memory.name, offset=offset, byte_size=array.nbytes)
        return None
