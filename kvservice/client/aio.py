"""The asynchronous face: `core.py` over grpc.aio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar, cast

import grpc

from kvservice.auth.client import ClientCredentials, TLSOption
from kvservice.client import channel, handover
from kvservice.client.choice import close_transport, open_transport
from kvservice.client.core import SessionCore
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.requests import build
from kvservice.client.step import StepCore
from kvservice.client.values import PoolInfo, PoolStats, from_message
from kvservice.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    KVServiceError,
    SessionTakenError,
    TLSHandshakeError,
    UnauthenticatedError,
    UnknownSessionError,
)
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc
from kvservice.wire.channels import open_aio_channel

T = TypeVar("T")


class AsyncStep(StepCore):
    """See StepCore."""


class AsyncSession(SessionCore[AsyncStep]):
    """See SessionCore. Made by AsyncKVClient; tasks may call it at the same time, calls are done in their order."""

    def __init__(self, client: AsyncKVClient, stream: _Stream, token: bytes, resumed: bool) -> None:
        super().__init__(
            stream, client._handover_path, client.info, token, stream.session_id, AsyncStep, resumed=resumed
        )
        self._client = client
        self._stream = stream

    async def detach(self) -> bytes:
        """Leave the session to whoever presents its token, the result. Only of use if it was opened as detachable."""
        await close_transport(self)
        await self._stream.close()
        return self.token

    async def close(self) -> None:
        """Free all that the session has. A session that is gone, or another client's by now, is left alone."""
        await close_transport(self)
        if await self._stream.close():
            await self._client._close_session(self.token, self._stream.holder)


class AsyncKVClient:
    """A connection to a daemon. Arguments and errors are KVClient's; entering the block connects.

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
        transport: str = "auto",
        completion: str = "host",
    ) -> None:
        self._address = address
        self._credentials = ClientCredentials.for_address(address, tls, token)
        self._transport = transport
        self._completion = completion
        self._handover_path = handover.socket_path(address)
        self._connect_timeout_s = connect_timeout_s

    async def __aenter__(self) -> AsyncKVClient:
        self._channel = open_aio_channel(self._address, self._credentials, channel.CHANNEL_OPTIONS)
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = session_pb2_grpc.SessionServiceStub(self._channel)  # type: ignore[no-untyped-call]
        try:
            info = await self._first_answer()
        except KVServiceError:
            await self._channel.close()
            raise
        self.info = from_message(PoolInfo, info)
        return self

    async def _first_answer(self) -> pool_pb2.GetInfoResponse:
        """See KVClient."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._connect_timeout_s
        while True:
            try:
                left_s = max(deadline - clock(), channel.PAUSE_S)
                answer = await self._unary(self._pool.GetInfo, pool_pb2.GetInfoRequest(), timeout=left_s)
                return cast(pool_pb2.GetInfoResponse, answer)
            except TLSHandshakeError:
                raise
            except ConnectionLostError:
                if clock() + channel.PAUSE_S >= deadline:
                    raise
                await asyncio.sleep(channel.PAUSE_S)

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    @contextlib.asynccontextmanager
    async def session(
        self, name: str = "", *, tenant: str = "", detachable: bool = False, detach_ttl_s: float = 0.0
    ) -> AsyncIterator[AsyncSession]:
        """A session for the block. Detachable: it outlives its client, by `detach_ttl_s` (0: the daemon's limit)."""
        request = build(
            session_pb2.OpenRequest, name=name, tenant=tenant, detachable=detachable, detach_ttl_s=detach_ttl_s
        )
        opened = await self._unary(self._sessions.Open, request)
        async with self._attached(opened.session_token, resumed=False) as session:
            yield session

    @contextlib.asynccontextmanager
    async def resume(self, token: bytes) -> AsyncIterator[AsyncSession]:
        """Take over a session for the block; see KVClient.resume."""
        async with self._attached(token, resumed=True) as session:
            yield session

    @contextlib.asynccontextmanager
    async def _attached(self, token: bytes, resumed: bool) -> AsyncIterator[AsyncSession]:
        stream = _Stream(self._sessions, self._credentials, token, self.info.session_grace_s)
        await stream.connect(max(self.info.session_grace_s, 1.0), reconnects=False)
        session = AsyncSession(self, stream, token, resumed)
        try:
            session.attending = await open_transport(session, self._transport, self._completion)
        except BaseException:
            if resumed:
                await stream.close()  # the session is left as it was, for the next who presents its token
            else:
                await session.close()
            raise
        try:
            yield session
        finally:
            await session.close()

    async def stats(self) -> PoolStats:
        return from_message(PoolStats, await self._unary(self._pool.GetStats, pool_pb2.GetStatsRequest()))

    async def ping(self, payload: bytes = b"") -> bytes:
        answer: bytes = (await self._unary(self._pool.Ping, build(pool_pb2.PingRequest, payload=payload))).payload
        return answer

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

    async def _unary(self, method: Any, request: Any, **options: Any) -> Any:
        try:
            return await method(request, metadata=channel.trace_metadata() + self._credentials.headers(), **options)
        except grpc.RpcError as error:
            raise channel.to_error(error) from None

    async def _close_session(self, token: bytes, holder: int) -> None:
        with contextlib.suppress(UnknownSessionError, SessionTakenError, ConnectionLostError, UnauthenticatedError):
            await self._unary(self._sessions.Close, session_pb2.CloseRequest(session_token=token, holder=holder))


class _Stream:
    """A session's stream. Calls may overlap; reconnects within the grace time, once for all that wait."""

    def __init__(
        self,
        stub: session_pb2_grpc.SessionServiceStub,
        credentials: ClientCredentials,
        token: bytes,
        grace_s: float,
    ) -> None:
        self._stub = stub
        self._credentials = credentials
        self._token = token
        self._grace_s = grace_s
        self._in_flight = asyncio.Semaphore(channel.MAX_IN_FLIGHT)
        self._mending: asyncio.Task[None] | None = None
        self.holder = channel.new_holder()
        self.closed = False

    async def connect(self, wait_s: float, *, reconnects: bool) -> None:
        connection = _Connection(self._stub, self._credentials.headers())
        try:
            async with asyncio.timeout(wait_s):
                request = session_pb2.AttachRequest(
                    session_token=self._token, holder=self.holder, reconnects=reconnects
                )
                self.session_id: int = (await connection.exchange("attach", request)).session_id
        except TimeoutError:
            await connection.end()
            raise ConnectionLostError("the daemon is out of reach") from None
        except BaseException:
            await connection.end()
            raise
        self._connection = connection

    async def call(self, name: str, request: Any) -> Any:
        async with self._in_flight:
            if self._connection.error is not None and not (self.closed or self._lost()):
                await self._reconnect(self._connection)
            for _ in range(channel.MAX_SENDS - 1):
                used = self._connection
                try:
                    return await used.exchange(name, request)
                except ConnectionLostError:
                    if self.closed:
                        raise
                    await self._reconnect(used)
                    if not channel.repeatable(name):
                        raise
            return await self._connection.exchange(name, request)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """In a thread. Who is cancelled waits for its end: it uses the caller's memory."""
        working = asyncio.ensure_future(asyncio.to_thread(work, *args))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            while not working.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([working])
            raise

    def lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    @property
    def broken(self) -> bool:
        return self.closed or self._connection.error is not None

    async def close(self) -> bool:
        """Whether the session was held until now, as far as is known here."""
        held = not (self.closed or self._lost())
        self.closed = True
        if self._mending is not None:
            self._mending.cancel()
        await self._connection.end()
        return held

    def _lost(self) -> bool:
        """Whether the daemon has said that the session is closed, or another client's."""
        return isinstance(self._connection.error, FailedPreconditionError)

    async def _reconnect(self, broken: _Connection) -> None:
        if self._connection is not broken:
            return  # it is done already
        if self._mending is None:
            self._mending = asyncio.create_task(self._mend())
            self._mending.add_done_callback(self._mended)
        mending = self._mending
        try:
            await asyncio.shield(mending)
        except asyncio.CancelledError:
            if self.closed and mending.cancelled():
                raise ConnectionLostError("the session is closed") from None
            raise

    def _mended(self, task: asyncio.Task[None]) -> None:
        self._mending = None
        if not task.cancelled():
            task.exception()  # whoever still waits gets it; that nobody does is no fault

    async def _mend(self) -> None:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._grace_s
        while True:
            try:
                return await self.connect(deadline - clock(), reconnects=True)
            except SessionTakenError as taken:
                self._connection.error = taken  # this is why it ended, though gRPC showed a broken line
                raise
            except ConnectionLostError:
                if clock() + channel.PAUSE_S >= deadline:
                    raise
                await asyncio.sleep(channel.PAUSE_S)


class _Connection:
    """One stream, from its attaching to its end. `error` is why it ended."""

    def __init__(self, stub: session_pb2_grpc.SessionServiceStub, headers: tuple[tuple[str, str], ...]) -> None:
        self.error: KVServiceError | None = None
        self._call_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: asyncio.Queue[session_pb2.Call | None] = asyncio.Queue()
        self._call: Any = stub.Connect(self._outgoing(), metadata=headers, wait_for_ready=True)
        self._reader = asyncio.create_task(self._read())

    async def exchange(self, name: str, request: Any) -> Any:
        if self.error is not None:
            raise self.error.with_traceback(None)
        call_id = next(self._call_ids)
        answer = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            # Not written from here: a caller that is cancelled while gRPC writes takes the stream with it.
            self._outbox.put_nowait(channel.make_call(call_id, name, request))
            return channel.take_reply(await answer)
        finally:
            del self._waiting[call_id]

    async def end(self) -> None:
        self._call.cancel()
        await self._reader

    async def _outgoing(self) -> AsyncIterator[session_pb2.Call]:
        while (call := await self._outbox.get()) is not None:
            yield call

    async def _read(self) -> None:
        self.error = await self._hand_out_replies()
        self._outbox.put_nowait(None)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.error)

    async def _hand_out_replies(self) -> KVServiceError:
        """Until the stream ends; why it did."""
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                answer = self._waiting.get(reply.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except grpc.RpcError as broken:
            return channel.to_error(broken)
        except asyncio.CancelledError:
            # Cancelling the call ends its reads so; the task itself is never cancelled.
            return ConnectionLostError("the session's stream is closed")
        return ConnectionLostError("the daemon ended the stream")
