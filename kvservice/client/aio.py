"""The asynchronous face: `core.py` over grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvservice.client import channel
from kvservice.client.core import SessionCore
from kvservice.client.requests import build
from kvservice.client.step import StepCore
from kvservice.client.values import PoolInfo, PoolStats, from_message
from kvservice.errors import ConnectionLostError, KVServiceError, UnknownSessionError
from kvservice.v1 import pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc


class AsyncStep(StepCore):
    """See StepCore."""


class AsyncSession(SessionCore[AsyncStep]):
    """See SessionCore. Made by AsyncKVClient; tasks may call it at the same time, calls are done in their order."""

    def __init__(self, client: AsyncKVClient, stream: _Stream, token: bytes, session_id: int) -> None:
        super().__init__(stream, client.info, token, session_id, AsyncStep)
        self._client = client
        self._stream = stream

    async def detach(self) -> bytes:
        """Leave the session to whoever presents its token, the result. Only of use if it was opened as detachable."""
        await self._stream.close()
        return self.token

    async def close(self) -> None:
        """Free all that the session has. A session that is gone already is closed as well."""
        if not self._stream.closed:
            await self._stream.close()
            await self._client._close_session(self.token)


class AsyncKVClient:
    """A connection to a daemon. `address`: unix:///path/of.sock or host:port.

    async with AsyncKVClient(address) as client, client.session() as kv: ...
    """

    info: PoolInfo

    def __init__(self, address: str, *, connect_timeout_s: float = 10.0) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s

    async def __aenter__(self) -> AsyncKVClient:
        self._channel = grpc.aio.insecure_channel(self._address, channel.CHANNEL_OPTIONS)
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            request = pool_pb2.GetInfoRequest()
            timeout_s = self._connect_timeout_s
            info = await self._unary(self._pool.GetInfo, request, wait_for_ready=True, timeout=timeout_s)
        except KVServiceError:
            await self._channel.close()
            raise
        self.info = from_message(PoolInfo, info)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @contextlib.asynccontextmanager
    async def session(
        self, name: str = "", *, detachable: bool = False, detach_ttl_s: float = 0.0
    ) -> AsyncIterator[AsyncSession]:
        """A session for the block. Detachable: it outlives its client, by `detach_ttl_s` (0: the daemon's limit)."""
        request = build(session_pb2.OpenRequest, name=name, detachable=detachable, detach_ttl_s=detach_ttl_s)
        opened = await self._unary(self._sessions.Open, request)
        async with self._attached(opened.session_token, opened.session_id) as session:
            yield session

    @contextlib.asynccontextmanager
    async def resume(self, token: bytes) -> AsyncIterator[AsyncSession]:
        """Take over a session for the block. `describe()` tells its sequences."""
        async with self._attached(token, 0) as session:
            yield session

    @contextlib.asynccontextmanager
    async def _attached(self, token: bytes, session_id: int) -> AsyncIterator[AsyncSession]:
        stream = _Stream(self._sessions, token, self.info.session_grace_s)
        await stream.connect()
        session = AsyncSession(self, stream, token, session_id)
        try:
            yield session
        finally:
            await session.close()

    async def stats(self) -> PoolStats:
        return from_message(PoolStats, await self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest()))

    async def ping(self, payload: bytes = b"") -> bytes:
        answer: bytes = (await self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload))).payload
        return answer

    async def _unary(self, method: Any, request: Any, **options: Any) -> Any:
        try:
            return await method(request, **options)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    async def _close_session(self, token: bytes) -> None:
        with contextlib.suppress(UnknownSessionError, ConnectionLostError):
            await self._unary(self._sessions.Close, session_pb2.CloseRequest(session_token=token))


class _Stream:
    """A session's stream. Calls may overlap; a task of its own hands the replies to those who wait for them."""

    def __init__(self, stub: session_pb2_grpc.SessionServiceStub, token: bytes, grace_s: float) -> None:
        self._stub = stub
        self._token = token
        self._grace_s = grace_s
        self._call_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._write_lock = asyncio.Lock()
        self._connect_lock = asyncio.Lock()
        self.closed = False

    async def connect(self) -> None:
        self._call = self._stub.Connect()
        self._reader = asyncio.create_task(self._read(self._call))
        try:
            await self._exchange("attach", session_pb2.AttachRequest(session_token=self._token))
        except KVServiceError:
            self._call.cancel()
            raise

    async def call(self, name: str, request: Any) -> Any:
        used = self._call
        try:
            return await self._exchange(name, request)
        except ConnectionLostError as error:
            if self.closed:
                raise
            await self._reconnect(used)
            if not channel.lost(error, name):
                raise
            return await self._exchange(name, request)

    async def close(self) -> None:
        self.closed = True
        self._call.cancel()
        await self._reader

    async def _exchange(self, name: str, request: Any) -> Any:
        if self.closed or self._reader.done():
            raise ConnectionLostError("the session's stream is closed")
        call_id = next(self._call_ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            async with self._write_lock:
                await self._call.write(channel.make_call(call_id, name, request))
            return channel.take_reply(await future)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None
        except asyncio.InvalidStateError:
            raise ConnectionLostError("the daemon ended the stream") from None
        finally:
            self._waiting.pop(call_id, None)

    async def _read(self, call: Any) -> None:
        error: KVServiceError = ConnectionLostError("the daemon ended the stream")
        try:
            while (reply := await call.read()) is not grpc.aio.EOF:
                future = self._waiting.get(reply.call_id)
                if future is not None and not future.done():
                    future.set_result(reply)
        except grpc.RpcError as broken:
            error = channel.to_error(broken)
        except asyncio.CancelledError:
            # Cancelling the call ends its reads so; the task itself is never cancelled.
            error = ConnectionLostError("the session's stream is closed")
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def _reconnect(self, broken: Any) -> None:
        async with self._connect_lock:
            if self._call is not broken:
                return None  # another task has done it
            await self._reader
            for pause_s in channel.pauses_s(self._grace_s):
                try:
                    return await self.connect()
                except ConnectionLostError:
                    await asyncio.sleep(pause_s)
            return await self.connect()
