"""The waiting primitives and streams of the sync API. They block, so the client's coroutines never suspend."""

from __future__ import annotations

import contextlib
import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

import grpc

from kvservice.client import channel, messages
from kvservice.client.connection import END_S, SessionStream
from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError
from kvservice.v1 import session_pb2_grpc

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
        return finish(method(self, *args, **kwargs))

    return call


def blocking_core(method: Callable[Concatenate[SelfT, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return a blocking version of an async method of `_core`."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return finish(method(self._core, *args, **kwargs))

    return call


class _ThreadSignal:
    """See Signal in connection.py."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set
        self.clear = self._event.clear

    async def wait(self, timeout_s: float) -> bool:
        return self._event.wait(timeout_s)


class _ThreadTurns:
    """See Turns in connection.py. The limit is one call at a time.

    KeyboardInterrupt may be raised between a lock's acquisition and the block that releases it. The lock is therefore
    reentrant: the thread that was interrupted can acquire it again, and then releases it completely."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def take_now(self) -> bool:
        return self._lock.acquire(blocking=False)

    async def take(self, timeout_s: float | None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout_s is None else max(timeout_s, 0))

    def give_back(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is released
            while True:
                self._lock.release()


class _Lock(_ThreadTurns):
    """A lock for coroutines that never suspend."""

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self.give_back()


class _Thread:
    """See Background in connection.py."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self._thread = threading.Thread(target=finish, args=(work,), name="kvservice-reconnects", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._thread.join()


class ThreadWaiting:
    """See Waiting in connection.py."""

    clock = staticmethod(time.monotonic)
    signal = _ThreadSignal
    turns = _ThreadTurns
    start = _Thread
    lock = _Lock

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)


_NO_CALL: Final = 0  # a read for it lasts until the stream ends


class _Reading:
    """The read of a call's reply, which may still be under way. Who wants the reply waits for `done`, and the next call
    for `passed`. They are latches of one lock each, for one waiter, because an interrupt cannot damage that."""

    def __init__(self, call_id: int) -> None:
        self.call_id = call_id
        self.done, self.passed = threading.Lock(), threading.Lock()
        self.done.acquire()
        self.passed.acquire()
        self.is_done = False
        # The reply, or the error, once it is there.
        self.outcome: messages.ReceivedReply | BaseException | None = None

    def wait(self, latch: threading.Lock, name: str, deadline: float | None) -> None:
        """Wait for a latch on behalf of a call. Raises CallTimeoutError."""
        if not self.is_done:
            latch.acquire(timeout=-1 if deadline is None else max(deadline - time.monotonic(), 0))
        if not self.is_done:
            raise CallTimeoutError(f"{name}: no answer in time")

    def response(self) -> Any:
        """Return the response of a read that is done, or raise the error. Called once: it does not keep the reply."""
        outcome, self.outcome = self.outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        assert outcome is not None, "it was waited for"
        return messages.take_reply(outcome)


class _Reader:
    """A thread that reads replies for callers that do not read themselves. It starts with the first read, and ends with
    the stream."""

    def __init__(self, read: Callable[[int], messages.ReceivedReply]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._reads: queue.SimpleQueue[_Reading | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self, call_id: int) -> _Reading:
        """Read in the thread. A stream that has ended is read here, which fails at once."""
        reading = _Reading(call_id)
        with self._lock:
            if not self._stopped:
                self._reads.put(reading)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvservice-replies", daemon=True)
                    self._thread.start()
                return reading
        self._finish(reading)
        return reading

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._reads.put(None)

    def _run(self) -> None:
        for reading in iter(self._reads.get, None):
            self._finish(reading)

    def _finish(self, reading: _Reading) -> None:
        try:
            reading.outcome = self._read(reading.call_id)
        except BaseException as error:
            reading.outcome = error
        reading.is_done = True
        reading.done.release()
        reading.passed.release()


class _ThreadCall:
    """See BegunCall in connection.py. The thread reads its reply, also if nobody waits."""

    def __init__(self, name: str, reading: _Reading) -> None:
        self._name, self._reading = name, reading

    async def answer(self, deadline: float | None) -> Any:
        self._reading.wait(self._reading.done, self._name, deadline)
        return self._reading.response()

    def drop(self) -> None:
        """The thread drops the reply."""


class BlockingStream:
    """See SessionStream in connection.py. It runs one call at a time, after those that were begun.

    A caller without a deadline reads the replies itself. For others a thread reads, because gRPC's blocking read has no
    timeout; and for the main thread, because an interrupt (KeyboardInterrupt) in gRPC's read can leave the locks of its
    whole channel acquired. A caller that reaches its deadline, or is interrupted, leaves the thread reading; the late
    reply is dropped, and the next call is sent when it has come, since the daemon executes the calls of a stream one
    after the other.
    """

    def __init__(
        self,
        stub: session_pb2_grpc.SessionServiceStub,
        headers: tuple[tuple[str, str], ...],
        on_end: Callable[[SessionStream], None],
        waits_for_daemon: bool,
    ) -> None:
        self.error: KVServiceError | None = None
        self.max_calls = 1  # no call waits for another
        self._on_end = on_end
        self._reader = _Reader(self._read_until)
        # The latest read in the thread, until its call or the next has waited for its end. Others have ended before.
        self._reading: _Reading | None = None
        self._exchanging = False
        self._call_ids = itertools.count(1)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies = stub.Connect(iter(self._requests.get, None), metadata=headers, wait_for_ready=waits_for_daemon)
        if not self._replies.add_callback(self._has_ended):
            self._has_ended()

    async def exchange(self, name: str, request: Any, deadline: float | None) -> Any:
        if self._reading is not None:
            self._reading.wait(self._reading.passed, name, deadline)
            self._reading = None
        if self.error is not None:
            raise self.error.with_traceback(None)
        self._exchanging = True
        try:
            call_id = next(self._call_ids)
            self._requests.put(messages.make_call(call_id, name, request))
            if deadline is None and threading.current_thread() is not threading.main_thread():
                return messages.take_reply(self._read_until(call_id))
            reading = self._start_reading(call_id)
            reading.wait(reading.done, name, deadline)
            self._reading = None
            return reading.response()
        finally:
            self._exchanging = False

    def begin(self, name: str, request: Any) -> _ThreadCall:
        if self.error is not None:
            raise self.error.with_traceback(None)
        call_id = next(self._call_ids)
        self._requests.put(messages.make_call(call_id, name, request))
        return _ThreadCall(name, self._start_reading(call_id))

    def _start_reading(self, call_id: int) -> _Reading:
        """Read in the thread, after what it reads now."""
        try:
            reading = self._reading = self._reader.start(call_id)
        except BaseException:  # an interrupt, or the system has no more threads: nobody may be reading the reply
            self._replies.cancel()
            raise
        return reading

    def _read_until(self, call_id: int) -> messages.ReceivedReply:
        """Read until the reply of this call. The replies of posted calls, and of calls that were interrupted before
        their read began, are skipped."""
        try:
            reply: messages.ReceivedReply
            while (reply := next(self._replies)).call_id != call_id:
                pass
            return reply
        except (grpc.RpcError, StopIteration):
            raise self._why().with_traceback(None) from None

    def post(self, name: str, request: Any) -> None:
        self._requests.put(messages.make_call(next(self._call_ids), name, request))

    async def end(self) -> None:
        try:
            if not self._exchanging and (self._reading is None or self._reading.is_done):
                self._requests.put(None)
                with contextlib.suppress(RuntimeError):  # the system has no more threads
                    self._reader.start(_NO_CALL).done.acquire(timeout=END_S)
        finally:
            self._replies.cancel()

    def _has_ended(self) -> None:
        """Handle the end of the stream. Runs on a thread of gRPC, or on the caller's if the stream ended at once."""
        self._requests.put(None)  # ends the iterator that gRPC's sending thread waits on
        self._reader.stop()
        self._why()
        self._on_end(self)

    def _why(self) -> KVServiceError:
        """Return the error with which the stream has ended."""
        if self.error is None:
            if self._replies.code() is grpc.StatusCode.OK:
                self.error = ConnectionLostError("the daemon ended the stream")
            elif channel.cancelled_here(self._replies):
                self.error = ConnectionLostError("the session's stream was closed here")
            else:
                self.error = channel.to_error(self._replies)
        return self.error
