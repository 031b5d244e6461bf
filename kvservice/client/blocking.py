"""The blocking client API. It runs the coroutines of `session.py`, `step.py`, `scheduler.py` and `store/core.py` over a
blocking stream, so they never suspend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable
from typing import Any

import grpc

from kvservice.auth.client import TLSOption
from kvservice.client import channel
from kvservice.client.client_core import ClientCore
from kvservice.client.connection import RECONNECT_WAIT_S, SessionStream, first_answer
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.messages import build, open_stub, wait_time
from kvservice.client.scheduler import MakeStep, OpenedScheduler, SchedulerCore
from kvservice.client.session import SessionCore
from kvservice.client.step import OpenStep, SessionCalls, StepCore
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.core import Held, LeaseCore, ReservationCore, StoreCore
from kvservice.client.store.link import Dialer, StoreLink, StoreOptions
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.values import Flags, Numbers, Statuses, StoreNamespace
from kvservice.client.threads import BlockingStream, ThreadWaiting, blocking, blocking_core, finish
from kvservice.client.values import PoolInfo, PoolStats, Sequence, from_message
from kvservice.errors import KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2
from kvservice.wire.channels import open_channel
from kvservice.wire.tensors import Array


class StoreLease:
    """See LeaseCore. A context manager."""

    def __init__(self, core: LeaseCore) -> None:
        self._core = core
        self.found = core.found

    @property
    def views(self) -> list[Array | None]:
        return self._core.views

    @property
    def addresses(self) -> Numbers:
        return self._core.addresses

    @property
    def memory(self) -> MappedStore:
        return self._core.memory

    @property
    def alive(self) -> bool:
        return self._core.alive

    @property
    def offsets(self) -> bytes:
        return self._core.offsets

    @property
    def versions(self) -> bytes:
        return self._core.versions

    def check(self) -> Flags:
        """See LeaseCore.check."""
        return self._core.check()

    renew = blocking_core(LeaseCore.renew)
    release = blocking_core(LeaseCore.release)

    def __enter__(self) -> StoreLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class StoreReservation:
    """See ReservationCore. A context manager."""

    def __init__(self, core: ReservationCore) -> None:
        self._core = core
        self.statuses = core.statuses
        self.reserved = core.reserved

    @property
    def views(self) -> list[Array | None]:
        return self._core.views

    @property
    def addresses(self) -> Numbers:
        return self._core.addresses

    @property
    def memory(self) -> MappedStore:
        return self._core.memory

    commit = blocking_core(ReservationCore.commit)
    abort = blocking_core(ReservationCore.abort)

    def __enter__(self) -> StoreReservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


BlockingCore = StoreCore[StoreLease, StoreReservation]


class Store:
    """See StoreCore. A context manager; leaving it closes the store's session."""

    def __init__(self, core: BlockingCore) -> None:
        self._core = core
        self.namespace = core.namespace

    @property
    def reachable(self) -> bool:
        return self._core.reachable

    @property
    def transport(self) -> str:
        return self._core.transport

    @property
    def num_transfer_failures(self) -> int:
        return self._core.num_transfer_failures

    @property
    def memory(self) -> MappedStore | None:
        return self._core.memory

    lookup = blocking_core(BlockingCore.lookup)
    get = blocking_core(BlockingCore.get)
    put = blocking_core(BlockingCore.put)
    acquire = blocking_core(BlockingCore.acquire)
    reserve = blocking_core(BlockingCore.reserve)
    touch = blocking_core(BlockingCore.touch)
    remove = blocking_core(BlockingCore.remove)
    clear = blocking_core(BlockingCore.clear)
    create_region = blocking_core(BlockingCore.create_region)
    unregister_region = blocking_core(BlockingCore.unregister_region)
    close = blocking_core(BlockingCore.close)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_lease(access: StoreAccess, link: StoreLink | None, held: list[Held], found: Flags) -> StoreLease:
    return StoreLease(LeaseCore(access, link, held, found))


def make_reservation(
    access: StoreAccess, link: StoreLink | None, held: list[Held], statuses: Statuses
) -> StoreReservation:
    return StoreReservation(ReservationCore(access, link, held, statuses))


# ---- sessions


class Step(OpenStep):
    """See StepCore."""

    decode = blocking(StepCore.decode)
    extend = blocking(StepCore.extend)
    attend = blocking(StepCore.attend)
    write = blocking(StepCore.write)


_SchedulerCore = SchedulerCore[Step]


class KVScheduler:
    """See SchedulerCore."""

    def __init__(self, core: SchedulerCore[Step]) -> None:
        self._core = core
        self.settings = core.settings

    add = blocking_core(_SchedulerCore.add)
    abort = blocking_core(_SchedulerCore.abort)
    schedule = blocking_core(_SchedulerCore.schedule)
    describe = blocking_core(_SchedulerCore.describe)


_Core = SessionCore[Step, KVScheduler]


class Session:
    """See SessionCore. A session is a context manager: leaving it closes the session and frees everything it owns."""

    def __init__(self, core: SessionCore[Step, KVScheduler]) -> None:
        self._core = core
        self.info = core.info
        self.token = core.token
        self.session_id = core.session_id

    @property
    def transport(self) -> str:
        """See SessionCore.transport."""
        return self._core.transport

    @property
    def num_transfer_failures(self) -> int:
        """See SessionCore.num_transfer_failures."""
        return self._core.num_transfer_failures

    @property
    def num_restarts(self) -> int:
        """See SessionCore.num_restarts."""
        return self._core.num_restarts

    def next_request_id(self) -> int:
        """See SessionCore.next_request_id."""
        return self._core.next_request_id()

    allocate = blocking_core(_Core.allocate)
    allocate_batch = blocking_core(_Core.allocate_batch)
    can_allocate = blocking_core(_Core.can_allocate)
    can_append = blocking_core(_Core.can_append)
    can_swap_out = blocking_core(_Core.can_swap_out)
    can_swap_in = blocking_core(_Core.can_swap_in)
    append = blocking_core(_Core.append)
    open_step = blocking_core(_Core.open_step)
    open_ahead = blocking_core(_Core.open_ahead)
    commit_ahead = blocking_core(_Core.commit_ahead)
    fork = blocking_core(_Core.fork)
    fork_batch = blocking_core(_Core.fork_batch)
    truncate = blocking_core(_Core.truncate)
    swap_out = blocking_core(_Core.swap_out)
    swap_in = blocking_core(_Core.swap_in)
    free = blocking_core(_Core.free)
    describe = blocking_core(_Core.describe)
    lost_sequences = blocking_core(_Core.lost_sequences)
    read = blocking_core(_Core.read)
    open_scheduler = blocking_core(_Core.open_scheduler)
    match_prefix = blocking_core(_Core.match_prefix)
    pin = blocking_core(_Core.pin)
    unpin = blocking_core(_Core.unpin)
    reset_prefix_cache = blocking_core(_Core.reset_prefix_cache)
    common_prefix = blocking_core(_Core.common_prefix)
    create_region = blocking_core(_Core.create_region)
    open_region = blocking_core(_Core.open_region)
    unregister_region = blocking_core(_Core.unregister_region)
    regions = blocking_core(_Core.regions)
    map_pool = blocking_core(_Core.map_pool)
    commit = blocking_core(_Core.commit)
    detach = blocking_core(_Core.detach)
    close = blocking_core(_Core.close)

    def free_later(self, sequences: Iterable[Sequence]) -> None:
        """See SessionCore.free_later."""
        self._core.free_later(sequences)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class KVClient:
    """A connection to a daemon at `address`: unix:///path/of.sock, /path/of.sock or host:port. Clients and sessions are
    thread-safe. In a process that is forked from theirs, their calls raise FailedPreconditionError, and closing them
    does nothing.

    `transport` selects how sessions pass tensors to the daemon. "inline" sends them in messages. "region" places them
    in shared memory. "lane" uses shared-memory rings that a thread of the daemon serves. "mapped" passes none: the
    client runs the kernels on the mapped pool itself. "transfer", for host:port, has K/V that are written and read
    carried by Mooncake's Transfer Engine, and other tensors in messages. "auto" selects the fastest that the daemon
    allows, in the order lane, mapped (only if writable), region, transfer, inline. If the pool is on a GPU, mapped
    serves tensors on that GPU and a lane serves all others; "auto" then tries mapped first if torch is loaded.

    `timeout_s` is the default time limit of calls of the client and its sessions, in seconds; None: calls wait as long
    as the daemon lives. A call without an answer by its limit raises CallTimeoutError; it does not affect the session's
    connection or other calls on it. If a session's connection breaks, the client reconnects in the background. Calls
    wait, until their limits, until `reconnect_wait_s` seconds have passed in all; after that they raise DaemonAwayError
    immediately until the connection is restored.

    `tls`, for host:port: True, the path of a CA certificate, or a TLSConfig. `token`: the token by which the daemon
    identifies the client, or the path (a pathlib.Path) of a file with the token, which is read again for each call.

    The daemon may still be starting, so the client retries for `connect_timeout_s` seconds. Raises ConnectionLostError
    when they have passed, and TLSHandshakeError or UnauthenticatedError immediately. None: it does not wait for the
    daemon, and raises nothing; stores can be opened before the daemon answers, sessions cannot.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TLSOption = None,
        token: str | os.PathLike[str] = "",
        connect_timeout_s: float | None = 10.0,
        timeout_s: float | None = None,
        reconnect_wait_s: float = RECONNECT_WAIT_S,
        transport: str = "auto",
    ) -> None:
        self._core = ClientCore(address, tls, token, timeout_s, reconnect_wait_s, transport)
        self._channel = open_channel(
            self._core.address, self._core.credentials, channel.channel_options(self._core.address)
        )
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = open_stub(self._channel)
        self._info: PoolInfo | None = None
        self._patient = connect_timeout_s is None
        if connect_timeout_s is not None:
            try:
                info = finish(
                    first_answer(ThreadWaiting(), self._get_info, wait_time(connect_timeout_s, "connect_timeout_s"))
                )
            except KVServiceError:
                self._channel.close()
                raise
            self._info = from_message(PoolInfo, info)

    @property
    def info(self) -> PoolInfo:
        """Shape of the daemon's pool, and its limits. Asks the daemon if the client has not waited for it."""
        if self._info is None:
            self._info = from_message(PoolInfo, finish(self._get_info(None)))
        return self._info

    async def _get_info(self, timeout_s: float | None) -> pool_pb2.GetInfoResponse:
        info: pool_pb2.GetInfoResponse = self._unary(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout_s)
        return info

    def session(
        self,
        name: str = "",
        *,
        tenant: str = "",
        detachable: bool = False,
        detach_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> Session:
        """Open a session.

        A detachable session outlives its client by `detach_ttl_s` seconds (0: by the daemon's limit). Operators see
        `name` and `tenant`, which says on whose behalf the session runs. `timeout_s` is the default time limit of the
        session's calls in seconds; None: the client's.
        """
        request = build(
            session_pb2.OpenRequest, name=name, tenant=tenant, detachable=detachable, detach_ttl_s=detach_ttl_s
        )
        opened = finish(self._open_session(request, timeout_s, patiently=True))
        return self._attached(opened.session_token, timeout_s, resumed=False)

    def resume(self, token: bytes, *, timeout_s: float | None = None) -> Session:
        """Resume a session. `describe()` lists its sequences. The daemon ends a stream that is still attached to the
        session. If resuming fails, for example because no lane is free, the session keeps its sequences and stays
        detached."""
        return self._attached(token, timeout_s, resumed=True)

    def _attached(self, token: bytes, timeout_s: float | None, *, resumed: bool) -> Session:
        async def ask_info() -> PoolInfo:
            if self._info is None:
                self._info = from_message(PoolInfo, await self._get_info(timeout_s))
            return self._info

        connection = self._core.new_connection(ThreadWaiting(), self._open_stream, token, timeout_s)
        opening = self._core.open_session(
            _Core, ask_info, connection, token, Step, _make_scheduler, self._close_session, resumed=resumed
        )
        return Session(finish(opening))

    def store(
        self,
        namespace: StoreNamespace,
        *,
        tenant: str = "",
        name: str = "",
        timeout_s: float | None = None,
        unreachable: str = "miss",
        transport: str = "auto",
        copy_threads: int | None = None,
        quota_gib: float = 0.0,
    ) -> Store:
        """Open a namespace of the daemon's block store, in a session of its own, see StoreCore.

        `tenant` is part of the namespace; operators see it and `name`. `timeout_s` is the time limit of each request in
        seconds; None: the client's. `unreachable`: "miss" or "raise", what the store's methods do while the daemon is
        away; with "miss" this method does not raise then either, nor if the daemon has no room for the session now.
        Over a quota of the tenant it raises QuotaExceededError, unless the client has connect_timeout_s=None.
        `transport`: "auto", or one of "mapped", "region", "transfer" and "inline", the way that blocks must take.
        `copy_threads`: how many threads of this process copy blocks at most. `quota_gib`: most GiB of values in the
        namespace, for all clients, until one names another; the daemon's store_quota_gib is the upper limit. 0 leaves
        the quota as it is.

        Raises StoreOffError, and StoreNotSharedError or RegionsNotAllowedError if the transport is not available.
        """
        limit_s = self._core.limit_s(timeout_s)
        options = StoreOptions.of(namespace, tenant, name, limit_s, unreachable, transport, copy_threads, quota_gib)
        waiting = ThreadWaiting()
        dialer = Dialer(
            address=self._core.address,
            waiting=waiting,
            get_info=self._get_info,
            open_session=self._open_session,
            connection=lambda token, on_break: self._core.new_connection(
                waiting, self._open_stream, token, limit_s, on_break
            ),
            close_session=self._close_session,
            fd_path=self._core.fd_path,
        )
        access = finish(self._core.open_store(dialer, options, patient=self._patient))
        return Store(StoreCore(access, namespace, make_lease, make_reservation))

    def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        return from_message(PoolStats, self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest(), timeout_s))

    def ping(self, payload: bytes = b"", *, timeout_s: float | None = None) -> bytes:
        answer: bytes = self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload), timeout_s).payload
        return answer

    def events(self, start_number: int = 0, daemon_id: int = 0) -> Generator[KVEventBatch]:
        """Yield changes of the prefix cache until the generator is closed.

        The first batch is number `start_number`; 0: only new batches. `daemon_id` is the id in earlier batches: if the
        daemon has restarted since, the first batch reports a gap. Raises EventsOffError, QuotaExceededError,
        ConnectionLostError.
        """
        request = build(events_pb2.SubscribeRequest, start_number=start_number, daemon_id=daemon_id)
        stub = events_pb2_grpc.EventServiceStub(self._channel)  # type: ignore[no-untyped-call]
        call = stub.Subscribe(request, metadata=self._core.credentials.headers())
        try:
            for message in call:
                yield to_batch(message)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        finally:
            call.cancel()

    def close(self) -> None:
        """Close the connection. Open sessions are detached. Does nothing in a process that was forked."""
        if not self._core.process.is_here:
            return
        finish(self._core.close())
        self._channel.close()

    def __enter__(self) -> KVClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_stream(self, on_end: Callable[[SessionStream], None], waits_for_daemon: bool) -> SessionStream:
        return BlockingStream(self._sessions, self._core.credentials.headers(), on_end, waits_for_daemon)

    def _unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        return finish(self._core.ask(ThreadWaiting(), lambda: self._send(method, request, timeout_s), timeout_s))

    async def _send(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        self._core.process.check()
        try:
            return method(request, metadata=self._core.metadata(), timeout=self._core.limit_s(timeout_s))
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    async def _open_session(
        self, request: session_pb2.OpenRequest, timeout_s: float | None, *, patiently: bool = False
    ) -> session_pb2.OpenResponse:
        return await self._core.open(
            ThreadWaiting(), self._sessions, self._send, request, timeout_s, patiently=patiently
        )

    async def _close_session(self, token: bytes, holder: int) -> None:
        with contextlib.suppress(*channel.NO_CLOSING):
            self._unary(self._sessions.Close, *self._core.close_request(token, holder))


def _make_scheduler(calls: SessionCalls, make_step: MakeStep[Step], opened: OpenedScheduler) -> KVScheduler:
    return KVScheduler(SchedulerCore(calls, make_step, opened))
