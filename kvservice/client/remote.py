"""Memory here and a region of the session in the daemon, between which Transfer Engines move bytes.

Two processes do that, one at each end, which map this memory and nothing else. Every byte that was transferred is
checked: both ends compare checksums, which travel in messages. So whatever else writes to the memory, and calls that
were given up and are executed later, cannot make wrong bytes count.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final

import numpy as np

from kvservice.client.connection import SessionConnection
from kvservice.errors import (
    DuplicateRegionError,
    FailedPreconditionError,
    KVServiceError,
    NotFoundError,
    ResourceExhaustedError,
    TransferFailedError,
)
from kvservice.transfer import Endpoint, Operation, Range, Ticket, TransferProcess, is_installed
from kvservice.v1 import transfer_pb2
from kvservice.wire.tensors import Array

logger = logging.getLogger(__name__)

# The memory is used in slots: one is transferred while this process and the daemon copy to and from the other. Small
# ones stay in caches, and cost more calls.
NUM_SLOTS: Final = 2
SLOT_BYTES: Final = 8 << 20
# Smaller calls are as fast in messages.
LEAST_BYTES: Final = 512 << 10
# An engine moves parts of a transfer over several connections.
PART_BYTES: Final = 4 << 20
# How long a slot may take, and how long the processes may take to start, in seconds.
TRANSFER_S: Final = 10.0
OPEN_S: Final = 20.0
# The pause before another attempt after a failure, in seconds. It doubles with each failure.
RETRY_S, MAX_RETRY_S = 5.0, 300.0
# What the daemon answers if the region is gone, or cannot be made.
REFUSED: Final = (
    TransferFailedError,
    FailedPreconditionError,
    NotFoundError,
    DuplicateRegionError,
    ResourceExhaustedError,
)


def region_bytes(block_bytes: int) -> int:
    """Return the size of a region for blocks of this size."""
    return NUM_SLOTS * max(block_bytes, SLOT_BYTES // block_bytes * block_bytes)


class RemoteRegion:
    """An open region. `address` is that of the memory here, `name` that of the region in the daemon. Offsets are the
    same in both."""

    def __init__(self, connection: SessionConnection, name: str, num_bytes: int, memory: mmap.mmap) -> None:
        self._connection, self._memory = connection, memory
        self.name, self.num_bytes = name, num_bytes
        self._bytes: Array = np.frombuffer(memory, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        self._process: TransferProcess | None = None
        self._segment, self._remote = "", 0

    @staticmethod
    async def open(connection: SessionConnection, protocol: str, num_bytes: int) -> RemoteRegion:
        """Raises TransferFailedError, ResourceExhaustedError, and the errors of calls."""
        descriptor = os.memfd_create("kvservice-transfer", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            memory = mmap.mmap(descriptor, num_bytes)
            region = RemoteRegion(connection, f"remote-{os.getpid()}-{secrets.token_hex(8)}", num_bytes, memory)
            try:
                await region._open(descriptor, protocol)
            except BaseException:
                region.close()
                raise
            return region
        except OSError as error:
            raise ResourceExhaustedError(f"{num_bytes} bytes cannot be mapped: {error.strerror}") from None
        finally:
            os.close(descriptor)

    async def _open(self, descriptor: int, protocol: str) -> None:
        request = transfer_pb2.CreateRemoteRegionRequest(name=self.name, byte_size=self.num_bytes)
        response = await self._connection.call("create_remote_region", request, OPEN_S)
        self._segment, self._remote = response.segment, response.address
        endpoint = _endpoint(response.segment.rpartition(":")[0], protocol)
        shared = protocol != "tcp"  # other transports need registered memory at both ends
        self._process = await self._connection.run(_start, descriptor, self.num_bytes, endpoint, shared)

    def array(self, offset: int, num_bytes: int) -> Array:
        """Return a range of the memory, uint8."""
        return self._bytes[offset : offset + num_bytes]

    def start(self, operation: Operation, spans: Sequence[tuple[int, int]]) -> Ticket:
        """Start to copy spans (offset, size) to the daemon (write) or from it (read). Raises TransferFailedError."""
        assert self._process is not None, "it is open"
        ranges = [
            Range(begin, begin, min(PART_BYTES, offset + size - begin))
            for offset, size in spans
            for begin in range(offset, offset + size, PART_BYTES)
        ]
        return self._process.start(operation, self._segment, self._remote, ranges)

    async def wait(self, ticket: Ticket, timeout_s: float | None) -> None:
        """Wait for the end of a transfer. Raises TransferFailedError."""
        assert self._process is not None, "it is open"
        limit_s = min(timeout_s or TRANSFER_S, TRANSFER_S)
        await self._connection.run(self._process.wait, ticket, limit_s)

    def close(self) -> None:
        """Kill the process, and ask the daemon to remove the region, without waiting."""
        if self._process is not None:
            self._process.kill()
            self._process = None
        self._connection.post("remove_remote_region", transfer_pb2.RemoveRemoteRegionRequest(name=self.name))


class RemoteStaging:
    """The remote region of a session, if there is one now. One call uses it at a time, holding `lock`.

    `allowed` is whether it is tried at all. After a failure, calls use messages until another attempt, in the
    background, has succeeded. `num_failures` counts failures.
    """

    def __init__(self, connection: SessionConnection, lock: AbstractAsyncContextManager[object], protocol: str) -> None:
        """`protocol` is PoolInfo.transfer_protocol, or empty if this session must not use it."""
        self._connection, self._protocol = connection, protocol
        self.lock = lock
        self.allowed = bool(protocol) and is_installed()
        self.num_failures = 0
        self._region: RemoteRegion | None = None
        self._retry_at = 0.0
        self._opening = False
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._region is not None

    async def open(self, num_bytes: int) -> RemoteRegion:
        """Open a region of this size. Raises the errors of RemoteRegion.open."""
        region = await RemoteRegion.open(self._connection, self._protocol, num_bytes)
        if self._closed:
            region.close()
        else:
            self._region = region
        return region

    async def try_open(self, num_bytes: int) -> None:
        """Open a region, or note the failure. Raises the errors of calls that the daemon has not answered."""
        try:
            await self.open(num_bytes)
        except REFUSED as error:
            self.fail(error)

    def room(self, num_bytes: int) -> RemoteRegion | None:
        """Return the region if it has this size. If it is not open, start to open it, unless it has just failed."""
        if not self.allowed or self._closed:
            return None
        if self._region is not None and self._region.num_bytes < num_bytes:
            self.drop()
        now = self._connection.waiting.clock()
        if self._region is None and not self._opening and now >= self._retry_at:
            self._opening = True
            self._connection.waiting.start(self._open_beside(num_bytes))
        return self._region

    async def _open_beside(self, num_bytes: int) -> None:
        try:
            await self.try_open(num_bytes)
        except KVServiceError as error:
            self.fail(error)
        finally:
            self._opening = False

    def fail(self, error: Exception) -> None:
        """Count a failure, and give the region up."""
        self.num_failures += 1
        self.drop()
        pause_s = min(RETRY_S * 2 ** (self.num_failures - 1), MAX_RETRY_S)
        self._retry_at = self._connection.waiting.clock() + pause_s
        logger.warning("blocks travel in messages, which is slow, for at least %.0f s: %s", pause_s, error)

    def drop(self) -> None:
        """Give the region up: calls or transfers that were given up may still use it."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def close(self) -> None:
        self._closed = True
        self.drop()


def _start(descriptor: int, num_bytes: int, endpoint: Endpoint, shared: bool) -> TransferProcess:
    return TransferProcess(descriptor, num_bytes, endpoint, shared=shared)


def _endpoint(daemon: str, protocol: str) -> Endpoint:
    """Return where the engine of this process listens. Over TCP nobody connects to it, otherwise only the daemon."""
    if protocol == "tcp":
        return Endpoint("127.0.0.1", calls=True)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((daemon, 9))
        return Endpoint(probe.getsockname()[0], protocol, peer=daemon)
