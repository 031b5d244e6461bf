"""The waiting primitives and streams of the async API, on asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from kvservice.client import channel, messages
from kvservice.client.waiting import SessionStream
from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError
from kvservice.v1 import session_pb2_grpc

T = TypeVar("T")


class _TaskSignal:
    """See Signal in waiting.py."""

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
    """See Turns in waiting.py."""

    def __init__(self) -> None:
        self._semaphore = asyncio.Semaphore(channel.MAX_IN_FLIGHT)

    async def take(self, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._semaphore.acquire()
        except TimeoutError:
            return False

    def give_back(self) -> None:
        self._semaphore.release()


class _Task:
    """See Background in waiting.py."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.create_task(work)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


class TaskWaiting:
    """See Waiting in waiting.py."""

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


class TaskStream:
    """See SessionStream in waiting.py. Calls run concurrently. A call that reaches its deadline does not affect the
    others."""

    def __init__(
        self,
        stub: session_pb2_grpc.SessionServiceStub,
        headers: tuple[tuple[str, str], ...],
        on_end: Callable[[SessionStream], None],
        waits_for_daemon: bool,
    ) -> None:
        self.error: KVServiceError | None = None
        self._on_end = on_end
        self._call_ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._outbox: asyncio.Queue[messages.SentCall | None] = asyncio.Queue()
        self._call: Any = stub.Connect(self._outgoing(), metadata=headers, wait_for_ready=waits_for_daemon)
        self._reader = asyncio.create_task(self._read())

    async def exchange(self, name: str, request: Any, deadline: float | None) -> Any:
        if self.error is not None:
            raise self.error.with_traceback(None)
        call_id = next(self._call_ids)
        answer = self._waiting[call_id] = asyncio.get_running_loop().create_future()
        try:
            # The call goes through a queue: a caller that is cancelled during a gRPC write would cancel the stream.
            self._outbox.put_nowait(messages.make_call(call_id, name, request))
            if deadline is None:
                return messages.take_reply(await answer)
            async with asyncio.timeout_at(deadline):
                return messages.take_reply(await answer)
        except TimeoutError:
            raise CallTimeoutError(f"{name}: no answer in time") from None
        finally:
            del self._waiting[call_id]

    def post(self, name: str, request: Any) -> None:
        self._outbox.put_nowait(messages.make_call(next(self._call_ids), name, request))

    async def end(self) -> None:
        self._call.cancel()
        await self._reader

    async def _outgoing(self) -> AsyncIterator[messages.SentCall]:
        while (call := await self._outbox.get()) is not None:
            yield call

    async def _read(self) -> None:
        self.error = await self._hand_out_replies()
        self._outbox.put_nowait(None)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.error)
        self._on_end(self)

    async def _hand_out_replies(self) -> KVServiceError:
        """Pass replies to their callers until the stream ends. Returns the error with which it ended."""
        try:
            while (reply := await self._call.read()) is not grpc.aio.EOF:
                answer = self._waiting.get(reply.call_id)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        except grpc.RpcError as broken:
            return channel.to_error(broken)
        except asyncio.CancelledError:
            # Cancelling the gRPC call raises this in its reads; the task itself is never cancelled.
            return ConnectionLostError("the session's stream was closed here")
        return ConnectionLostError("the daemon ended the stream")
