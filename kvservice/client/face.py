"""What a face of the client gives its session's connections: how it waits, and streams. The blocking one's coroutines
never suspend."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from kvservice.errors import CallTimeoutError, ConnectionLostError, KVServiceError, TLSHandshakeError

T = TypeVar("T")

# Between attempts to reach a daemon.
PAUSE_S = 0.02


class Signal(Protocol):
    """Set or not. Whoever waits is woken when it is set."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    async def wait(self, timeout_s: float) -> bool:
        """Whether it was set in that time."""


class Turns(Protocol):
    """Lets so many calls through at a time as the face allows."""

    async def take(self, timeout_s: float | None) -> bool:
        """Whether it was this call's turn in that time; None: wait without a limit."""

    def give_back(self) -> None: ...


class Background(Protocol):
    """Work that goes on by itself."""

    async def stop(self) -> None:
        """Returns when it has ended. It must have been told to."""


class Face(Protocol):
    """How it waits."""

    def clock(self) -> float:
        """Seconds, of a monotonic clock."""

    def signal(self) -> Signal: ...

    def turns(self) -> Turns: ...

    def start(self, work: Coroutine[Any, Any, None]) -> Background: ...

    def lock(self) -> AbstractAsyncContextManager[object]: ...

    async def run(self, work: Callable[..., T], *args: Any) -> T: ...


class Connection(Protocol):
    """One stream, from its opening to its end."""

    error: KVServiceError | None
    """Why it ended."""

    async def exchange(self, name: str, request: Any, deadline: float | None) -> Any:
        """The answer to one call, or the error raised that is its answer. Raises `error` if the stream ends before,
        which is a ConnectionLostError unless the daemon said why; CallTimeoutError at the deadline, a time of the
        face's clock."""

    async def end(self) -> None: ...


# Begins a stream, and calls what it is given with it when it has ended. The second argument: whether the stream waits
# while there is no connection to the daemon, or ends.
OpenConnection = Callable[[Callable[[Connection], None], bool], Connection]


async def first_answer(face: Face, ask: Callable[[float], Awaitable[T]], wait_s: float) -> T:
    """A daemon's answer, once it listens; `ask` takes a time limit in seconds. What TLS does not agree on does not
    change by waiting: TLSHandshakeError is raised at once. Raises ConnectionLostError when the time is over."""
    deadline = face.clock() + wait_s
    never = face.signal()
    while True:
        try:
            return await ask(max(deadline - face.clock(), PAUSE_S))
        except TLSHandshakeError:
            raise
        except (ConnectionLostError, CallTimeoutError) as error:
            if face.clock() + PAUSE_S >= deadline:
                raise ConnectionLostError(f"no daemon has answered for {wait_s:g} s ({error})") from None
            await never.wait(PAUSE_S)
