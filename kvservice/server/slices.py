"""Operations of the bookkeeping that are done in slices, driven by the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

from kvservice.blocks import Slices

T = TypeVar("T")
AnswerT = TypeVar("AnswerT")

# Between two slices. A call takes several turns of the event loop, and one in each pause would take as many slices.
PAUSE_S: Final = 0.001

# What there is to answer, or a task that is going to say it.
Answer: TypeAlias = AnswerT | asyncio.Task[AnswerT]


def in_slices(slices: Slices[T], then: Callable[[T], AnswerT]) -> Answer[AnswerT]:
    """Do the first slice now. If there are more, others get their turns between them, and the answer is a task.

    `then` makes the answer from the result. Errors of the first slice are raised here, later ones by the task. It must
    not be cancelled: what was begun is to be ended.
    """
    try:
        next(slices)
    except StopIteration as end:
        return then(end.value)
    task = asyncio.get_running_loop().create_task(_rest(slices, then))
    task.add_done_callback(_look_at)
    return task


def _look_at(task: asyncio.Task[AnswerT]) -> None:
    """Where nobody waits for the answer any more, an error is no news."""
    if not task.cancelled():
        task.exception()


async def _rest(slices: Slices[T], then: Callable[[T], AnswerT]) -> AnswerT:
    while True:
        await asyncio.sleep(PAUSE_S)
        try:
            next(slices)
        except StopIteration as end:
            return then(end.value)
