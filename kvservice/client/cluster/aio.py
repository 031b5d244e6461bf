"""The asynchronous face of a cluster."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Iterable
from typing import Any, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvservice.auth.client import ClientCredentials, target_of
from kvservice.client import channel
from kvservice.client.aio import AsyncKVClient, AsyncSession, AsyncStore, TaskWaiting
from kvservice.client.cluster.core import (
    CONTROL_SESSION,
    SESSION_STAYS,
    ClientOptions,
    ClusterCore,
    ClusterDaemon,
    ClusterOptions,
    DaemonReport,
    check_addresses,
    check_serving,
    control_options,
    to_report,
)
from kvservice.client.cluster.placement import Candidate, PlacementSettings
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.messages import ExtraKeys, time_limit
from kvservice.client.store.values import StoreNamespace
from kvservice.errors import FailedPreconditionError, KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc
from kvservice.wire.channels import open_aio_channel


class TaskLink:
    """See DaemonLink."""

    def __init__(self, address: str, options: ClientOptions) -> None:
        self._address = address = target_of(address)
        self._credentials = ClientCredentials.for_address(address, options.get("tls"), options.get("token", ""))
        self.client = AsyncKVClient(address, connect_timeout_s=None, **options)
        self._control = AsyncKVClient(address, **control_options(options))
        self._opened = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()
        self._session: AsyncSession | None = None
        self._sessions = contextlib.AsyncExitStack()
        self._stream: Any = None
        self._stopped = False

    async def open(self) -> None:
        self._channel = open_aio_channel(self._address, self._credentials, channel.channel_options(self._address))
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)  # the published stubs declare no methods
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._events = events_pb2_grpc.EventServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._opened.push_async_callback(self._channel.close)
        await self._opened.enter_async_context(self.client)
        await self._opened.enter_async_context(self._control)

    async def probe(self, timeout_s: float) -> DaemonReport:
        status, trailing = await self._ask(self._health.Check, health_pb2.HealthCheckRequest(), timeout_s)
        check_serving(status, trailing)
        info, _ = await self._ask(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout_s)
        stats, _ = await self._ask(self._pool.GetStats, pool_pb2.GetStatsRequest(), timeout_s)
        return to_report(info, stats)

    async def _ask(self, method: Any, request: Any, timeout_s: float) -> Any:
        """Return the answer of a unary call, and its trailing metadata."""
        try:
            call = method(request, metadata=self._credentials.headers(), timeout=timeout_s)
            return await call, await call.trailing_metadata()
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    async def events(self, start_number: int, daemon_id: int) -> AsyncIterator[KVEventBatch]:
        request = events_pb2.SubscribeRequest(start_number=start_number, daemon_id=daemon_id)
        self._stream = self._events.Subscribe(request, metadata=self._credentials.headers())
        try:
            async for message in self._stream:
                yield to_batch(message)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        finally:
            self._stream.cancel()

    def stop_events(self) -> None:
        """The task that follows the events is cancelled, and ends the stream."""

    async def match_prefix(self, token_ids: Iterable[int], extra_keys: ExtraKeys, timeout_s: float) -> int:
        if (session := self._session) is not None:
            try:
                return await session.match_prefix(token_ids, extra_keys, timeout_s=timeout_s)
            except SESSION_STAYS:
                raise
            except KVServiceError:  # the daemon may have lost the session; another one will do
                self._session = None
                await session.detach()
        session = await self._open_session(timeout_s)
        return await session.match_prefix(token_ids, extra_keys, timeout_s=timeout_s)

    async def _open_session(self, timeout_s: float) -> AsyncSession:
        """Return the session of the link."""
        async with self._lock:
            if self._session is None:
                opening = self._control.session(CONTROL_SESSION, timeout_s=timeout_s)
                self._session = await self._sessions.enter_async_context(opening)
            return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.detach()  # without a call, which a frozen daemon would not answer
        await self._sessions.aclose()
        await self._opened.aclose()


class AsyncCluster:
    """Several daemons behind one face; see Cluster. `async with` connects.

    async with AsyncCluster(addresses) as cluster, cluster.session(token_ids) as kv: ...
    """

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        placement: PlacementSettings | None = None,
        connect_timeout_s: float | None = 10.0,
        wait_s: float = 10.0,
        probe_interval_s: float = 1.0,
        probe_timeout_s: float = 2.0,
        open_timeout_s: float = 5.0,
        **client_options: Unpack[ClientOptions],
    ) -> None:
        self._options = ClusterOptions.of(
            placement,
            connect_timeout_s,
            wait_s=wait_s,
            probe_interval_s=probe_interval_s,
            probe_timeout_s=probe_timeout_s,
            open_timeout_s=open_timeout_s,
        )
        self._timeout_s = time_limit(client_options.get("timeout_s"))
        self._addresses, self._client_options = check_addresses(addresses), client_options
        self._entered: ClusterCore[AsyncKVClient] | None = None
        self._placed: weakref.WeakKeyDictionary[AsyncSession, str] = weakref.WeakKeyDictionary()

    @property
    def _core(self) -> ClusterCore[AsyncKVClient]:
        if self._entered is None:
            raise FailedPreconditionError("the cluster is not connected: `async with` connects it")
        return self._entered

    async def __aenter__(self) -> AsyncCluster:
        self._entered = ClusterCore(
            self._addresses, self._options, TaskWaiting(), lambda address: TaskLink(address, self._client_options)
        )
        try:
            await self._entered.start()
        except BaseException:
            await self._entered.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._core.close()

    @contextlib.asynccontextmanager
    async def session(
        self,
        token_ids: Iterable[int] = (),
        *,
        extra_keys: ExtraKeys = (),
        name: str = "",
        tenant: str = "",
        detachable: bool = False,
        detach_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[AsyncSession]:
        """Open a session at the best daemon for a prompt, for the duration of the block; see Cluster.session."""
        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        core, exits = self._core, contextlib.AsyncExitStack()

        async def open_at(client: AsyncKVClient) -> AsyncSession:
            opening = client.session(
                name,
                tenant=tenant,
                detachable=detachable,
                detach_ttl_s=detach_ttl_s,
                timeout_s=core.options.open_timeout_s,
            )
            return await exits.enter_async_context(opening)

        async with exits:
            session, placed = await core.open(token_ids, extra_keys, open_at)
            session.context.connection.set_time_limit(limit_s)
            self._placed[session] = placed.daemon
            try:
                yield session
            finally:
                core.end(placed)

    def address_of(self, session: AsyncSession) -> str:
        """Return the address of the daemon at which a session was placed. Raises KeyError."""
        return self._placed[session]

    async def choose(self, token_ids: Iterable[int], extra_keys: ExtraKeys = ()) -> Candidate:
        """See Cluster.choose."""
        return await self._core.choose(token_ids, extra_keys)

    @contextlib.asynccontextmanager
    async def store(self, namespace: StoreNamespace, key: bytes = b"", **options: Any) -> AsyncIterator[AsyncStore]:
        """Open a namespace of the block store at one daemon for the duration of the block; see Cluster.store."""
        async with contextlib.AsyncExitStack() as exits:
            yield await self._core.open_by_key(
                key, lambda client: exits.enter_async_context(client.store(namespace, **options))
            )

    def daemons(self) -> list[ClusterDaemon]:
        """Return the state of each daemon, in the order of the addresses."""
        return self._core.daemons()

    def client(self, address: str) -> AsyncKVClient:
        """See Cluster.client."""
        return self._core.client(address)
