"""The dispatcher: what it awaits, what it remembers, what it refuses while the daemon drains."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from reply_rings import no_replies

from kvservice.blocks import BlockManager, BlocksConfig
from kvservice.blocks.plans import numpy_zeros
from kvservice.config import ServeConfig
from kvservice.errors import DrainingError, RestartingError, StaleStepError
from kvservice.server.block_calls import BlockCalls
from kvservice.server.dispatch import Dispatcher
from kvservice.server.handlers import SessionHandler, WhileDraining
from kvservice.telemetry.calls import CallTable
from kvservice.v1 import attention_pb2, blocks_pb2


def session_with(namespace: Any, access: Any) -> Any:
    """Return a session without a scheduler."""
    return SimpleNamespace(
        begin_call=lambda: None,
        namespace=namespace,
        access=access,
        replies=no_replies(),
        session_id=1,
        check_unscheduled=lambda *_: None,
        allocating=lambda _: contextlib.nullcontext(),
    )


class Access:
    """Publishes steps when the test says so."""

    def __init__(self) -> None:
        self.published = asyncio.Event()

    def publish(self, _: Any, *, to_lane: bool, run: Any) -> Any:
        assert to_lane
        assert run is None
        return None, self.published.wait()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def dispatcher_of(handlers: Any) -> Dispatcher:
    sessions: Any = SimpleNamespace(lanes=SimpleNamespace(commit_finished=lambda: None), find=lambda _: None)
    return Dispatcher(
        handlers, sessions, CallTable([handler.method for handler in handlers], numpy_zeros), None, lambda: None
    )


def test_the_response_of_a_step_waits_until_the_step_is_published() -> None:
    """The client may work on the step from the response on. The same request, sent again meanwhile, waits too."""

    async def scenario() -> None:
        manager = BlockManager(BlocksConfig(num_blocks=8, block_size=4, num_layers=1))
        engine: Any = SimpleNamespace(manager=manager, append=manager.append)
        dispatcher = dispatcher_of(BlockCalls(ServeConfig(), engine, swaps=Mock()).handlers())
        namespace, access = manager.open_namespace(1), Access()
        session = session_with(namespace, access)

        async def call(method: str, request: Any) -> Any:
            return await dispatcher.call(method, request, session, "stream", local=True)

        allocation = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[1, 2])
        await call("allocate", blocks_pb2.AllocateRequest(sequences=[allocation]))
        request = blocks_pb2.AppendRequest(request_id=1, sequence_ids=[1], token_ids=[3])
        first = asyncio.create_task(call("append", request))
        await turns()
        again = asyncio.create_task(call("append", request))
        await turns()
        assert not first.done()
        assert not again.done()
        assert dispatcher.in_flight == 2
        access.published.set()
        response = await first
        assert list(response.context_lens) == [3]
        assert await again is response
        assert await call("append", request) is response

    asyncio.run(scenario())


def test_a_step_whose_caller_has_gone_is_published() -> None:
    async def scenario() -> None:
        manager = BlockManager(BlocksConfig(num_blocks=8, block_size=4, num_layers=1))
        engine: Any = SimpleNamespace(manager=manager, open_step=manager.open_step)
        dispatcher = dispatcher_of(BlockCalls(ServeConfig(), engine, swaps=Mock()).handlers())
        namespace, done = manager.open_namespace(1), []

        async def publish() -> None:
            await asyncio.sleep(0)
            done.append(True)

        access = SimpleNamespace(publish=lambda _, to_lane, run: (None, publish()))
        session = session_with(namespace, access)
        allocation = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[1, 2])
        await dispatcher.call(
            "allocate", blocks_pb2.AllocateRequest(sequences=[allocation]), session, "stream", local=True
        )
        request = blocks_pb2.OpenStepRequest(sequence_ids=[1])
        call = asyncio.create_task(dispatcher.call("open_step", request, session, "stream", local=True))
        await asyncio.sleep(0)
        call.cancel()
        await turns()
        assert call.cancelled()
        assert done == [True]

    asyncio.run(scenario())


@pytest.mark.parametrize(("restarting", "refusal"), [(False, DrainingError), (True, RestartingError)])
def test_while_draining_only_begun_steps_go_on(restarting: bool, refusal: type[DrainingError]) -> None:
    async def scenario() -> None:
        async def extend(_: Any, __: Any) -> blocks_pb2.FreeResponse:
            return blocks_pb2.FreeResponse()

        def stale(_: Any, __: Any) -> blocks_pb2.FreeResponse:
            raise StaleStepError("not refused by the dispatcher")

        dispatcher = dispatcher_of(
            [
                SessionHandler("extend", attention_pb2.AttendRequest, extend, WhileDraining.FOR_BEGUN_STEPS),
                SessionHandler("fork", blocks_pb2.ForkRequest, stale, WhileDraining.REFUSED),
                SessionHandler("free", blocks_pb2.FreeRequest, stale),
            ]
        )
        namespace = SimpleNamespace(in_progress=lambda step_id: step_id == 7)
        session: Any = SimpleNamespace(namespace=namespace, replies=no_replies(), session_id=1, begin_call=lambda: None)

        async def call(method: str, request: Any) -> Any:
            return await dispatcher.call(method, request, session, "stream", local=True)

        dispatcher.draining, dispatcher.restarting = True, restarting
        await call("extend", attention_pb2.AttendRequest(step_id=7))
        with pytest.raises(refusal, match="has not begun") as not_begun:
            await call("extend", attention_pb2.AttendRequest(step_id=8))
        with pytest.raises(refusal) as refused:
            await call("fork", blocks_pb2.ForkRequest())
        assert type(not_begun.value) is type(refused.value) is refusal
        with pytest.raises(StaleStepError):
            await call("free", blocks_pb2.FreeRequest())

    asyncio.run(scenario())
