"""The asynchronous client API: `core.py` over grpc.aio."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import grpc

from kvservice.auth.client import ClientCredentials, TLSOption
from kvservice.client import channel, fd_passing
from kvservice.client.choice import close_transport, open_transport
from kvservice.client.connection import RECONNECT_WAIT_S, SessionConnection
from kvservice.client.core import SessionCore
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.requests import build, time_limit, wait_time
from kvservice.client.step import StepCore
from kvservice.client.tasks import TaskStream, TaskWaiting
from kvservice.client.values import PoolInfo, PoolStats, from_message
from kvservice.client.waiting import SessionStream, first_answer
from kvservice.errors import KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc
from kvservice.wire.channels import open_aio_channel


class AsyncStep(StepCore):
    """See StepCore."""


class AsyncSession(SessionCore[AsyncStep]):
    """See SessionCore. AsyncKVClient creates sessions. Tasks may call one concurrently; its calls run in order."""

    def __init__(
        self, client: AsyncKVClient, connection: SessionConnection, token: bytes, session_id: int, resumed: bool
    ) -> None:
        super().__init__(connection, client._fd_path, client.info, token, session_id, AsyncStep, resumed=resumed)
        self._client = client
        self._connection = connection

    async def detach(self) -> bytes:
        """Detach from the session and return its token, with which another client can resume it. Useful only if the
        session was opened as detachable."""
        await close_transport(self)
        await self._connection.close()
        return self.token

    async def close(self) -> None:
        """Close the session and free everything it owns. Does nothing if the session is gone or belongs to another
        client by now."""
        await close_transport(self)
        if await self._connection.close():
            await self._client._close_session(self.token, self._connection.holder)


class AsyncKVClient:
    """A connection to a daemon. It takes the arguments of KVClient and raises the same errors; `async with` connects.
    A call that reaches its time limit does not affect the session's connection or other calls on it.

    async with AsyncKVClient(address) as client, client.session() as kv: ...
    """

    info: PoolInfo

    def __init__(
        self,
        address: str,
        *,
        tls: TLSOption = None,
        token: str | os.PathLike[str] = "",
        connect_timeout_s: float = 10.0,
        timeout_s: float | None = None,
        reconnect_wait_s: float = RECONNECT_WAIT_S,
        transport: str = "auto",
    ) -> None:
        self._address = address
        self._credentials = ClientCredentials.for_address(address, tls, token)
        self._transport = transport
        self._fd_path = fd_passing.socket_path(address)
        self._connect_timeout_s = connect_timeout_s
        self._timeout_s = time_limit(timeout_s)
        self._reconnect_wait_s = wait_time(reconnect_wait_s, "reconnect_wait_s")
        self._connections: weakref.WeakSet[SessionConnection] = weakref.WeakSet()

    async def __aenter__(self) -> AsyncKVClient:
        self._channel = open_aio_channel(self._address, self._credentials, channel.CHANNEL_OPTIONS)
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            info = await first_answer(TaskWaiting(), self._get_info, self._connect_timeout_s)
        except KVServiceError:
            await self._channel.close()
            raise
        self.info = from_message(PoolInfo, info)
        return self

    async def _get_info(self, timeout_s: float) -> pool_pb2.GetInfoResponse:
        info: pool_pb2.GetInfoResponse = await self._unary(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout_s)
        return info

    async def __aexit__(self, *_: object) -> None:
        for connection in list(self._connections):
            await connection.close()
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
        opened = await self._unary(self._sessions.Open, request, timeout_s)
        async with self._attached(opened.session_token, False, timeout_s) as session:
            yield session

    @contextlib.asynccontextmanager
    async def resume(self, token: bytes, *, timeout_s: float | None = None) -> AsyncIterator[AsyncSession]:
        """Resume a session for the duration of the block; see KVClient.resume."""
        async with self._attached(token, True, timeout_s) as session:
            yield session

    @contextlib.asynccontextmanager
    async def _attached(self, token: bytes, resumed: bool, timeout_s: float | None) -> AsyncIterator[AsyncSession]:
        connection = self._new_connection(token, timeout_s)
        session_id = await connection.connect(max(self.info.session_grace_s, 1.0))
        session = AsyncSession(self, connection, token, session_id, resumed)
        try:
            session.attending = await open_transport(session, self._transport)
        except BaseException:
            if resumed:
                await connection.close()  # keeps the session, so that a client with its token can resume it
            else:
                await session.close()
            raise
        try:
            yield session
        finally:
            await session.close()

    async def stats(self, *, timeout_s: float | None = None) -> PoolStats:
        return from_message(PoolStats, await self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest(), timeout_s))

    async def ping(self, payload: bytes = b"", *, timeout_s: float | None = None) -> bytes:
        answer = await self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload), timeout_s)
        return bytes(answer.payload)

    async def events(self, start_number: int = 0, daemon_id: int = 0) -> AsyncGenerator[KVEventBatch]:
        """See KVClient.events."""
        request = build(events_pb2.SubscribeRequest, start_number=start_number, daemon_id=daemon_id)
        stub = events_pb2_grpc.EventServiceStub(self._channel)  # type: ignore[no-untyped-call]
        call = stub.Subscribe(request, metadata=self._credentials.headers())
        try:
            async for message in call:
                yield to_batch(message)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        finally:
            call.cancel()

    def _new_connection(self, token: bytes, timeout_s: float | None) -> SessionConnection:
        """Create the connection of a session. `connect` attaches it."""

        def open_stream(on_end: Callable[[SessionStream], None], waits_for_daemon: bool) -> SessionStream:
            return TaskStream(self._sessions, self._credentials.headers(), on_end, waits_for_daemon)

        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        connection = SessionConnection(
            TaskWaiting(), open_stream, token, timeout_s=limit_s, reconnect_wait_s=self._reconnect_wait_s
        )
        self._connections.add(connection)
        return connection

    async def _unary(self, method: Any, request: Any, timeout_s: float | None = None) -> Any:
        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        metadata = channel.trace_metadata() + self._credentials.headers()
        try:
            return await method(request, metadata=metadata, timeout=limit_s)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    async def _close_session(self, token: bytes, holder: int) -> None:
        """See KVClient."""
        request = session_pb2.CloseRequest(session_token=token, holder=holder)
        with contextlib.suppress(*channel.NO_CLOSING):
            await self._unary(self._sessions.Close, request, min(self._timeout_s or channel.CLOSE_S, channel.CLOSE_S))
