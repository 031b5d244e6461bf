"""The asynchronous client API: `session.py` over grpc.aio."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from kvservice.auth.client import TLSOption
from kvservice.client import channel
from kvservice.client.client_core import ClientCore
from kvservice.client.connection import RECONNECT_WAIT_S
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.messages import open_stub
from kvservice.client.requests import build, wait_time
from kvservice.client.scheduler import SchedulerCore
from kvservice.client.session import SessionCore
from kvservice.client.step import StepCore
from kvservice.client.store.aio import AsyncStore, AsyncStoreLease, AsyncStoreReservation
from kvservice.client.store.link import Dialer, StoreOptions
from kvservice.client.store.values import StoreNamespace
from kvservice.client.tasks import TaskStream, TaskWaiting
from kvservice.client.values import PoolInfo, PoolStats, from_message
from kvservice.client.waiting import SessionStream, first_answer
from kvservice.errors import ConnectionLostError, FailedPreconditionError, KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2
from kvservice.wire.channels import open_aio_channel


class AsyncStep(StepCore):
    """See StepCore."""


class AsyncKVScheduler(SchedulerCore[AsyncStep]):
    """See SchedulerCore."""


class AsyncSession(SessionCore[AsyncStep, AsyncKVScheduler]):
    """See SessionCore. AsyncKVClient creates sessions. Tasks may call one concurrently; its calls run in order."""


class AsyncKVClient:
    """A connection to a daemon. It takes the arguments of KVClient and raises the same errors; `async with` connects.
    A call that reaches its time limit does not affect the session's connection or other calls on it.

    async with AsyncKVClient(address) as client, client.session() as kv: ...
    """

    _info: PoolInfo | None = None

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
        self._connect_timeout_s = (
            None if connect_timeout_s is None else wait_time(connect_timeout_s, "connect_timeout_s")
        )

    def __getattr__(self, name: str) -> Any:
        if name in ("_channel", "_pool", "_sessions"):
            raise FailedPreconditionError("the client is not connected: `async with` connects it")
        raise AttributeError(name)

    async def __aenter__(self) -> AsyncKVClient:
        self._channel = open_aio_channel(
            self._core.address, self._core.credentials, channel.channel_options(self._core.address)
        )
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = open_stub(self._channel)
        if self._connect_timeout_s is not None:
            try:
                info = await first_answer(TaskWaiting(), self._get_info, self._connect_timeout_s)
            except KVServiceError:
                await self._channel.close()
                raise
            self._info = from_message(PoolInfo, info)
        return self

    @property
    def info(self) -> PoolInfo:
        """Shape of the daemon's pool, and its limits. Raises ConnectionLostError if the client has not waited for the
        daemon, until a session was opened."""
        if self._info is None:
            raise ConnectionLostError("the client has not waited for the daemon, nor opened a session")
        return self._info

    async def _get_info(self, timeout_s: float | None) -> pool_pb2.GetInfoResponse:
        info: pool_pb2.GetInfoResponse = await self._unary(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout_s)
        return info

    async def __aexit__(self, *_: object) -> None:
        await self._core.close()
        await self._channel.close()

    @contextlib.asynccontextmanager
    async def session(
        self,
        name: str = "",
        *,
        tenant: str = "",
        detachable: bool = False,
        detach_ttl_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[AsyncSession]:
        """Open a session for the duration of the block; see KVClient.session."""
        request = build(
            session_pb2.OpenRequest, name=name, tenant=tenant, detachable=detachable, detach_ttl_s=detach_ttl_s
        )
        opened = await self._core.ask_patiently(
            TaskWaiting(), lambda: self._send(self._sessions.Open, request, timeout_s), timeout_s
        )
        async with self._attached(opened.session_token, False, timeout_s) as session:
            yield session

    @contextlib.asynccontextmanager
    async def resume(self, token: bytes, *, timeout_s: float | None = None) -> AsyncIterator[AsyncSession]:
        """Resume a session for the duration of the block; see KVClient.resume."""
        async with self._attached(token, True, timeout_s) as session:
            yield session

    @contextlib.asynccontextmanager
    async def _attached(self, token: bytes, resumed: bool, timeout_s: float | None) -> AsyncIterator[AsyncSession]:
        if self._info is None:
            self._info = from_message(PoolInfo, await self._get_info(timeout_s))
        connection = self._core.new_connection(TaskWaiting(), self._open_stream, token, timeout_s)
        session = await self._core.open_session(
            AsyncSession,
            self.info,
            connection,
            token,
            AsyncStep,
            AsyncKVScheduler,
            self._close_session,
            resumed=resumed,
        )
        try:
            yield session
        finally:
            await session.close()

    @contextlib.asynccontextmanager
    async def store(
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
    ) -> AsyncIterator[AsyncStore]:
        """Open a namespace of the daemon's block store for the duration of the block; see KVClient.store."""
        limit_s = self._core.limit_s(timeout_s)
        options = StoreOptions.of(namespace, tenant, name, limit_s, unreachable, transport, copy_threads, quota_gib)
        waiting = TaskWaiting()
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
        store = AsyncStore(
            await self._core.open_store(dialer, options), namespace, AsyncStoreLease, AsyncStoreReservation
        )
        try:
            yield store
        finally:
            await store.close()

    async def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        return from_message(PoolStats, await self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest(), timeout_s))

    async def ping(self, payload: bytes = b"", *, timeout_s: float | None = None) -> bytes:
        answer = await self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload), timeout_s)
        return bytes(answer.payload)

    async def events(self, start_number: int = 0, daemon_id: int = 0) -> AsyncGenerator[KVEventBatch]:
        """See KVClient.events."""
        request = build(events_pb2.SubscribeRequest, start_number=start_number, daemon_id=daemon_id)
        stub = events_pb2_grpc.EventServiceStub(self._channel)  # type: ignore[no-untyped-call]
        call = stub.Subscribe(request, metadata=self._core.credentials.headers())
        try:
            async for message in call:
                yield to_batch(message)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        finally:
            call.cancel()

    def _open_stream(self, on_end: Callable[[SessionStream], None], waits_for_daemon: bool) -> SessionStream:
        return TaskStream(self._sessions, self._core.credentials.headers(), on_end, waits_for_daemon)

    async def _unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        return await self._core.ask(TaskWaiting(), lambda: self._send(method, request, timeout_s), timeout_s)

    async def _send(self, method: Any, request: Any, timeout_s: float | None) -> Any:
        try:
            return await method(request, metadata=self._core.metadata(), timeout=self._core.limit_s(timeout_s))
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    async def _open_session(
        self, request: session_pb2.OpenRequest, timeout_s: float | None
    ) -> session_pb2.OpenResponse:
        opened: session_pb2.OpenResponse = await self._unary(self._sessions.Open, request, timeout_s)
        return opened

    async def _close_session(self, token: bytes, holder: int) -> None:
        with contextlib.suppress(*channel.NO_CLOSING):
            await self._unary(self._sessions.Close, *self._core.close_request(token, holder))
