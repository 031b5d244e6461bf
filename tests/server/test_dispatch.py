"""The dispatcher: what it awaits, what it remembers, what it refuses while the daemon drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from daemon_lives import Life
from kept_files import HeldFiles
from manual_clock import ManualClock
from raw_wire import tensor

from kvservice.errors import DrainingError, RestartingError
from kvservice.v1 import attention_pb2, blocks_pb2


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    held = HeldFiles()
    opened = Life(held, clock)
    yield opened
    opened.kill()
    held.close()


class Access:
    """Publishes steps when the test says so. `num_published` is the number of steps that are published."""

    shares_steps = True

    def __init__(self) -> None:
        self.may_publish = asyncio.Event()
        self.num_published = 0

    def publish(self, _: Any, *, to_lane: bool, run: Any) -> Any:
        assert to_lane
        assert run is None
        return None, self._published()

    async def _published(self) -> None:
        await self.may_publish.wait()
        self.num_published += 1


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def session_with(life: Life, access: Access) -> Any:
    """Return a session with sequence 1, whose steps wait for the test."""
    session: Any = life.open()
    await life.allocate(session, 1, [1, 2])
    session.access = access
    return session


def test_the_response_of_a_step_waits_until_the_step_is_published(life: Life) -> None:
    """The client may work on the step from the response on. The same request, sent again meanwhile, waits too."""

    async def scenario() -> None:
        session = await session_with(life, access := Access())
        request = blocks_pb2.AppendRequest(request_id=1, sequence_ids=[1], token_ids=[3])
        first = asyncio.create_task(life.call(session, "append", request))
        await turns()
        again = asyncio.create_task(life.call(session, "append", request))
        await turns()
        assert not first.done()
        assert not again.done()
        assert life.dispatcher.in_flight == 2
        access.may_publish.set()
        response = await first
        assert list(response.context_lens) == [3]
        assert await again is response
        assert await life.call(session, "append", request) is response
        assert access.num_published == 1

    asyncio.run(scenario())


def test_a_step_whose_caller_has_gone_is_published(life: Life) -> None:
    async def scenario() -> None:
        session = await session_with(life, access := Access())
        request = blocks_pb2.OpenStepRequest(sequence_ids=[1])
        call = asyncio.create_task(life.call(session, "open_step", request))
        await turns()
        call.cancel()
        await turns()
        assert call.cancelled()
        access.may_publish.set()
        await turns()
        assert access.num_published == 1
        assert life.dispatcher.in_flight == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(("restarting", "refusal"), [(False, DrainingError), (True, RestartingError)])
def test_while_draining_only_begun_steps_go_on(life: Life, restarting: bool, refusal: type[DrainingError]) -> None:
    async def scenario() -> None:
        session = life.open()
        steps = []
        for sequence_id in (1, 2):
            await life.allocate(session, sequence_id, [sequence_id])
            request = blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id])
            steps.append((await life.call(session, "open_step", request)).step_id)
        begun, not_begun = steps

        async def extend(step_id: int, layer: int) -> None:
            request = attention_pb2.AttendRequest(step_id=step_id, layer=layer)
            for field, heads in (("query", 4), ("key", 2), ("value", 2)):
                getattr(request, field).CopyFrom(tensor(1, heads, 32))
            await life.call(session, "extend", request)

        await extend(begun, 0)
        life.dispatcher.draining, life.dispatcher.restarting = True, restarting
        await extend(begun, 1)
        with pytest.raises(refusal, match="has not begun") as of_step:
            await extend(not_begun, 0)
        with pytest.raises(refusal) as of_fork:
            await life.call(session, "fork", blocks_pb2.ForkRequest(parent_ids=[1], child_ids=[9]))
        assert type(of_step.value) is type(of_fork.value) is refusal
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[1, 2]))

    asyncio.run(scenario())
