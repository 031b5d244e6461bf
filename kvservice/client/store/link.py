"""A session that has opened a namespace of the store, with what it shares with the daemon."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from kvservice.client.connection import SessionConnection
from kvservice.client.fd_passing import FdPassing
from kvservice.client.region_memory import HostRegion
from kvservice.client.regions import RegionTable
from kvservice.client.remote import RemoteRegions
from kvservice.client.requests import build, whole
from kvservice.client.store.mapping import StoreMapper
from kvservice.client.store.memory import Geometry, MappedStore
from kvservice.client.store.pieces import Numbers, Pieces
from kvservice.client.store.staging import StoreStaging
from kvservice.client.store.values import StoreNamespace
from kvservice.client.store.writes import Writes
from kvservice.client.values import PoolInfo, from_message
from kvservice.client.waiting import Waiting
from kvservice.errors import (
    CallTimeoutError,
    InvalidArgumentError,
    KVServiceError,
    RegionsNotAllowedError,
    ResourceExhaustedError,
    StoreNotSharedError,
    TransferFailedError,
    TransferOffError,
)
from kvservice.v1 import pool_pb2, session_pb2, store_pb2

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
# Most threads that copy blocks for one call, unless the caller says otherwise.
COPY_THREADS = 4


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
        for name_of, value, allowed in (
            ("unreachable", unreachable, UNREACHABLE_IS),
            ("transport", transport, STORE_TRANSPORTS),
        ):
            if value not in allowed:
                raise InvalidArgumentError(f"is not one of {', '.join(allowed)}: {value!r}", field=name_of)
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
    return max(1, min(COPY_THREADS, (os.cpu_count() or 1) // 2))


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
    token: bytes
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
    regions = RegionTable(connection, fds)
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
