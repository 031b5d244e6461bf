"""A session's connection to the daemon, which reconnects in the background. The sync and async API share it: its
coroutines wait through the `Waiting` of each API, and those of the sync API never suspend.

    connected ── stream ends ──▶ broken: calls wait ── reconnect_wait_s ──▶ away: calls fail immediately
        ▲                                │                                     │
        └────────── reattached ──────────┴─────────────────────────────────────┘
    any ── closed by the client, or by the daemon, or taken by another client ──▶ ended: calls raise the reason

A session may be reattached by another process of the daemon, which has taken its sequences over. `num_restarts` counts
these processes: what the session shared with the one before, such as regions, lanes and mappings, is gone.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import secrets
import threading
import weakref
from collections.abc import Awaitable, Callable, Container, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol, TypeVar

from kvservice.client.channel import MAX_SENDS, repeatable
from kvservice.client.messages import MAX_JOINED_CALLS, time_limit
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    FailedPreconditionError,
    KVServiceError,
    NotFoundError,
    RegionsNotAllowedError,
    RestartingError,
    TLSHandshakeError,
    UnauthenticatedError,
    UnknownRegionError,
)
from kvservice.v1 import pool_pb2, session_pb2

T = TypeVar("T")

# Seconds between attempts to reach a daemon.
PAUSE_S = 0.02


class Signal(Protocol):
    """A flag. `wait` returns when it is set, as with threading.Event."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    async def wait(self, timeout_s: float) -> bool:
        """Return whether the flag was set within the timeout."""


class Turns(Protocol):
    """A semaphore for calls in flight. Each API sets its own limit."""

    def take_now(self) -> bool:
        """Return whether the semaphore was acquired without waiting."""

    async def take(self, timeout_s: float | None) -> bool:
        """Return whether the semaphore was acquired within the timeout; None: no limit."""

    def give_back(self) -> None: ...


class Background(Protocol):
    """A background task."""

    async def stop(self) -> None:
        """Wait until the task has ended. The caller has already asked it to end."""


class Waiting(Protocol):
    """The waiting primitives of one API: threads or asyncio."""

    def clock(self) -> float:
        """Return the time of a monotonic clock in seconds."""

    def signal(self) -> Signal: ...

    def turns(self) -> Turns: ...

    def start(self, work: Coroutine[Any, Any, None]) -> Background: ...

    def lock(self) -> AbstractAsyncContextManager[object]: ...

    async def run(self, work: Callable[..., T], *args: Any) -> T: ...


# How long the daemon may take to end a stream that the client has closed. Then the client cancels it, which it does not
# do at first, because gRPC's server for Python loses 100 bytes with each cancelled stream.
END_S: Final = 0.5


class BegunCall(Protocol):
    """A call that was sent ahead of others, and whose answer is waited for later."""

    async def answer(self, deadline: float | None) -> Any:
        """Return the response, or raise the error, see SessionStream.exchange. Called once."""

    def drop(self) -> None:
        """Do not keep the answer: nobody waits for it any more."""


class SessionStream(Protocol):
    """One gRPC stream of a session."""

    error: KVServiceError | None
    """The error with which the stream ended; None while it is open."""
    max_calls: int
    """How many calls that wait may go to the daemon as one message, see AttachResponse; 1 until it is attached."""

    async def exchange(self, name: str, request: Any, deadline: float | None) -> Any:
        """Send one call and return its response, or raise the error in the response.

        Raises `error` if the stream ends before the response arrives: ConnectionLostError, unless the daemon gave a
        reason. Raises CallTimeoutError at the deadline, a time of `Waiting.clock`.
        """

    def begin(self, name: str, request: Any) -> BegunCall:
        """Send one call. Others may be sent before it is answered; they are executed in order. Raises `error` if the
        stream has ended."""

    def post(self, name: str, request: Any) -> None:
        """Send one call without waiting for its response, which is dropped. Calls are executed in order."""

    async def end(self) -> None:
        """End the stream: after what was posted, or at once if a call is under way or the daemon does not answer."""


# Opens a stream. The first argument is a callback that receives the stream when it has ended. The second is whether the
# stream waits while there is no connection to the daemon; otherwise it ends.
OpenStream = Callable[[Callable[[SessionStream], None], bool], SessionStream]


async def once_more(
    waiting: Waiting,
    ask: Callable[[], Awaitable[T]],
    wait_s: float,
    passing: type[KVServiceError] | tuple[type[KVServiceError], ...],
) -> T:
    """Retry `ask` for `wait_s` seconds while it raises errors that pass when a new process of the daemon is there, and
    return its answer. Raises the last of them, and all others immediately, also a failed TLS handshake."""
    deadline = waiting.clock() + wait_s
    never = waiting.signal()
    while True:
        try:
            return await ask()
        except passing as error:
            if isinstance(error, TLSHandshakeError) or waiting.clock() + PAUSE_S >= deadline:
                raise
            await never.wait(PAUSE_S)


async def first_answer(waiting: Waiting, ask: Callable[[float], Awaitable[T]], wait_s: float) -> T:
    """Retry `ask` until the daemon answers, and return the answer. `ask` takes a time limit in seconds.

    Raises ConnectionLostError after `wait_s` seconds. Raises TLSHandshakeError immediately, because waiting does not
    fix a failed handshake.
    """
    deadline = waiting.clock() + wait_s
    never = waiting.signal()
    while True:
        try:
            return await ask(max(deadline - waiting.clock(), PAUSE_S))
        except TLSHandshakeError:
            raise
        except (ConnectionLostError, CallTimeoutError) as error:
            if waiting.clock() + PAUSE_S >= deadline:
                raise ConnectionLostError(f"no daemon has answered for {wait_s:g} s ({error})") from None
            await never.wait(PAUSE_S)


class OwnProcess:
    """Remembers the process in which it was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise FailedPreconditionError in a process that was forked from this one."""
        if os.getpid() != self._pid:
            raise FailedPreconditionError(
                f"the client belongs to process {self._pid}, from which this one was forked: make one in a process "
                "that was started anew"
            )


# Default time that calls wait for a broken connection to be restored: longer than a daemon takes to restart.
RECONNECT_WAIT_S = 10.0
# Time limit of one attempt to attach. It is long because gRPC tries to connect only while a call waits for it.
ATTEMPT_S = 5.0
# Pause between attempts: it starts at PAUSE_S and doubles up to a limit, which is short while calls wait for a daemon
# that has gone or is being replaced.
QUICK_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0

# After these nobody knows whether the daemon has executed a call that was sent.
UNANSWERED = (CallTimeoutError, ConnectionLostError)
# The daemon's answer if the session is closed or belongs to another client. Further attempts cannot succeed.
_SESSION_OVER = (FailedPreconditionError, NotFoundError)
# Errors after which a new stream may succeed. The daemon ends the streams of a removed token; the client may have a new
# token by then, because each attempt to attach reads the token again.
_STREAM_OVER = (ConnectionLostError, UnauthenticatedError)


class CallGuard(Protocol):
    """Lets calls wait while others that were cut short are settled. See cut_calls. `settles` has the names of the calls
    that are settled."""

    @property
    def settles(self) -> Container[str]: ...

    pending: bool
    in_flight: set[int]
    idle: Signal

    async def settled(self, deadline: float | None) -> None: ...

    def add(self, name: str, request: Any, correct: Correct | None = None) -> None: ...


# Corrects handles after a call that was cut short: gets the answer, and the result of the undoing.
Correct = Callable[[Any, Any], object]


class Kernels(Protocol):
    """Kernels that this process launches on the mapped pool."""

    @property
    def is_busy(self) -> bool: ...

    def wait(self) -> None: ...


class SessionConnection:
    """The connection of one session. With the sync API its coroutines never suspend. `timeout_s` is the default time
    limit of calls in seconds; None: no limit. With `on_break`, a connection that breaks ends instead of reconnecting,
    and calls it on any thread."""

    def __init__(
        self,
        waiting: Waiting,
        open_stream: OpenStream,
        token: bytes,
        *,
        timeout_s: float | None,
        reconnect_wait_s: float,
        on_break: Callable[[KVServiceError], None] | None = None,
    ) -> None:
        self.process = OwnProcess()
        self.waiting = waiting
        self._on_break = on_break
        self._open_stream = open_stream
        self._token = token
        self._timeout_s = timeout_s
        self._reconnect_wait_s = reconnect_wait_s
        self._turns = waiting.turns()
        # Creates a lock, and runs a function that blocks: the async API in a thread.
        self.lock = waiting.lock
        self.run = waiting.run
        # Identifies this object to the daemon across all streams that it attaches.
        self.holder = secrets.randbelow((1 << 64) - 1) + 1
        # The ids of requests, see `next_request_id`.
        self.request_ids = itertools.count(secrets.randbits(62) + 1)
        # `send` waits for these kernels as long as they exist, and gives calls that are cut short to this guard.
        self.kernels: weakref.WeakSet[Kernels] = weakref.WeakSet()
        self.cut: CallGuard | None = None
        self._state_lock = threading.Lock()  # several threads may notice a break
        self._stream: SessionStream | None = None
        self._attempt: SessionStream | None = None
        self._mending: Background | None = None
        self._beside: Background | None = None
        # The process of the daemon that has attached the session, see AttachResponse; 0: none yet.
        self._daemon_start = 0
        self.num_restarts = 0
        # Set while connected, and after the session has ended.
        self._connected_or_over = waiting.signal()
        # Set after the session has ended.
        self._over = waiting.signal()
        self._ended: KVServiceError | None = None
        self._broken_at = 0.0
        self._cause: KVServiceError = ConnectionLostError("the session was never attached")

    async def connect(self, wait_s: float) -> int:
        """Attach for the first time and return the session's id. The limit is `wait_s` seconds, or `timeout_s` of the
        session if shorter. Raises UnknownSessionError, and ConnectionLostError, immediately if the daemon cannot be
        reached."""
        stream, attached = await self._attach(min(wait_s, self._timeout_s or wait_s), reconnects=False)
        self._join(stream, attached.daemon_start)
        return int(attached.session_id)

    @property
    def connected(self) -> bool:
        """Whether there is a stream now."""
        return (stream := self._stream) is not None and stream.error is None

    @property
    def ended(self) -> bool:
        """Whether the connection is closed, or will not come back."""
        return self._ended is not None

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background, as long as the connection is not closed. There is one at a time."""
        self._beside = self.waiting.start(work)

    async def pause(self, wait_s: float) -> None:
        """Wait for some seconds, or until the connection has ended."""
        await self._over.wait(wait_s)

    def set_time_limit(self, timeout_s: float | None) -> None:
        """Change the default time limit of calls, in seconds; None: no limit."""
        self._timeout_s = timeout_s

    def next_request_id(self) -> int:
        return next(self.request_ids)

    async def send(
        self,
        name: str,
        request: Any,
        timeout_s: float | None = None,
        *,
        correct: Correct | None = None,
        repeats: bool = False,
    ) -> Any:
        """Send a request of a session and return its response, after the kernels that this process has launched: the
        call may end a step, after which other sequences use its blocks.

        A call that is cut short is settled in the background, see `cut_calls`, with `correct`. With `repeats`, the
        caller makes it again itself."""
        deadline = self.deadline(timeout_s)
        if self.kernels:
            await self.drain()
        cut, on_cut = self.cut, None
        if cut is not None and name in cut.settles and not repeats:
            on_cut = functools.partial(cut.add, name, request, correct)
        return await self.call_until(deadline, name, request, cut, on_cut)

    async def drain(self) -> None:
        """Wait until the kernels that this process has launched for the session are done."""
        for kernels in list(self.kernels):
            if kernels.is_busy:
                await self.run(kernels.wait)

    async def call(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        """Send one call and return its response; see `call_until`. `timeout_s` is in seconds; None: the default."""
        return await self.call_until(self.deadline(timeout_s), name, request)

    async def call_until(
        self,
        deadline: float | None,
        name: str,
        request: Any,
        guard: CallGuard | None = None,
        on_cut: Callable[[], object] | None = None,
    ) -> Any:
        """Send one call and return its response. The call is sent again if its stream breaks and it is repeatable, and
        if the daemon has not executed it because it is being replaced by a new process. With `guard` it is not sent
        while others are settled; `on_cut` is called if it was sent and the caller does not get its answer, also because
        the caller is cancelled or interrupted.

        Raises the daemon's errors; CallTimeoutError; ConnectionLostError if the stream broke and it is unknown whether
        the call was executed. Without a connection, raises DaemonAwayError, or UnauthenticatedError if the daemon
        rejects the client's token: after the wait of `reconnect_wait_s`, then immediately. Raises
        FailedPreconditionError in a forked process.
        """
        self.process.check()
        while True:
            if guard is not None and guard.pending:
                await guard.settled(deadline)
            if not self._turns.take_now():
                await self._take_turn(name, deadline)
            if guard is None or not guard.pending:
                break
            self._turns.give_back()
        sends, is_open, refused_at = 0, False, math.inf
        try:
            if guard is not None:
                guard.in_flight.add(id(request))
            while True:
                stream = self._stream
                if stream is None or stream.error is not None:
                    stream = await self._connected(deadline)
                try:
                    is_open = True
                    return await stream.exchange(name, request, deadline)
                except RestartingError:
                    is_open = sends > 0
                    refused_at = min(refused_at, self.waiting.clock())
                    if not await self._pause(refused_at, deadline):
                        raise
                except _STREAM_OVER as over:
                    self._broke(stream)
                    sends += 1
                    if sends < MAX_SENDS and repeatable(name):
                        continue
                    if isinstance(over, ConnectionLostError):
                        raise
                    raise ConnectionLostError(f"{name}: its stream ended before the answer came ({over})") from None
        except BaseException as error:
            is_answer = isinstance(error, KVServiceError) and not isinstance(error, UNANSWERED)
            if on_cut is not None and is_open and not is_answer:
                on_cut()
            raise
        finally:
            if guard is not None:
                guard.in_flight.discard(id(request))
                if guard.pending:
                    guard.idle.set()
            self._turns.give_back()

    async def begin(self, name: str, request: Any, timeout_s: float | None = None) -> BegunCall:
        """Send one call without waiting for its response, so that the caller can make the next one meanwhile. It is
        never sent again. `timeout_s` limits the wait for its turn. Raises the errors of a call that is not sent, see
        `call_until`."""
        self.process.check()
        deadline = self.deadline(timeout_s)
        if not self._turns.take_now():
            await self._take_turn(name, deadline)
        try:
            return (await self._connected(deadline)).begin(name, request)
        finally:
            self._turns.give_back()

    async def _take_turn(self, name: str, deadline: float | None) -> None:
        """Wait for the session's turn. Raises CallTimeoutError."""
        if not await self._turns.take(None if deadline is None else deadline - self.waiting.clock()):
            raise CallTimeoutError(f"{name}: it was not its turn in time, other calls of the session are under way")

    async def _pause(self, begun_at: float, deadline: float | None) -> bool:
        """Wait before a call is sent again that was refused first at `begun_at`. Returns False if it has waited as long
        as calls wait for a connection, or if the connection does not reconnect."""
        left_s = self.left_s(deadline, begun_at + self._reconnect_wait_s - self.waiting.clock())
        if left_s <= 0 or self._on_break is not None:
            return False
        await self._over.wait(min(PAUSE_S, left_s))
        return True

    async def ready(self, deadline: float | None = None) -> None:
        """Wait for the connection. Raises the errors of a call without a connection."""
        await self._connected(deadline)

    async def with_one_process(self, work: Callable[[], Awaitable[T]], deadline: float | None = None) -> T:
        """Run work that needs the same process of the daemon for all its calls, because one presents what another has
        got. It is run again if a new process has taken over meanwhile."""
        while True:
            num_restarts = self.num_restarts
            try:
                return await work()
            except (ConnectionLostError, RegionsNotAllowedError, UnknownRegionError):
                await self.call_until(deadline, "ping", pool_pb2.PingRequest())
                if self.num_restarts == num_restarts:
                    raise

    def post(self, name: str, request: Any) -> None:
        """Send one call whose response does not matter. It is not repeated, and dropped without a connection."""
        stream = self._stream
        if stream is not None and stream.error is None and self.process.is_here:
            stream.post(name, request)

    def deadline(self, timeout_s: float | None = None) -> float | None:
        """Return the deadline, a time of `Waiting.clock`, of a call that starts now, or None for no limit. Raises
        InvalidArgumentError."""
        limit_s = self._timeout_s if timeout_s is None else time_limit(timeout_s)
        return None if limit_s is None else self.waiting.clock() + limit_s

    def limit_s(self, timeout_s: float | None) -> float | None:
        """Return the time limit of a call in seconds, None for no limit. Raises InvalidArgumentError."""
        return self._timeout_s if timeout_s is None else time_limit(timeout_s)

    def left_s(self, deadline: float | None, most_s: float) -> float:
        """Return the seconds until the deadline, at most `most_s`."""
        return most_s if deadline is None else min(most_s, max(deadline - self.waiting.clock(), 0.0))

    def check(self, deadline: float | None = None) -> None:
        """Check the connection for work that the daemon does without a call. Raises the error that a call would raise
        if calls no longer wait for a connection, and CallTimeoutError past the deadline."""
        if self._ended is not None:
            raise self._ended.with_traceback(None)
        if self._stream is None and self.left_s(deadline, self._patience_s()) <= 0:
            raise self._away()
        if deadline is not None and self.waiting.clock() >= deadline:
            raise CallTimeoutError("no answer in time")

    async def close(self) -> bool:
        """Close the connection. Returns whether the session was still attached, as far as this client knows. Does
        nothing in a forked process: the session is the other one's."""
        if not self.process.is_here:
            return False
        held = self._end(ConnectionLostError("the session is closed"))
        for stream in (self._stream, self._attempt):
            if stream is not None:
                await stream.end()
        for background in (self._mending, self._beside):
            if background is not None:
                await background.stop()
        return held

    async def _connected(self, deadline: float | None) -> SessionStream:
        """Wait for the connection and return its stream."""
        while True:
            if self._ended is not None:
                raise self._ended.with_traceback(None)
            stream = self._stream
            if stream is None:
                await self._wait_for_stream(deadline)
            elif stream.error is None:
                return stream
            else:
                self._broke(stream)

    async def _wait_for_stream(self, deadline: float | None) -> None:
        left_s = self.left_s(deadline, self._patience_s())
        if left_s <= 0 or not await self._connected_or_over.wait(left_s):
            raise self._away()

    def _patience_s(self) -> float:
        """Return how many seconds calls may still wait for the connection."""
        return self._broken_at + self._reconnect_wait_s - self.waiting.clock()

    def _away(self) -> KVServiceError:
        """Return the error for a call that has waited long enough."""
        if not isinstance(self._cause, ConnectionLostError):
            return self._cause.with_traceback(None)
        gone_s = self.waiting.clock() - self._broken_at
        return DaemonAwayError(
            f"the daemon has been out of reach for {gone_s:.1f} s; the client goes on trying ({self._cause})"
        )

    def _broke(self, stream: SessionStream) -> None:
        """Handle the end of a stream. Several callers may report it; the first report starts reconnecting."""
        assert stream.error is not None, "it has ended"
        with self._state_lock:
            if self._stream is not stream or self._ended is not None:
                return
            self._stream = None
            if self._on_break is not None or isinstance(stream.error, _SESSION_OVER):
                self._ended = stream.error
                self._over.set()
            else:
                self._broken_at, self._cause = self.waiting.clock(), stream.error
                self._connected_or_over.clear()
                self._mending = self.waiting.start(self._mend())
        if self._on_break is not None:
            self._on_break(stream.error)

    def _join(self, stream: SessionStream, daemon_start: int) -> bool:
        """Use the stream from now on. Returns False if the session has ended, so that it is not used."""
        with self._state_lock:
            if self._ended is not None:
                return False
            self.num_restarts += self._daemon_start not in (0, daemon_start)
            self._daemon_start = daemon_start
            self._stream = stream
            self._connected_or_over.set()
        if stream.error is not None:
            self._broke(stream)
        return True

    def _end(self, error: KVServiceError) -> bool:
        """End the session. Returns False if it had already ended."""
        with self._state_lock:
            if self._ended is not None:
                return False
            self._ended = error
            self._connected_or_over.set()
            self._over.set()
            return True

    async def _mend(self) -> None:
        """Retry to attach until it succeeds or the session has ended."""
        pause_s = PAUSE_S
        while self._ended is None:
            try:
                stream, attached = await self._attach(ATTEMPT_S, reconnects=True)
            except _SESSION_OVER as over:
                self._end(over)
            except KVServiceError as error:
                self._cause = error
                await self._over.wait(pause_s)
                soon = isinstance(error, (ConnectionLostError, RestartingError)) and self._patience_s() > 0
                pause_s = min(2 * pause_s, QUICK_PAUSE_S if soon else MAX_PAUSE_S)
            else:
                if not self._join(stream, attached.daemon_start):
                    await stream.end()
                return

    async def _attach(self, wait_s: float, *, reconnects: bool) -> tuple[SessionStream, session_pb2.AttachResponse]:
        stream = self._attempt = self._open_stream(self._broke, reconnects)
        try:
            if self._ended is not None:  # `close` may have run before it could see `_attempt`
                raise self._ended.with_traceback(None)
            request = session_pb2.AttachRequest(session_token=self._token, holder=self.holder, reconnects=reconnects)
            response = await stream.exchange("attach", request, self.waiting.clock() + wait_s)
            stream.max_calls = min(max(response.max_calls, 1), MAX_JOINED_CALLS)
        except BaseException as error:
            await stream.end()
            if isinstance(error, CallTimeoutError):
                raise ConnectionLostError(f"the daemon has not answered for {wait_s:g} s") from None
            raise
        finally:
            self._attempt = None
        return stream, response
