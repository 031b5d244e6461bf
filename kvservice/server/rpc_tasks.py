"""gRPC's tasks of an RPC: an outer one that listens for its end, and an inner one that handles it.

A handler runs in the inner task. When that is cancelled, gRPC sends nothing and goes on holding the RPC, with an answer
of megabytes that its client does not read, until the client ends it. When the outer one is cancelled as well, nobody
holds the RPC any more: gRPC resets the stream and frees the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeAlias

AnyTask: TypeAlias = "asyncio.Task[Any]"

# gRPC's function. Where it has another name, stalled RPCs are held until their clients end them.
_OUTER: Final = "_schedule_rpc_coro"
# The outer task of the RPC whose inner task this is.
OUTER_TASK: ContextVar[AnyTask | None] = ContextVar("kvservice_outer_task", default=None)


def task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    *,
    context: Context | None = None,
    **options: Any,
) -> AnyTask:
    """For the event loop of gRPC's servers: has `OUTER_TASK` set in inner tasks."""
    creator = asyncio.current_task(loop)
    if creator is not None and getattr(creator.get_coro(), "__name__", "") == _OUTER:
        context = copy_context() if context is None else context
        context.run(OUTER_TASK.set, creator)
    return asyncio.Task(coroutine, loop=loop, context=context, **options)
