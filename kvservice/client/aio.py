"""The asynchronous client API, over grpc.aio: the waiting primitives and streams on asyncio, and the clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from kvservice.auth.client import TLSOption
from kvservice.client import channel, messages
from kvservice.client.client_core import ClientCore
from kvservice.client.connection import END_S, RECONNECT_WAIT_S, SessionStream, first_answer
from kvservice.client.events import KVEventBatch, to_batch
from kvservice.client.messages import build, open_stub, wait_time
from kvservice.client.scheduler import SchedulerCore
from kvservice.client.session import SessionCore
from kvservice.client.step import StepCore
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.core import LeaseCore, ReservationCore, StoreCore
from kvservice.client.store.link import Dialer, StoreOptions
from kvservice.client.store.values import StoreNamespace
from kvservice.client.values import PoolInfo, PoolStats, from_message
from kvservice.errors import CallTimeoutError, ConnectionLostError, FailedPreconditionError, KVServiceError
from kvservice.v1 import events_pb2, events_pb2_grpc, pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc
from kvservice.wire.channels import open_aio_channel

T = TypeVar("T")


class _TaskSignal:
    """See Signal in connection.py."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.set = self._event.set
        self.clear = self._event.clear

    async def wait(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        return self._event.is_set()


class _TaskTurns:
    """See Turns in connection.py. A turn that is given back goes to the first who waits, so that none is left then."""

    def __init__(self) -> None:
        self._left = channel.MAX_IN_FLIGHT
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take_now(self) -> bool:
        if not self._left:
            return False
        self._left -= 1
        return True

    async def take(self, timeout_s: float | None) -> bool:
        if self.take_now():
            return True
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self.give_back()
            if isinstance(error, TimeoutError):
                return False
            raise
        return True

    def give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._left += 1


class _Task:
    """See Background in connection.py."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


class TaskWaiting:
    """See Waiting in connection.py."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time

    signal = _TaskSignal
    turns = _TaskTurns
    start = _Task
    lock = asyncio.Lock

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run blocking work in a thread. A cancelled caller waits for its end, because it uses the caller's memory."""
        working = asyncio.ensure_future(asyncio.to_thread(work, *args))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            while not working.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([working])
            raise


class _TaskCall:
    """See BegunCall in connection.py. `forget` takes the call from those whose replies the stream hands out."""

    def __init__(self, name: str, reply: asyncio.Future[Any], forget: Callable[[], object]) -> None:
        self._name, self._reply, self._forget = name, reply, forget

    async def answer(self, deadline: float | None) -> Any:
        try:
            async with asyncio.timeout_at(deadline):
                return messages.take_reply(await self._reply)
        except TimeoutError:
            raise CallTimeoutError(f"{self._name}: no answer in time") from None

    def drop(self) -> None:
        self._forget()
        if not self._reply.cancel() and not self._reply.cancelled():
            self._reply.exception()  # which asyncio would log if nobody looked at it


class TaskStream:
    """See SessionStream in connection.py. Calls run concurrently. A call that reaches its deadline does not affect the
    others. Calls that wait while gRPC writes another one go as one message, and may be answered as one."""

    def __init__(
        self,
        stub: session_pb2_grpc.SessionServiceStub,
        headers: tuple[tuple[str, str], ...],
        on_end: Callable[[SessionStream], None],
        waits_for_daemon: bool,
    ) -> None:
        self.error: KVServiceError | None = None
        self.max_calls = 1
        self._on_end = on_end
        self._call_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        # The calls that gRPC has not taken yet, and whether there are some, or the stream has ended.
        self._outbox: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._ends = False  # after the calls in `_outbox`
        self._call: Any = stub.Connect(self._outgoing(), metadata=headers, wait_for_ready=waits_for_daemon)
        self._reader = asyncio.create_task(self._read())

    async def exchange(self, name: str, request: Any, deadline: float | None) -> Any:
        if self.error is not None:
            raise self.error.with_traceback(None)
        call_id = next(self._call_ids)
        answer = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            # The call goes through a queue: a caller that is cancelled during a gRPC write would cancel the stream.
            self._outbox.append(messages.make_call(call_id, name, request))
            self._filled.set()
            if deadline is None:
                return messages.take_reply(await answer)
            async with asyncio.timeout_at(deadline):
                return messages.take_reply(await answer)
        except TimeoutError:
            raise CallTimeoutError(f"{name}: no answer in time") from None
        finally:
            del self._waiting[call_id]

    def begin(self, name: str, request: Any) -> _TaskCall:
        if self.error is not None:
            raise self.error.with_traceback(None)
        call_id = next(self._call_ids)
        reply = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        self._outbox.append(messages.make_call(call_id, name, request))
        self._filled.set()
        return _TaskCall(name, reply, lambda: self._waiting.pop(call_id, None))

    def post(self, name: str, request: Any) -> None:
        self._outbox.append(messages.make_call(next(self._call_ids), name, request))
        self._filled.set()

    async def end(self) -> None:
        try:
            if not self._waiting:
                self._ends = True
                self._filled.set()
                await asyncio.wait([self._reader], timeout=END_S)
        finally:
            self._call.cancel()
        await self._reader

    async def _outgoing(self) -> AsyncIterator[bytes]:
        while await self._filled.wait() and self.error is None:
            if self._outbox:
                yield self._next_message()
            elif self._ends:
                return

    def _next_message(self) -> bytes:
        """Return the first of the calls that wait, together with those behind it for which there is room."""
        calls = [self._outbox.popleft()]
        num_bytes = len(calls[0])
        while self._outbox and len(calls) < self.max_calls:
            num_bytes += len(self._outbox[0])
            if num_bytes > messages.MAX_JOINED_BYTES:
                break
            calls.append(self._outbox.popleft())
        if not self._outbox and not self._ends:
            self._filled.clear()
        return messages.join_calls(calls)

    async def _read(self) -> None:
        self.error = await self._hand_out_replies()
        self._filled.set()
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.error)
        self._on_end(self)

    async def _hand_out_replies(self) -> KVServiceError:
        """Pass replies to their callers until the stream ends. Returns the error with which it ended."""
        try:
            while (replies := await self._call.read()) is not grpc.aio.EOF:
                for reply in replies:
                    answer = self._waiting.get(reply.call_id)
                    if answer is not None and not answer.done():
                        answer.set_result(reply)
        except grpc.RpcError as broken:
            return channel.to_error(broken)
        except asyncio.CancelledError:
            # Cancelling the gRPC call raises this in its reads; the task itself is never cancelled.
            return ConnectionLostError("the session's stream was closed here")
        return ConnectionLostError("the daemon ended the stream")


# ---- sessions and stores


class AsyncStoreLease(LeaseCore):
    """See LeaseCore. An async context manager."""

    async def __aenter__(self) -> AsyncStoreLease:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class AsyncStoreReservation(ReservationCore):
    """See ReservationCore. An async context manager."""

    async def __aenter__(self) -> AsyncStoreReservation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.abort()


class AsyncStore(StoreCore[AsyncStoreLease, AsyncStoreReservation]):
    """See StoreCore. AsyncKVClient.store opens it for a block."""


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
        # These tasks go on after their callers were cancelled.
        self._ending: set[asyncio.Task[None]] = set()

    def __getattr__(self, name: str) -> Any:
        if name in ("_channel", "_pool", "_sessions"):
            raise FailedPreconditionError("the client is not connected: `async with` connects it")
        raise AttributeError(name)

    async def __aenter__(self) -> AsyncKVClient:
        self._channel = open_aio_channel(
            self._core.address, self._core.credentials, channel.channel_options(self._core.address)
        )
        self._pool = pool_pb2_grpc.PoolServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._sessions = open_stub(self._channel, messages.parse_replies)
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
        if self._ending:
            await asyncio.wait(self._ending, timeout=channel.CLOSE_S)
        await self._core.close()
        await self._channel.close()

    async def _to_the_end(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for work that goes on if the caller is cancelled."""
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        await asyncio.shield(task)

    async def _opened(self, opening: Coroutine[Any, Any, T], close: Callable[[T], Coroutine[Any, Any, object]]) -> T:
        """Wait until something is open. If the caller is cancelled, the opening ends, and what is open by then is
        closed, whatever else happens to the caller."""
        task = asyncio.create_task(opening)

        async def undone() -> None:
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                await close(task.result())

        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            await self._to_the_end(undone())
            raise

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

        async def opening() -> AsyncSession:
            opened = await self._open_session(request, timeout_s, patiently=True)
            return await self._attach(opened.session_token, timeout_s, resumed=False)

        session = await self._opened(opening(), AsyncSession.close)
        try:
            yield session
        finally:
            await self._to_the_end(session.close())

    @contextlib.asynccontextmanager
    async def resume(self, token: bytes, *, timeout_s: float | None = None) -> AsyncIterator[AsyncSession]:
        """Resume a session for the duration of the block; see KVClient.resume."""

        opening = self._attach(token, timeout_s, resumed=True)
        session = await self._opened(opening, lambda session: session.context.connection.close())
        try:
            yield session
        finally:
            await self._to_the_end(session.close())

    async def _attach(self, token: bytes, timeout_s: float | None, *, resumed: bool) -> AsyncSession:
        async def ask_info() -> PoolInfo:
            if self._info is None:
                self._info = from_message(PoolInfo, await self._get_info(timeout_s))
            return self._info

        connection = self._core.new_connection(TaskWaiting(), self._open_stream, token, timeout_s)
        return await self._core.open_session(
            AsyncSession,
            ask_info,
            connection,
            token,
            AsyncStep,
            AsyncKVScheduler,
            self._close_session,
            resumed=resumed,
        )

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
        opening = self._core.open_store(dialer, options, patient=self._connect_timeout_s is None)
        access = await self._opened(opening, StoreAccess.close)
        try:
            yield AsyncStore(access, namespace, AsyncStoreLease, AsyncStoreReservation)
        finally:
            await self._to_the_end(access.close())

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
        self, request: session_pb2.OpenRequest, timeout_s: float | None, *, patiently: bool = False
    ) -> session_pb2.OpenResponse:
        return await self._core.open(TaskWaiting(), self._sessions, self._send, request, timeout_s, patiently=patiently)

    async def _close_session(self, token: bytes, holder: int) -> None:
        with contextlib.suppress(*channel.NO_CLOSING):
            await self._unary(self._sessions.Close, *self._core.close_request(token, holder))
