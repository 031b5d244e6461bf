"""The memory on this host that a session shares with the daemon. Calls name tensors in a region instead of sending
them.

In the order in which it happens: the fd-passing socket exchanges a token for file descriptors, and proves who owns a
session; a region maps the memory; the table of a session finds tensors in its regions; and transports copy tensors that
lie elsewhere through a staging region.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from kvservice.client import tensors
from kvservice.client.connection import SessionConnection
from kvservice.client.cut_calls import CutCalls
from kvservice.client.messages import build, whole
from kvservice.client.tensors import OUT_OF_MEMORY, Tensor, address_of, as_bytes, extension, view
from kvservice.client.values import RegionInfo
from kvservice.errors import (
    ConnectionLostError,
    InvalidArgumentError,
    KVServiceError,
    RegionNotOpenedError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
)
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import regions_pb2, tensor_pb2
from kvservice.wire.tensors import Array

TOKEN_BYTES = 16
# The daemon sends this byte instead of an answer if it has no file descriptor left.
EXHAUSTED = b"\1"
_UNIX = "unix:"
_TIMEOUT_S = 10.0


def socket_path(address: str) -> str | None:
    """Return the path of the fd-passing socket for a gRPC address, or None if the address is not a unix socket."""
    if not address.startswith(_UNIX):
        return None
    path = address.removeprefix(_UNIX)
    return f"{path.removeprefix('//')}.fds"


class FdPassing:
    """The fd-passing socket of the daemon, for one session.

    `path` is None unless the client uses a unix socket and the daemon shares memory.
    """

    def __init__(self, connection: SessionConnection, path: str | None, session_token: bytes) -> None:
        self._connection, self._session_token = connection, session_token
        self.path = path
        # The number of restarts at which the daemon learnt which user owns the session. Each of its processes must.
        self._introduced_at: int | None = None

    async def introduce(self) -> bytes:
        """Prove to the daemon which user owns the session. Returns a token that proves it in one call, or b"" if the
        daemon shares no memory. Raises the errors of `introduce` below."""
        if self.path is None:
            return b""
        num_restarts = self._connection.num_restarts
        token: bytes = await self._connection.run(introduce, self.path, self._session_token)
        self._introduced_at = num_restarts
        return token

    async def introduce_once(self) -> None:
        """Call `introduce` unless that has been done. The daemon requires it before it shares memory with the
        session."""
        if self._introduced_at != self._connection.num_restarts:
            await self.introduce()

    async def fetch(self, token: bytes, count: int) -> list[int]:
        """Receive the file descriptors for a token; the caller closes them. Raises the errors of `fetch` below."""
        if self.path is None:
            raise RegionsNotAllowedError("shared memory is for clients on the unix socket")
        descriptors: list[int] = await self._connection.run(fetch, self.path, token, count)
        return descriptors


def fetch(path: str, token: bytes, count: int) -> list[int]:
    """Receive the `count` file descriptors for a token. The caller closes them.

    Raises RegionsNotAllowedError if the daemon refuses to pass them to this process, ResourceExhaustedError if one of
    the two has no descriptor left, ConnectionLostError if it cannot be reached.
    """
    with _presented(path, token) as connection:
        answer, descriptors = _receive(connection, count)
    if len(descriptors) != count:
        for descriptor in descriptors:
            os.close(descriptor)
        raise _refused(answer)
    return descriptors


def introduce(path: str, session_token: bytes) -> bytes:
    """Prove to the daemon that a session belongs to this user. Returns a token that proves it in one call. Raises the
    errors of `fetch`."""
    with _presented(path, session_token) as connection:
        token = connection.recv(TOKEN_BYTES)
    if len(token) != TOKEN_BYTES:
        raise _refused(token)
    return token


@contextlib.contextmanager
def _presented(path: str, token: bytes) -> Iterator[socket.socket]:
    """Connect to the socket and send the token."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_TIMEOUT_S)
            connection.connect(path)
            with contextlib.suppress(BrokenPipeError):  # a daemon that refuses may not read, but may send the reason
                connection.sendall(token)
            yield connection
    except ConnectionResetError:
        raise _refused() from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise ResourceExhaustedError("this process has no file descriptor left") from None
        raise ConnectionLostError(f"{path}: {error.strerror or error}") from None


def _refused(answer: bytes = b"") -> KVServiceError:
    if answer == EXHAUSTED:
        return ResourceExhaustedError("the daemon has no file descriptor left")
    return RegionsNotAllowedError(
        f"the daemon hands nothing over to user {os.geteuid()} (allow_client_shm, trusted_uids), or not for this token,"
        " or nothing for writing to a process in another PID namespace"
    )


def _receive(connection: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """Receive a byte and descriptors. Unlike socket.recv_fds, this sets close-on-exec on them. Raises
    ResourceExhaustedError if this process has no room for them."""
    numbers = array.array("i")
    room = socket.CMSG_LEN(count * numbers.itemsize)
    answer, messages, flags, _ = connection.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
    if flags & socket.MSG_CTRUNC:
        for descriptor in numbers:
            os.close(descriptor)
        raise ResourceExhaustedError("this process has no file descriptor left")
    return answer, numbers.tolist()


# ---- regions


class SharedRegion(ABC):
    """`num_bytes` of memory that is shared with the daemon. `create_region` and `open_region` of a session return it.

    Arrays and torch tensors over it (`array`, and views of those) can be passed wherever a step takes tensors, and as
    `out` and `lse_out`. After a call without an answer (CallTimeoutError, ConnectionLostError, cancellation) the daemon
    may read and write its tensors at any later time, so other calls need other memory. The memory is freed when the
    session has unregistered it and the last array over it is gone.
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


class HostRegion(SharedRegion):
    """See SharedRegion. The memory is host memory and its arrays are NumPy arrays."""

    def __init__(self, name: str, descriptor: int, num_bytes: int, number: int | None = None, offset: int = 0) -> None:
        """Map the memory. The caller still owns the descriptor. Raises OSError."""
        self._map = mmap.mmap(descriptor, offset + num_bytes)
        self._begin = offset
        self._file = _file_of(descriptor)
        super().__init__(name, num_bytes, np.frombuffer(self._map, np.uint8).ctypes.data + offset, number)

    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Array:
        """See SharedRegion. `dtype` may also be any dtype of NumPy."""
        kind = np.dtype(TENSOR_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype)
        try:
            if offset < 0:
                raise ValueError("the offset is negative")
            return np.ndarray(shape, kind, self._map, self._begin + offset)
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"does not fit into {self.num_bytes} bytes: {error}", field="shape") from None

    def make_private(self) -> None:
        """Replace the memory by a private view of itself: what this process writes from now on is not shared, so the
        daemon goes on seeing the bytes of now. Arrays over the memory keep their addresses and contents. Other threads
        may use them meanwhile. Raises OSError."""
        descriptor = next((number for number in _descriptors() if _file_of(number) == self._file), -1)
        start, length = self.address - self._begin, len(self._map)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        placed = _mmap(start, length, access, mmap.MAP_PRIVATE | _MAP_FIXED, descriptor, 0)
        if placed != start:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_MAP_FIXED = 0x10
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def _file_of(descriptor: int) -> tuple[int, int] | None:
    """Return what identifies the file of a descriptor, None if another thread has closed it."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _descriptors() -> list[int]:
    """Return the open descriptors. A mapping of the mmap module has one of its file."""
    return [int(name) for name in os.listdir("/proc/self/fd")]


class GpuRegion(SharedRegion):
    """See SharedRegion. The memory is on a GPU and its arrays are torch tensors. A call may be made while kernels that
    write to them still run."""

    def __init__(self, name: str, num_bytes: int, device: int) -> None:
        """Allocate the memory. Raises ResourceExhaustedError, InvalidArgumentError naming `device`,
        FailedPreconditionError."""
        native = extension()
        if not 0 <= device < native.device_count():
            raise InvalidArgumentError(f"is {device}, there are {native.device_count()}", field="device")
        try:
            allocation = native.IpcAllocation(device, num_bytes)
        except native.CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise ResourceExhaustedError(f"the GPU has no {num_bytes} bytes left: {error}") from None
        super().__init__(name, num_bytes, allocation.pointer, None)
        self.handle: bytes = allocation.handle
        self._bytes = as_bytes(allocation, num_bytes, device)

    def array(self, shape: int | tuple[int, ...], dtype: Any = "float32", offset: int = 0) -> Tensor:
        try:
            if offset < 0:
                raise ValueError("the offset is negative")
            return view(self._bytes, (shape,) if isinstance(shape, int) else tuple(shape), dtype, offset)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"does not fit into {self.num_bytes} bytes: {error}", field="shape") from None


class RegionRange(NamedTuple):
    """The location of an array in a region, in bytes."""

    region: SharedRegion
    offset: int
    num_bytes: int

    def message(self) -> tensor_pb2.SharedMemoryPlace:
        return tensor_pb2.SharedMemoryPlace(region=self.region.name, offset=self.offset, byte_size=self.num_bytes)


# ---- the regions of a session


SHM_DIRECTORY = "/dev/shm"


class RegionTable:
    """The regions of a session. `version` is incremented whenever the set of regions changes."""

    def __init__(self, connection: SessionConnection, fds: FdPassing, cut: CutCalls) -> None:
        self._connection, self._fds, self._cut = connection, fds, cut
        self.known: list[SharedRegion] = []
        """The regions of the session. Only this table changes the list."""
        # The names of regions that are not used any more but that the daemon may still have.
        self._dropped: set[str] = set()
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
        for name in list(self._dropped):
            await self._unregister(name, deadline)
            self._dropped.discard(name)
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
            regions_pb2.CreateRegionRequest,
            request_id=self._connection.next_request_id(),
            name=name,
            byte_size=num_bytes,
        )
        with self._dropped_on_error(name):
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
            regions_pb2.RegisterCudaRegionRequest,
            request_id=self._connection.next_request_id(),
            name=region.name,
            raw_handle=region.handle,
            device_id=device,
            byte_size=num_bytes,
        )
        with self._dropped_on_error(region.name):
            response = await self._connection.call_until(deadline, "register_cuda_region", request)
        region.number = response.number
        return region

    async def open(self, key: str, num_bytes: int, offset: int = 0, *, timeout_s: float | None = None) -> HostRegion:
        """See SessionCore.open_region."""
        num_bytes, offset = whole(num_bytes, "num_bytes"), whole(offset, "offset")
        return await self._connection.with_one_process(lambda: self._open(key, num_bytes, offset, timeout_s))

    async def _open(self, key: str, num_bytes: int, offset: int, timeout_s: float | None) -> HostRegion:
        name = _new_name()
        request = build(
            regions_pb2.RegisterRegionRequest,
            request_id=self._connection.next_request_id(),
            name=name,
            key=key,
            offset=offset,
            byte_size=num_bytes,
            handover_token=await self._fds.introduce(),
        )
        with self._dropped_on_error(name):
            await self._connection.call("register_region", request, timeout_s)
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
        if region is not None and not isinstance(region, SharedRegion):
            raise InvalidArgumentError(f"is {type(region).__name__}, not a region", field="region")
        deadline = self._connection.deadline(timeout_s)
        self._remove(region)
        await self._unregister("" if region is None else region.name, deadline)

    def drop(self, region: SharedRegion) -> None:
        """Unregister a region without waiting for the daemon, which may still execute calls that use it. It keeps the
        memory until they are done."""
        if self.has(region):
            self._remove(region)
            self._drop(region.name)

    @contextlib.contextmanager
    def _dropped_on_error(self, name: str) -> Iterator[None]:
        """Drop a region that the daemon may have made for an operation that fails or is interrupted."""
        try:
            yield
        except BaseException:
            self._drop(name)
            raise

    def _drop(self, name: str) -> None:
        """Ask the daemon to unregister a region, if the connection is broken when it is back. `create_until` waits for
        that."""
        self._dropped.add(name)
        send = self._connection.post if self._connection.connected else self._cut.add
        send("unregister_region", self._unregistering(name))

    async def _unregister(self, name: str, deadline: float | None) -> None:
        await self._connection.call_until(deadline, "unregister_region", self._unregistering(name))

    def _unregistering(self, name: str) -> regions_pb2.UnregisterRegionRequest:
        return build(regions_pb2.UnregisterRegionRequest, request_id=self._connection.next_request_id(), name=name)

    async def listed(self, *, timeout_s: float | None = None) -> list[RegionInfo]:
        """See SessionCore.regions."""
        response = await self._connection.call("list_regions", build(regions_pb2.ListRegionsRequest), timeout_s)
        return [
            RegionInfo(
                one.name, one.key, one.offset, one.byte_size, one.device_id if one.HasField("device_id") else None
            )
            for one in response.regions
        ]

    def _add(self, region: SharedRegion) -> None:
        self.known.append(region)
        self.version += 1

    def give_up(self, region: HostRegion) -> None:
        """Remove a region here, and make its memory private: a call that was given up may still be executed, and must
        find the bytes that the memory has now."""
        self._remove(region)
        region.make_private()

    def _remove(self, region: SharedRegion | None) -> None:
        """Remove a region, or all, so that no further call uses it."""
        self.known = [] if region is None else [one for one in self.known if one is not region]
        self.version += 1

    def forget(self) -> None:
        """Remove all regions here. The daemon has already removed them, as it does when the session has had no stream
        for its grace period, or is another process now."""
        self._remove(None)
        self._dropped.clear()

    def numbered(self) -> list[SharedRegion]:
        """Return the regions that lanes support."""
        return [region for region in self.known if region.number is not None]

    def has(self, region: SharedRegion) -> bool:
        return any(one is region for one in self.known)

    def find(self, tensor: Tensor) -> RegionRange | None:
        """Return the location of a tensor in the session's regions, or None if it is in none."""
        for region in self.known:
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


# ---- staging


ALIGNMENT = 256


class Staging:
    """A staging region. One call uses it at a time. It grows to the size of the largest call. `device` as in
    `create_region`."""

    def __init__(self, regions: RegionTable, device: int | None = None) -> None:
        self._regions = regions
        self._device = device
        self._used = 0
        self.region: SharedRegion | None = None
        """The region, which `reserve` and `drop` replace."""

    async def reserve(self, num_bytes: int, deadline: float | None) -> None:
        """Start a call that stages `num_bytes` in total, including `ALIGNMENT` bytes of padding for each tensor. The
        daemon is done with the previous call, or `drop` was called."""
        self._used = 0
        region = self.region
        if region is None or region.num_bytes < num_bytes or not self._regions.has(region):
            self.drop()
            size = max(1 << 20, 1 << (num_bytes - 1).bit_length())
            self.region = await self._regions.create_until(deadline, size, self._device)

    def drop(self) -> None:
        """Do not use the region again. The daemon may still execute a call whose answer did not come, with the bytes
        that it then finds in the region."""
        if self.region is not None:
            self._regions.drop(self.region)
            self.region = None

    def place(self, shape: tuple[int, ...], dtype: str) -> tuple[Tensor, RegionRange]:
        """Reserve room for an array. Returns the array and its place."""
        assert self.region is not None, "room was reserved"
        array = self.region.array(shape, dtype, self._used)
        place = RegionRange(self.region, self._used, array.nbytes)
        self._used += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return array, place

    def put(self, tensor: Tensor) -> tuple[Tensor, RegionRange]:
        """Copy a tensor to the region. Returns the copy and its place."""
        copy, place = self.place(tuple(tensor.shape), tensors.dtype_name(tensor))
        tensors.copy(copy, tensor)
        return copy, place
