"""A session that has opened a namespace of the store, with what it shares with the daemon: the mapped memory of the
store, or a region through which blocks travel, or a Transfer Engine. Its limits split batches into requests."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from kvservice.client.connection import SessionConnection, Signal, Waiting
from kvservice.client.cut_calls import CutCalls
from kvservice.client.messages import OVERHEAD_BYTES, build, choice, wait_time, whole
from kvservice.client.regions import FdPassing, HostRegion, RegionTable, SharedRegion
from kvservice.client.remote import RemoteRegions
from kvservice.client.store.memory import Geometry, MappedStore
from kvservice.client.store.values import KEY_BYTES, Numbers, Pieces, StoreNamespace
from kvservice.client.values import PoolInfo, from_message
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    InvalidArgumentError,
    KVServiceError,
    MessageTooLargeError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    StoreNotSharedError,
    TransferFailedError,
    TransferOffError,
)
from kvservice.v1 import pool_pb2, session_pb2, store_pb2


class Writes:
    """Counts the copies of a link that write to the mapped memory: a context manager around each one. Threads share
    it."""

    def __init__(self, none_left: Signal) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._none_left = none_left
        self._none_left.set()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._none_left.clear()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._none_left.set()

    async def end(self, timeout_s: float) -> bool:
        """Wait for their end. Returns whether it came within the timeout."""
        return await self._none_left.wait(timeout_s)


logger = logging.getLogger(__name__)

# Size of the region, unless one block is larger.
STAGING_BYTES = 64 << 20


class StoreStaging:
    """A region of the session. One call uses it at a time, holding `lock`. `allowed` is whether the daemon gives the
    session regions at all."""

    def __init__(self, regions: RegionTable, lock: AbstractAsyncContextManager[object], allowed: bool) -> None:
        self.lock, self.allowed = lock, allowed
        self._regions = regions
        self._region: SharedRegion | None = None
        self._has_warned = False

    async def room(self, num_bytes: int, least_bytes: int, timeout_s: float | None) -> SharedRegion | None:
        """Return a region of `num_bytes`, at least of `least_bytes`, or None if the daemon has no memory for it now,
        gives this session none, or its fd-passing socket cannot be reached."""
        size = max(least_bytes, min(num_bytes, STAGING_BYTES))
        if self._region is not None and self._region.num_bytes < size:
            self.drop()
        while self._region is None:
            try:
                self._region = await self._regions.create(size, timeout_s=timeout_s)
            except RegionsNotAllowedError:
                self.allowed = False
                return None
            except ConnectionLostError as error:
                if not self._regions.connected:
                    raise
                self.allowed = False
                self._warn_once(error)
                return None
            except ResourceExhaustedError as error:
                if size == least_bytes:
                    self._warn_once(error)
                    return None
                size = max(least_bytes, size // 2)
        return self._region

    async def check(self, least_bytes: int, timeout_s: float | None) -> None:
        """Set `allowed`. Only the attempt to make a region shows whether the daemon gives this user any."""
        await self.room(least_bytes, least_bytes, timeout_s)
        self.drop()

    def _warn_once(self, error: KVServiceError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("blocks of the store travel in messages, which is slow: %s", error)

    def drop(self) -> None:
        """Do not use the region again. A call that was given up may still be executed, and use it."""
        if self._region is not None:
            self._regions.drop(self._region)
            self._region = None


class StoreMapper:
    """Maps the store in one session. `shared` is the daemon's share_store, `limit_s` the time limit of each call."""

    def __init__(
        self, connection: SessionConnection, fds: FdPassing, geometry: Geometry, shared: str, limit_s: float
    ) -> None:
        self._connection, self._fds, self._geometry = connection, fds, geometry
        self._shared, self._limit_s = shared, limit_s

    async def open(self, num_threads: int) -> MappedStore:
        """Map the store, for writing if the daemon allows it. Raises StoreNotSharedError if it is not mapped, and logs
        a warning if that is because file descriptors or memory have run out."""
        if self._fds.path is None:
            raise StoreNotSharedError("the store is shared with clients on the unix socket")
        if self._shared == "off":
            raise StoreNotSharedError("the daemon runs with --share-store off")
        try:
            await self._fds.introduce_once()
        except (ConnectionLostError, RegionsNotAllowedError, ResourceExhaustedError) as error:
            raise _not_mapped(error) from None
        if self._shared != "read":
            try:
                return await self._map(True, num_threads)
            except ResourceExhaustedError as error:
                logger.warning("the block store is not mapped for writing: %s", error)
            except StoreNotSharedError as error:
                if error.field != "writable":
                    raise
        try:
            return await self._map(False, num_threads)
        except ResourceExhaustedError as error:
            raise _not_mapped(error) from None

    async def _map(self, writable: bool, num_threads: int) -> MappedStore:
        """Raises StoreNotSharedError, and ResourceExhaustedError."""
        request = store_pb2.MapStoreRequest(request_id=self._connection.next_request_id(), writable=writable)
        response = await self._connection.call("store_map_store", request, self._limit_s)
        try:
            (descriptor,) = await self._fds.fetch(response.handover_token, 1)
        except (ConnectionLostError, RegionsNotAllowedError) as error:
            raise _not_mapped(error) from None
        try:
            return MappedStore.open(
                descriptor, response.num_bytes, self._geometry, writable, num_threads, growing=response.growing
            )
        except (OSError, ValueError) as error:
            raise ResourceExhaustedError(f"it cannot be mapped here: {error}") from None
        finally:
            os.close(descriptor)


def _not_mapped(error: Exception) -> StoreNotSharedError:
    """Warn unless the daemon does not trust the user of this process."""
    if not isinstance(error, RegionsNotAllowedError):
        logger.warning("the block store is not mapped, blocks take a slower way: %s", error)
    return StoreNotSharedError(str(error))


# ---- options


# Time limit of each call that opens a link, in seconds.
OPEN_S = 5.0
# How long the end of a link waits for copies into the mapped memory.
WRITES_S = 10.0
# In CloseRequest: the session is closed without the promise of its holder.
ANY_HOLDER = 0
STORE_TRANSPORTS = ("auto", "mapped", "region", "transfer", "inline")
GIB = 1 << 30
# Largest quota of a namespace, in GiB.
MAX_QUOTA_GIB = 1 << 20
UNREACHABLE_IS = ("miss", "raise")
# Most threads that copy blocks for one call, unless the caller says otherwise. One copies 6 to 8 GB/s where the link to
# a GPU takes 50.
COPY_THREADS = 16


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The arguments of KVClient.store, checked. `limit_s` is the time limit of a call in seconds; None: no limit."""

    namespace: store_pb2.StoreNamespace
    tenant: str
    name: str
    limit_s: float | None
    raises: bool
    transport: str
    copy_threads: int
    quota_bytes: int

    @staticmethod
    def of(
        namespace: StoreNamespace,
        tenant: str,
        name: str,
        limit_s: float | None,
        unreachable: str,
        transport: str,
        copy_threads: int | None,
        quota_gib: float,
    ) -> StoreOptions:
        """Raises InvalidArgumentError."""
        if not isinstance(namespace, StoreNamespace):
            raise InvalidArgumentError(f"is {type(namespace).__name__}, not a StoreNamespace", field="namespace")
        choice(unreachable, UNREACHABLE_IS, "unreachable")
        choice(transport, STORE_TRANSPORTS, "transport")
        threads = default_threads() if copy_threads is None else whole(copy_threads, "copy_threads")
        if threads < 1:
            raise InvalidArgumentError(f"{threads} is not above 0", field="copy_threads")
        build(session_pb2.OpenRequest, name=name, tenant=tenant)
        return StoreOptions(
            namespace.message(),
            tenant,
            name,
            limit_s,
            unreachable == "raise",
            transport,
            threads,
            _quota_bytes(quota_gib, namespace.block_bytes),
        )


def _quota_bytes(quota_gib: float, block_bytes: int) -> int:
    if not isinstance(quota_gib, (int, float)) or not 0 <= quota_gib <= MAX_QUOTA_GIB:
        raise InvalidArgumentError(f"{quota_gib!r} is not from 0 to {MAX_QUOTA_GIB}", field="quota_gib")
    num_bytes = int(quota_gib * GIB)
    if quota_gib and num_bytes < block_bytes:
        raise InvalidArgumentError(f"{num_bytes} bytes are less than a block", field="quota_gib")
    return num_bytes


def default_threads() -> int:
    """Half of the cores: an engine computes meanwhile."""
    return max(1, min(COPY_THREADS, len(os.sched_getaffinity(0)) // 2))


@dataclass(frozen=True, slots=True)
class Dialer:
    """The part of a client that its stores use: it waits for calls, and opens and closes sessions."""

    address: str
    waiting: Waiting
    get_info: Callable[[float], Awaitable[pool_pb2.GetInfoResponse]]
    open_session: Callable[[session_pb2.OpenRequest, float], Awaitable[session_pb2.OpenResponse]]
    connection: Callable[[bytes, Callable[[KVServiceError], None]], SessionConnection]
    close_session: Callable[[bytes, int], Awaitable[None]]
    fd_path: str | None


@dataclass(frozen=True, eq=False, slots=True)
class StoreLink:
    """A link to a namespace: an attached session that has opened it. `memory` is None unless the store is mapped.
    `reservations` are those of the caller that are neither committed nor aborted, `writes` the copies of this client
    into the memory. `unanswered` are the requests for leases and reservations whose callers did not wait for the
    answer."""

    info: PoolInfo
    connection: SessionConnection
    token: bytes = field(repr=False)
    namespace_id: int
    block_bytes: int
    regions: RegionTable
    staging: StoreStaging
    remote: RemoteRegions
    memory: MappedStore | None
    copy_threads: int
    writes: Writes
    reservations: set[int] = field(default_factory=set)
    unanswered: deque[tuple[str, Any]] = field(default_factory=deque)

    async def call(self, name: str, request: Any, timeout_s: float | None) -> Any:
        return await self.connection.call(name, request, timeout_s)

    async def hold(self, name: str, request: Any, timeout_s: float | None) -> Any:
        """Make a call that leases or reserves blocks. If the caller does not get the answer, because of its time limit
        or because it is cancelled, `settle` gives the blocks back."""
        try:
            return await self.call(name, request, timeout_s)
        except BaseException as error:
            if isinstance(error, CallTimeoutError) or not isinstance(error, KVServiceError):
                self.unanswered.append((name, request))
            raise

    async def settle(self) -> None:
        """Wait until the daemon answers, and give back what unanswered calls hold: a request that is sent again has the
        same answer. Raises the errors of calls."""
        await self.call("store_release", store_pb2.ReleaseRequest(), OPEN_S)
        while self.unanswered:
            name, request = self.unanswered[0]
            with contextlib.suppress(InvalidArgumentError, ResourceExhaustedError):  # it was refused before, too
                answer = await self.call(name, request, OPEN_S)
                if name == "store_acquire":
                    self.release([answer.lease_id])
                else:
                    self.abort(answer.reservation_id)
            self.unanswered.popleft()

    def release(self, lease_ids: list[int]) -> None:
        """End leases without waiting for the answer."""
        self.connection.post("store_release", store_pb2.ReleaseRequest(lease_ids=lease_ids))

    def abort(self, reservation_id: int) -> None:
        """End a reservation, if it is not committed, without waiting for the answer. Nobody writes there any more."""
        self.reservations.discard(reservation_id)
        self.connection.post("store_abort", store_pb2.AbortRequest(reservation_id=reservation_id))

    def next_request_id(self) -> int:
        return self.connection.next_request_id()

    def find(self, pieces: Pieces) -> tuple[HostRegion, Numbers] | None:
        """Return the session's region that has all the pieces, and their offsets; None if there is none."""
        for region in self.regions.numbered():
            offsets = pieces.offsets_in(region.address, region.num_bytes)
            if offsets is not None and isinstance(region, HostRegion):
                return region, offsets
        return None

    @property
    def transport(self) -> str:
        """The way that `get` takes now."""
        if self.memory is not None:
            return "mapped"
        if self.staging.allowed:
            return "region"
        return "transfer" if self.remote.is_open else "inline"

    async def close(self, dialer: Dialer, *, lost: bool = False) -> None:
        """Close the session, so that its leases and reservations end. Arrays over the mapped memory stay valid.

        The holder that closes a session promises that nobody writes to the room of its reservations, which the daemon
        uses again. Without that, the daemon keeps it while this process lives. The caller has promised nothing if the
        link is `lost`: it may be writing to its reservations now."""
        self.remote.close()
        is_done = await self.writes.end(WRITES_S) and not (lost and self.reservations)
        await self.connection.close()
        await dialer.close_session(self.token, self.connection.holder if is_done else ANY_HOLDER)


async def open_link(dialer: Dialer, options: StoreOptions, on_break: Callable[[KVServiceError], None]) -> StoreLink:
    """Open a session and the namespace in it, and map the store. `on_break` is called when the connection breaks."""
    limit_s = min(options.limit_s or OPEN_S, OPEN_S)
    info = from_message(PoolInfo, await dialer.get_info(limit_s))
    request = build(session_pb2.OpenRequest, name=options.name, tenant=options.tenant)
    token = (await dialer.open_session(request, limit_s)).session_token
    connection = dialer.connection(token, on_break)
    try:
        await connection.connect(limit_s)
        return await _open_namespace(dialer, options, info, connection, token, limit_s)
    except BaseException:
        await connection.close()
        await dialer.close_session(token, connection.holder)
        raise


async def _open_namespace(
    dialer: Dialer,
    options: StoreOptions,
    info: PoolInfo,
    connection: SessionConnection,
    token: bytes,
    limit_s: float,
) -> StoreLink:
    request = store_pb2.OpenNamespaceRequest(
        request_id=connection.next_request_id(), namespace=options.namespace, quota_bytes=options.quota_bytes
    )
    opened = await connection.call("store_open_namespace", request, limit_s)
    block_bytes = options.namespace.block_bytes
    geometry = Geometry(
        block_bytes,
        opened.slab_bytes,
        opened.first_block,
        opened.block_stride,
        opened.blocks_per_slab,
        opened.number,
        opened.has_tiers,
    )
    fds = FdPassing(connection, dialer.fd_path, token)
    regions = RegionTable(connection, fds, CutCalls(connection))
    memory = None
    if options.transport in ("auto", "mapped"):
        try:
            memory = await StoreMapper(connection, fds, geometry, info.share_store, limit_s).open(options.copy_threads)
        except StoreNotSharedError:
            if options.transport == "mapped":
                raise
    allowed = options.transport in ("auto", "region") and fds.path is not None and info.allow_client_shm
    staging = StoreStaging(regions, connection.lock(), allowed)
    if allowed and memory is None:
        await staging.check(block_bytes, limit_s)
    if options.transport == "region" and not staging.allowed:
        raise RegionsNotAllowedError("regions are for clients on the unix socket, with --allow-client-shm")
    remote = await _open_remote(options, info, connection, is_local=fds.path is not None)
    return StoreLink(
        info=info,
        connection=connection,
        token=token,
        namespace_id=opened.namespace_id,
        block_bytes=block_bytes,
        regions=regions,
        staging=staging,
        remote=remote,
        memory=memory,
        copy_threads=options.copy_threads,
        writes=Writes(dialer.waiting.signal()),
    )


async def _open_remote(
    options: StoreOptions, info: PoolInfo, connection: SessionConnection, *, is_local: bool
) -> RemoteRegions:
    """Open the staging region of a link over TCP. Raises TransferOffError and TransferFailedError if only that is
    wanted."""
    is_wanted = options.transport == "transfer" or (options.transport == "auto" and not is_local)
    protocol, daemon = info.transfer_protocol if is_wanted else "", info.transfer_address
    remote = RemoteRegions(connection, connection.lock(), protocol, daemon, options.namespace.block_bytes)
    if options.transport == "transfer":
        if not info.transfer_protocol:
            raise TransferOffError("the daemon has no Transfer Engine")
        if not remote.allowed:
            raise TransferFailedError("there is no Transfer Engine here: install kvservice[mooncake]")
        await remote.open()
    elif remote.allowed:
        await remote.try_open()
    return remote


# ---- requests


# Most bytes of blocks in one request. It bounds the time of a request, and how much is leased or reserved at a time.
REQUEST_BYTES = 256 << 20
# Most bytes of blocks in a message, unless one block is larger. Larger messages are slower: the memory of their copies
# goes back to the system, and the next ones are made in new memory.
MESSAGE_BYTES = 2 << 20
# Most messages of a call that wait for an answer, and most bytes of blocks in them, unless one message has more.
MESSAGES_IN_FLIGHT = 3
IN_FLIGHT_BYTES = 6 << 20
# Bytes of a piece of a block in a request: an offset.
OFFSET_BYTES = 8


def parts(count: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` of `count` things."""
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def keys_in_request(link: StoreLink) -> int:
    """Return how many keys a request may have."""
    return max(1, min(link.info.max_request_blocks, (link.info.max_message_bytes - OVERHEAD_BYTES) // KEY_BYTES))


def blocks_in_request(link: StoreLink, num_pieces: int = 1) -> int:
    """Return how many blocks a request may copy that has the offsets of this many pieces of each."""
    in_message = (link.info.max_message_bytes - OVERHEAD_BYTES) // (KEY_BYTES + OFFSET_BYTES * num_pieces)
    return max(1, min(link.info.max_request_blocks, REQUEST_BYTES // link.block_bytes, in_message))


def blocks_in_message(link: StoreLink) -> int:
    """Return how many blocks fit into a message. Raises MessageTooLargeError if not even one does."""
    most = (link.info.max_message_bytes - OVERHEAD_BYTES) // (KEY_BYTES + link.block_bytes)
    if most < 1:
        raise MessageTooLargeError(
            f"a block of {link.block_bytes} bytes, and its key, are more than a message may have, "
            f"{link.info.max_message_bytes} bytes: see the daemon's max_message_mib"
        )
    return min(most, link.info.max_request_blocks, max(1, MESSAGE_BYTES // link.block_bytes))


# The time limit that is sent when the time has passed: 0 would stand for no limit.
_OVER_S = 1e-6
# The part of a request's time limit that it may wait for blocks, so that its answer comes in time.
_PART = 0.5


class Patience:
    """The waiting time of one call of the store, which may take several requests."""

    def __init__(self, max_wait_s: float, timeout_s: float | None) -> None:
        """`max_wait_s` is 0 if the caller sets no limit, `timeout_s` is the caller's time limit of each request. Raises
        InvalidArgumentError naming max_wait_s."""
        self._until = time.monotonic() + max_wait_s if wait_time(max_wait_s, "max_wait_s") else math.inf
        self._timeout_s = timeout_s

    def left_s(self, link: StoreLink) -> float:
        """Return the `max_wait_s` of the next request."""
        limit_s = link.connection.limit_s(self._timeout_s)
        left_s = max(self._until - time.monotonic(), _OVER_S)
        if limit_s is not None:
            left_s = min(left_s, _PART * limit_s)
        return 0.0 if math.isinf(left_s) else left_s
