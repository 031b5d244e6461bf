"""Calls of a client's sessions: seen, changed, or failed, as the daemon or the network could have done it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from unittest.mock import patch

from kvservice.client.connection import SessionConnection

# Sends a call: the one that was to be sent, another request in its place, or another call. Returns its response.
Send = Callable[..., Awaitable[Any]]
Around = Callable[[str, Any, Send], Awaitable[Any]]


@contextlib.contextmanager
def around_calls(around: Around) -> Iterator[None]:
    """Let `around(name, request, send)` stand in the way of each call of the sessions of this process."""
    call_until = SessionConnection.call_until

    async def call(connection: SessionConnection, deadline: float | None, name: str, request: Any, *_: object) -> Any:
        async def send(changed: Any = request, name: str = name) -> Any:
            return await call_until(connection, deadline, name, changed)

        return await around(name, request, send)

    async def begin(connection: SessionConnection, name: str, request: Any, _: float | None = None) -> LateCall:
        return LateCall(lambda deadline: call(connection, deadline, name, request))

    with patch.object(SessionConnection, "call_until", call), patch.object(SessionConnection, "begin", begin):
        yield


class LateCall:
    """See BegunCall in connection.py. It is made when its answer is waited for."""

    def __init__(self, call: Callable[[float | None], Awaitable[Any]]) -> None:
        self._call = call

    async def answer(self, deadline: float | None) -> Any:
        return await self._call(deadline)

    def drop(self) -> None:
        """It was not made."""


@contextlib.contextmanager
def seen_calls() -> Iterator[list[tuple[str, Any]]]:
    """Yield a list of the calls that were sent, with their requests."""
    seen: list[tuple[str, Any]] = []

    async def noted(name: str, request: Any, send: Send) -> Any:
        seen.append((name, request))
        return await send()

    with around_calls(noted):
        yield seen


@contextlib.contextmanager
def failing_calls(errors: dict[str, BaseException], *, executed: bool = False) -> Iterator[None]:
    """Let the next call of each of these names fail with its error. `executed`: the daemon executes it before. An error
    that was raised is removed from `errors`."""

    async def failed(name: str, request: Any, send: Send) -> Any:  # noqa: ARG001
        error = errors.pop(name, None)
        if error is None:
            return await send()
        if executed:
            await send()
        raise error

    with around_calls(failed):
        yield


@contextlib.contextmanager
def changed_calls(change: Callable[[str, Any], None], *, responses: bool = False) -> Iterator[None]:
    """Let `change(name, message)` change each request before it is sent; with `responses`, each response."""

    async def changed(name: str, request: Any, send: Send) -> Any:
        if not responses:
            change(name, request)
        response = await send()
        if responses:
            change(name, response)
        return response

    with around_calls(changed):
        yield


@contextlib.contextmanager
def lost_posts() -> Iterator[None]:
    """Lose the calls whose answers nobody waits for."""
    with patch.object(SessionConnection, "post", lambda *_: None):
        yield
