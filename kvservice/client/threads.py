"""The waiting primitives and streams of the sync API. They block, so the client's coroutines never suspend."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

import grpc

from kvservice.client import channel
from kvservice.client.waiting import SessionStream
from kvservice.client.watchdog import Watchdog
from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError
from kvservice.v1 import session_pb2, session_pb2_grpc

P = ParamSpec("P")
T = TypeVar("T")
SelfT = TypeVar("SelfT")


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over a blocking stream to completion and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    raise AssertionError("a blocking stream suspended")


def blocking(method: Callable[Concatenate[SelfT, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a blocking version of an async method."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(method(self._core, *args, **kwargs))

    return call


class _ThreadSignal:
    """See Signal in waiting.py."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set
        self.clear = self._event.clear

    async def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class _ThreadTurns:
    """See Turns in waiting.py. The limit is one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def take(self, timeout_s: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0))

    def give_back(self) -> None:
        self._lock.release()


class _Lock:
    """A lock for coroutines that never suspend."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class _Thread:
    """See Background in waiting.py."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._thread = threading.Thread(target=finish, args=(work,), name="kvservice-reconnects", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._thread.join()


class ThreadWaiting:
    """See Waiting in waiting.py."""

    clock = staticmethod(time.monotonic)
    signal = _ThreadSignal
    turns = _ThreadTurns
    start = _Thread
    lock = _Lock

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)


class BlockingStream:
    """See SessionStream in waiting.py. It runs one call at a time. A call that reaches its deadline cancels the whole
    stream, because gRPC's blocking read of a reply has no timeout."""

    def __init__(
        self,
        stub: session_pb2_grpc.SessionServiceStub,
        headers: tuple[tuple[str, str], ...],
        watchdog: Watchdog,
        on_end: Callable[[SessionStream], None],
        waits_for_daemon: bool,
    ) -> None:
        self.error: KVServiceError | None = None
        self._watchdog = watchdog
        self._on_end = on_end
        self._expired: int | None = None
        self._call_ids = itertools.count(1)
        self._requests: queue.SimpleQueue[session_pb2.Call | None] = queue.SimpleQueue()
        self._replies = stub.Connect(iter(self._requests.get, None), metadata=headers, wait_for_ready=waits_for_daemon)
        if not self._replies.add_callback(self._has_ended):
            self._has_ended()

    async def exchange(self, name: str, request: Any, deadline: float | None) -> Any:
        call_id = next(self._call_ids)
        watched = None if deadline is None else self._watchdog.watch(deadline, lambda: self._expire(call_id))
        self._requests.put(channel.make_call(call_id, name, request))
        try:
            # Skip the replies of posted calls, and of an earlier call that was interrupted while it waited.
            while (reply := next(self._replies)).call_id != call_id:
                pass
            return channel.take_reply(reply)
        except (grpc.RpcError, StopIteration):
            why = self._why()
            if self._expired == call_id:
                raise CallTimeoutError(f"{name}: no answer in time") from None
            raise why.with_traceback(None) from None
        finally:
            if watched is not None:
                self._watchdog.forget(watched)

    def post(self, name: str, request: Any) -> None:
        self._requests.put(channel.make_call(next(self._call_ids), name, request))

    async def end(self) -> None:
        self._replies.cancel()

    def _expire(self, call_id: int) -> None:
        self._expired = call_id
        self._replies.cancel()

    def _has_ended(self) -> None:
        """Handle the end of the stream. Runs on a thread of gRPC, or on the caller's if the stream ended at once."""
        self._requests.put(None)  # ends the iterator that gRPC's sending thread waits on
        self._why()
        self._on_end(self)

    def _why(self) -> KVServiceError:
        """Return the error with which the stream has ended."""
        if self.error is None:
            code = self._replies.code()
            if self._expired is not None:
                self.error = ConnectionLostError("a call was not answered in time")
            elif code is grpc.StatusCode.OK:
                self.error = ConnectionLostError("the daemon ended the stream")
            elif code is grpc.StatusCode.CANCELLED:
                self.error = ConnectionLostError("the session's stream was closed here")
            else:
                self.error = channel.to_error(self._replies)
        return self.error
