"""Helpers of the event loop: timers, operations in slices, work that ends although its caller has left."""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from kvservice.blocks.slices import Waits


class Clock(Protocol):
    """The clock of sessions. Tests pass a clock that they advance."""

    def time(self) -> float:
        """Return the time in seconds. It never goes back."""

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> asyncio.TimerHandle:
        """Call `callback(*args)` after `delay` seconds, unless the handle is cancelled first."""


class SystemClock:
    """The system's monotonic time and the timers of the running event loop."""

    def time(self) -> float:
        return time.monotonic()

    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay, callback, *args)


# ---- answers that are not ready at once

AnswerT = TypeVar("AnswerT")

# The pause between two slices. A call needs several iterations of the event loop; without a pause it would wait for a
# slice in each of them.
PAUSE_S: Final = 0.001

# An answer, or a task that returns it. The task must not be cancelled, because a started operation has to complete.
Answer: TypeAlias = AnswerT | asyncio.Task[AnswerT]


@dataclass
class Caller:
    """Whoever waits for an answer. A caller that has `gone` may already use its memory for something else."""

    gone: bool = False


def in_slices(slices: Waits[AnswerT]) -> Answer[AnswerT]:
    """Run the first slice now. If there are more, return a task that runs them with pauses for other calls, and waits
    for what they yield.

    Errors of the first slice are raised here, later ones by the task.
    """
    try:
        event = next(slices)
    except StopIteration as end:
        answer: AnswerT = end.value
        return answer
    return to_the_end(drained(slices, event))


def waiting(coroutine: Coroutine[Any, Any, AnswerT]) -> Waits[AnswerT]:
    """Run a coroutine to its end, as a part of an operation in slices, which so ends together with its reply."""
    task = to_the_end(coroutine)
    yield asyncio.wait((task,))
    return task.result()


async def finished(slices: Waits[AnswerT]) -> AnswerT:
    """Run an operation in slices to its end."""
    answer = in_slices(slices)
    return await answer if isinstance(answer, asyncio.Task) else answer


async def drained(slices: Waits[AnswerT], event: Awaitable[object] | None) -> AnswerT:
    """Run slices with pauses for other calls, after a slice that has yielded this."""
    while True:
        await (asyncio.sleep(PAUSE_S) if event is None else event)
        try:
            event = next(slices)
        except StopIteration as end:
            answer: AnswerT = end.value
            return answer


def to_the_end(coroutine: Coroutine[Any, Any, AnswerT]) -> asyncio.Task[AnswerT]:
    """Return a task that runs the coroutine, whether or not a caller waits for it."""
    task = asyncio.get_running_loop().create_task(coroutine)
    task.add_done_callback(_look_at)
    return task


@types.coroutine
def resumed(begun: Coroutine[Any, Any, AnswerT], event: Any) -> Generator[Any, Any, AnswerT]:
    """Await the rest of a coroutine whose first part was run with `send`, up to this event."""
    try:
        while True:
            try:
                yield event
            except BaseException as error:  # the caller is cancelled
                event = begun.throw(error)
            else:
                event = begun.send(None)
    except StopIteration as end:
        answer: AnswerT = end.value
        return answer


async def cancelled(begun: Coroutine[Any, Any, object]) -> None:
    """Cancel a coroutine whose first part was run with `send`, and wait for its end. A coroutine that is only dropped
    is closed, which its handlers of CancelledError do not notice."""
    with contextlib.suppress(asyncio.CancelledError, StopIteration):
        await resumed(begun, begun.throw(asyncio.CancelledError()))


async def despite_leaving(work: Callable[[Caller], Coroutine[Any, Any, AnswerT]]) -> AnswerT:
    """Run work to its end, even if its caller goes away meanwhile. The work is given the caller."""
    caller = Caller()
    try:
        return await asyncio.shield(to_the_end(work(caller)))
    except asyncio.CancelledError:
        caller.gone = True
        raise


async def uninterrupted(work: Awaitable[None]) -> None:
    """Wait for work that must not be cancelled, because it uses memory. A cancellation is raised after its end."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _look_at(task: asyncio.Task[AnswerT]) -> None:
    """Retrieve the task's exception, so that asyncio does not log it if no caller waits any more."""
    if not task.cancelled():
        task.exception()
