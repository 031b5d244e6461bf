"""Memory that the daemon, on another host, reads and writes with Mooncake's Transfer Engine.

The engine of a region is a process of its own, which maps this memory and nothing else. It listens for the daemon's
engine. Whoever can connect to it could write to the memory, so every byte that was transferred is checked: both ends
compare checksums, which travel in messages. A region that is given up loses its engine at once, so nobody writes to its
memory later.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Final

from kvservice.client.connection import SessionConnection
from kvservice.client.cut_calls import CutCalls
from kvservice.client.regions import FdPassing, HostRegion, RegionTable
from kvservice.client.values import PoolInfo
from kvservice.errors import (
    DuplicateRegionError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    NotFoundError,
    ResourceExhaustedError,
    TransferFailedError,
)
from kvservice.transfer import Endpoint, TransferProcess, is_installed
from kvservice.v1 import transfer_pb2

logger = logging.getLogger(__name__)

# Size of the region through which bytes travel that lie elsewhere, unless two blocks are larger.
STAGING_BYTES: Final = 64 << 20
# The daemon carries blocks in slots: one is copied while others are transferred. Small ones stay in caches. All slots
# together have room for K and V of a call.
NUM_SLOTS: Final = 3
SLOT_BYTES: Final = 4 << 20
# Smaller calls are as fast in messages.
LEAST_BYTES: Final = 1 << 20
# How long the daemon's engine may take to start, in seconds.
OPEN_S: Final = 20.0
# The pause before another attempt after a failure, in seconds. It doubles with each failure.
RETRY_S, MAX_RETRY_S = 5.0, 300.0
# The daemon's answers if the region is gone, does not work, or cannot be made.
REFUSED: Final = (
    TransferFailedError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    DuplicateRegionError,
    ResourceExhaustedError,
)


class RemoteRegion(HostRegion):
    """See SharedRegion. What lies in it travels without a copy here. `is_open` is whether its engine runs."""

    def __init__(self, connection: SessionConnection, descriptor: int, num_bytes: int) -> None:
        """Map the memory. The caller still owns the descriptor. Raises OSError."""
        super().__init__(f"remote-{os.getpid()}-{secrets.token_hex(8)}", descriptor, num_bytes)
        self._connection = connection
        self._process: TransferProcess | None = None

    @staticmethod
    async def open(
        connection: SessionConnection, daemon: str, protocol: str, num_bytes: int, block_bytes: int
    ) -> RemoteRegion:
        """Make memory, which an engine at the address `daemon` reads and writes, for blocks of this size; 0: for
        tensors. Raises TransferFailedError, ResourceExhaustedError, and the errors of calls."""
        descriptor = os.memfd_create("kvservice-transfer", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            region = RemoteRegion(connection, descriptor, num_bytes)
            try:
                await region._open(descriptor, daemon, protocol, block_bytes)
            except BaseException:
                region.close()
                raise
            return region
        except OSError as error:
            raise ResourceExhaustedError(f"{num_bytes} bytes cannot be mapped: {error.strerror}") from None
        finally:
            os.close(descriptor)

    async def _open(self, descriptor: int, daemon: str, protocol: str, block_bytes: int) -> None:
        process = await self._connection.run(_start, descriptor, self.num_bytes, daemon, protocol)
        self._process = process
        request = transfer_pb2.CreateRemoteRegionRequest(
            name=self.name,
            byte_size=NUM_SLOTS * max(block_bytes, SLOT_BYTES),
            remote_bytes=self.num_bytes,
            ports=[int(segment.rpartition(":")[2]) for segment in process.segments],
            address=process.address,
        )
        await self._connection.call("create_remote_region", request, OPEN_S)

    @property
    def is_open(self) -> bool:
        return self._process is not None

    def close(self) -> None:
        """Kill the engine, and ask the daemon to remove the region, without waiting. The memory stays."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._connection.post("remove_remote_region", transfer_pb2.RemoveRemoteRegionRequest(name=self.name))


class RemoteRegions:
    """The remote regions of a session: one for staging, and those of the caller. One call uses the staging region at a
    time, holding `lock`.

    `allowed` is whether there can be any. After a failure, calls use messages until another attempt to open the staging
    region, in the background, has succeeded. `num_failures` counts failures.
    """

    def __init__(
        self,
        connection: SessionConnection,
        lock: AbstractAsyncContextManager[object],
        protocol: str,
        daemon: str,
        block_bytes: int,
    ) -> None:
        """`protocol` and `daemon` are PoolInfo.transfer_protocol and transfer_address; `protocol` is empty if this
        session must not use them. `block_bytes` is 0 for a session without blocks of the store."""
        self._connection, self._protocol, self._daemon = connection, protocol, daemon
        self._block_bytes = block_bytes
        self.lock, self.run = lock, connection.run
        self.allowed = bool(protocol) and is_installed()
        self.num_failures = 0
        self._staging: RemoteRegion | None = None
        self._regions: list[RemoteRegion] = []
        self._retry_at = 0.0
        self._opening = False
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._staging is not None

    def part_bytes(self, info: PoolInfo) -> int:
        """Return the size of the parts of calls for sequences: what fits into a message, and through half of the
        region."""
        through = min(STAGING_BYTES // 2, NUM_SLOTS * SLOT_BYTES)
        return min(info.max_message_bytes, through) if self.allowed else info.max_message_bytes

    def is_worth_it(self, num_bytes: int) -> bool:
        """Return whether a call with so many bytes should be transferred."""
        return self.allowed and num_bytes >= LEAST_BYTES

    @property
    def regions(self) -> list[RemoteRegion]:
        """The regions of the caller whose engines run."""
        return [region for region in self._regions if region.is_open]

    async def create(self, num_bytes: int) -> RemoteRegion:
        """Create a region for the caller. Raises the errors of RemoteRegion.open."""
        region = await self._open(num_bytes)
        self._regions.append(region)
        return region

    async def _open(self, num_bytes: int) -> RemoteRegion:
        return await RemoteRegion.open(self._connection, self._daemon, self._protocol, num_bytes, self._block_bytes)

    async def open(self) -> None:
        """Open the staging region. Raises the errors of RemoteRegion.open."""
        region = await self._open(max(2 * self._block_bytes, STAGING_BYTES))
        if self._closed:
            region.close()
        else:
            self._staging = region

    async def try_open(self) -> None:
        """Open the staging region, or note the failure. Raises the errors of calls that the daemon has not answered."""
        try:
            await self.open()
        except REFUSED as error:
            if not self._closed:
                self.fail(error)

    def staging(self) -> RemoteRegion | None:
        """Return the staging region. If it is not open, start to open it, unless that has just failed."""
        if not self.allowed or self._closed:
            return None
        now = self._connection.waiting.clock()
        if self._staging is None and not self._opening and now >= self._retry_at:
            self._opening = True
            self._connection.waiting.start(self._open_beside())
        return self._staging

    async def _open_beside(self) -> None:
        try:
            await self.try_open()
        except KVServiceError as error:
            if not self._closed:
                self.fail(error)
        finally:
            self._opening = False

    def fail(self, error: Exception, region: RemoteRegion | None = None) -> None:
        """Count a failure, and give the region up, if it is one of the caller's, otherwise the staging region."""
        self.num_failures += 1
        self.drop(region)
        pause_s = min(RETRY_S * 2 ** (self.num_failures - 1), MAX_RETRY_S)
        self._retry_at = self._connection.waiting.clock() + pause_s
        logger.warning("bytes travel in messages, which is slow, for at least %.0f s: %s", pause_s, error)

    def drop(self, region: RemoteRegion | None) -> None:
        """Give a region up: a call that was given up may still use it. None: the staging region."""
        region = region or self._staging
        if region is None:
            return
        region.close()
        if region is self._staging:
            self._staging = None
        else:
            self._regions = [one for one in self._regions if one is not region]

    def close(self) -> None:
        self._closed = True
        self.drop(None)
        for region in self.regions:
            self.drop(region)


def _start(descriptor: int, num_bytes: int, daemon: str, protocol: str) -> TransferProcess:
    """Start an engine that listens for the daemon's, at the address from which this host reaches the daemon."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((daemon, 9))  # sends nothing
        except OSError as error:
            raise TransferFailedError(f"{daemon} is out of reach: {error.strerror}") from None
        own = probe.getsockname()[0]
    return TransferProcess(descriptor, num_bytes, Endpoint(own, protocol, peer=daemon), shared=True)


@dataclass(frozen=True, slots=True)
class Context:
    """The connection of a session with what it shares: regions of this host and for another one, and the socket for
    file descriptors. `cut` has the calls that were cut short."""

    info: PoolInfo
    connection: SessionConnection
    fds: FdPassing
    regions: RegionTable
    remote: RemoteRegions
    cut: CutCalls

    @staticmethod
    def of(
        info: PoolInfo, connection: SessionConnection, fd_path: str | None, token: bytes, *, transfers: bool = False
    ) -> Context:
        """`fd_path` is the path of the daemon's fd-passing socket, None unless the client uses a unix socket. `token`
        is the session's. `transfers` is whether the session may use a Transfer Engine."""
        shares = info.allow_client_shm or info.share_pool != "off"
        fds = FdPassing(connection, fd_path if shares else None, token)
        protocol = info.transfer_protocol if transfers else ""
        remote = RemoteRegions(connection, connection.lock(), protocol, info.transfer_address, block_bytes=0)
        cut = connection.cut = CutCalls(connection)
        return Context(info, connection, fds, RegionTable(connection, fds, cut), remote, cut)
