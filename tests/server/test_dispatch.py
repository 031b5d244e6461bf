"""The dispatcher: what it awaits, what it remembers, what it refuses while the daemon drains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from daemon_lives import Life
from kept_files import HeldFiles
from manual_clock import ManualClock
from raw_wire import tensor

from kvservice.errors import DrainingError, RestartingError
from kvservice.server.rpc.requests import parser
from kvservice.server.rpc.slots import Rpc, Slots
from kvservice.server.rpc.stream import Stream
from kvservice.v1 import attention_pb2, blocks_pb2, pool_pb2, session_pb2


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    held = HeldFiles()
    opened = Life(held, clock)
    yield opened
    opened.kill()
    held.close()


class Shared:
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


async def session_with(life: Life, shared: Shared) -> Any:
    """Return a session with sequence 1, whose steps wait for the test."""
    session: Any = life.open()
    await life.allocate(session, 1, [1, 2])
    session.shared = shared
    return session


def test_the_response_of_a_step_waits_until_the_step_is_published(life: Life) -> None:
    """The client may work on the step from the response on. The same request, sent again meanwhile, waits too."""

    async def scenario() -> None:
        session = await session_with(life, shared := Shared())
        request = blocks_pb2.AppendRequest(request_id=1, sequence_ids=[1], token_ids=[3])
        first = asyncio.create_task(life.call(session, "append", request))
        await turns()
        again = asyncio.create_task(life.call(session, "append", request))
        await turns()
        assert not first.done()
        assert not again.done()
        assert life.dispatcher.in_flight == 2
        shared.may_publish.set()
        response = await first
        assert list(response.context_lens) == [3]
        assert await again is response
        assert await life.call(session, "append", request) is response
        assert shared.num_published == 1

    asyncio.run(scenario())


def test_a_step_whose_caller_has_gone_is_published(life: Life) -> None:
    async def scenario() -> None:
        session = await session_with(life, shared := Shared())
        request = blocks_pb2.OpenStepRequest(sequence_ids=[1])
        call = asyncio.create_task(life.call(session, "open_step", request))
        await turns()
        call.cancel()
        await turns()
        assert call.cancelled()
        shared.may_publish.set()
        await turns()
        assert shared.num_published == 1
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


class Line:
    """gRPC's end of a stream. It brings calls from the client, and `replies` are what the daemon has written."""

    def __init__(self, life: Life) -> None:
        self._parse = parser(session_pb2.Call, life.config.request_limits)
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: list[session_pb2.Reply] = []
        self.status: Any = None

    def bring(self, call: session_pb2.Call) -> None:
        self._calls.put_nowait(self._parse(call.SerializeToString()))

    def end(self) -> None:
        self._calls.put_nowait(grpc.aio.EOF)

    def peer(self) -> str:
        return "unix:"

    async def read(self) -> Any:
        return await self._calls.get()

    async def write(self, data: bytes) -> None:
        reply = session_pb2.Reply.FromString(data)
        self.replies += reply.replies or [reply]

    async def abort_with_status(self, status: Any) -> None:
        self.status = status


@pytest.mark.parametrize("restarts", [False, True])
def test_a_call_that_waits_does_not_hold_up_the_replies_before_it(life: Life, restarts: bool) -> None:
    """A process that is replaced answers what it has executed, and executes no more calls of the message."""

    async def scenario() -> None:
        session: Any = life.open()
        await life.allocate(session, 1, [1, 2])
        callers: Any = SimpleNamespace(check=lambda _: None, called_again=lambda _: None, local=True)
        line: Any = Line(life)
        rpc = Rpc(line, None, slots := Slots(life.config), "session stream")
        stream = Stream(life.dispatcher, life.sessions, line, callers, slots, rpc)
        serving = asyncio.create_task(stream.serve())
        line.bring(session_pb2.Call(call_id=1, attach=session_pb2.AttachRequest(session_token=session.token)))
        await turns()
        session.shared = shared = Shared()
        append = blocks_pb2.AppendRequest(request_id=1, sequence_ids=[1], token_ids=[3])
        calls = [
            session_pb2.Call(call_id=2, ping=pool_pb2.PingRequest()),
            session_pb2.Call(call_id=3, append=append),  # its response waits for its step
            session_pb2.Call(call_id=4, describe=blocks_pb2.DescribeRequest()),
            session_pb2.Call(call_id=5, free=blocks_pb2.FreeRequest(sequence_ids=[1])),
        ]
        line.bring(session_pb2.Call(calls=calls))
        await turns()
        assert [reply.WhichOneof("reply") for reply in line.replies] == ["attach", "ping"]
        if restarts:
            stream.end(RestartingError("the next process takes over"))
        shared.may_publish.set()
        line.end()
        session.shared = SimpleNamespace(close=lambda: None)
        await serving
        done = ["attach", "ping", "append", "describe", "free"][: 3 if restarts else 5]
        assert [reply.WhichOneof("reply") for reply in line.replies] == done
        assert [reply.call_id for reply in line.replies] == list(range(1, len(done) + 1))
        assert (1 in session.namespace) is restarts
        assert (line.status is not None) is restarts

    asyncio.run(scenario())
