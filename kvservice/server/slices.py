"""Runs operations of the block manager in slices on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

from kvservice.blocks import Slices

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")

# The pause between two slices. A call needs several iterations of the event loop; without a pause it would wait for a
# slice in each of them.
PAUSE_S: Final = 0.001

# An answer, or a task that returns it.
Answer: TypeAlias = AnswerT | asyncio.Task[AnswerT]


def in_slices(slices: Slices[T], then: Callable[[T], AnswerT]) -> Answer[AnswerT]:
    """Run the first slice now. If there are more, return a task that runs them with pauses for other calls.

    `then` makes the answer from the result. Errors of the first slice are raised here, later ones by the task. The task
    must not be cancelled, because a started operation has to complete.
    """
    try:
        next(slices)
    except StopIteration as end:
        return then(end.value)
    task = asyncio.get_running_loop().create_task(_rest(slices, then))
    task.add_done_callback(_look_at)
    return task


def _look_at(task: asyncio.Task[AnswerT]) -> None:
    """Retrieve the task's exception, so that asyncio does not log it if no caller waits any more."""
    if not task.cancelled():
        task.exception()


async def _rest(slices: Slices[T], then: Callable[[T], AnswerT]) -> AnswerT:
    while True:
        await asyncio.sleep(PAUSE_S)
        try:
            next(slices)
        except StopIteration as end:
            return then(end.value)
