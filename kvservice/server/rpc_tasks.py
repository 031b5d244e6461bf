"""The two tasks that gRPC runs for each RPC: an outer task waits for the end of the RPC, an inner task handles it.

A handler runs in the inner task. If only the inner task is cancelled, gRPC sends nothing and keeps the RPC, including a
response of megabytes that the client does not read, until the client ends it. If the outer task is cancelled too, gRPC
resets the stream and frees the response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final, TypeAlias

AnyTask: TypeAlias = "asyncio.Task[Any]"

# The coroutine of the outer task in gRPC. If a gRPC version renames it, stalled RPCs stay open until their clients end
# them.
_OUTER: Final = "_schedule_rpc_coro"
# The outer task of the RPC that the current task handles.
OUTER_TASK: ContextVar[AnyTask | None] = ContextVar("kvservice_outer_task", default=None)


def task_factory(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    *,
    context: Context | None = None,
    **options: Any,
) -> AnyTask:
    """Task factory for the event loop of gRPC's servers. It sets `OUTER_TASK` in inner tasks."""
    creator = asyncio.current_task(loop)
    if creator is not None and getattr(creator.get_coro(), "__name__", "") == _OUTER:
        context = copy_context() if context is None else context
        context.run(OUTER_TASK.set, creator)
    return asyncio.Task(coroutine, loop=loop, context=context, **options)
