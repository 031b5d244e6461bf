"""Interfaces that the sync and async API implement for `connection.py`: waiting, background work and streams. The
coroutines of the sync API never suspend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError, TLSHandshakeError

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


class SessionStream(Protocol):
    """One gRPC stream of a session."""

    error: KVServiceError | None
    """The error with which the stream ended; None while it is open."""

    async def exchange(self, name: str, request: Any, deadline: float | None) -> Any:
        """Send one call and return its response, or raise the error in the response.

        Raises `error` if the stream ends before the response arrives: ConnectionLostError, unless the daemon gave a
        reason. Raises CallTimeoutError at the deadline, a time of `Waiting.clock`.
        """

    def post(self, name: str, request: Any) -> None:
        """Send one call without waiting for its response, which is dropped. Calls are executed in order."""

    async def end(self) -> None: ...


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
