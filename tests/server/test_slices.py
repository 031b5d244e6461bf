"""Calls that run in slices: other calls run between the slices, and a started operation completes."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from daemon_lives import Life
from each_row import each_row
from google.protobuf.message import Message

from kvservice.blocks import AllocationRequest
from kvservice.errors import DuplicateSequenceError, QuotaExceededError
from kvservice.server.rpc.slots import MAX_PAUSES, RPC, Rpc, SessionTurns, Slots
from kvservice.server.rpc.stream import Services
from kvservice.v1 import blocks_pb2, regions_pb2

# The number of blocks of a long sequence. Each slice frees one sequence of this size.
LONG = 20_000
# The number of short sequences that a slice allocates.
SLICE_SEQUENCES = 128
POOL: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "block_size": 1,
    "num_blocks": 3 * LONG,
    "max_sequence_tokens": LONG,
    "max_sessions": 2,
    "max_sequences": 2 * SLICE_SEQUENCES,
    "store_gib": 0.0,
    "share_store": "off",
}


@pytest.fixture
def life() -> Iterator[Life]:
    lives: list[Life] = []

    async def start() -> None:
        lives.append(Life(**POOL))

    asyncio.run(start())
    yield lives[0]
    lives[0].kill()


def opened(life: Life, num_sequences: int) -> Any:
    session = life.open()
    for n in range(num_sequences):
        tokens = np.arange(n * LONG, (n + 1) * LONG, dtype=np.int32)
        life.manager.allocate(session.namespace, [AllocationRequest(n, tokens)])
    return session


def free(life: Life, session: Any, request: blocks_pb2.FreeRequest) -> asyncio.Task[Any]:
    return asyncio.create_task(life.call(session, "free", request))


def num_free(life: Life) -> int:
    return int(life.manager.stats().free_blocks)


async def comes(condition: Callable[[], bool]) -> None:
    """Let others have their turns until the condition holds."""
    while not condition():
        await asyncio.sleep(0)


def test_others_have_their_turns_between_slices(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 3)
        freeing = free(life, session, blocks_pb2.FreeRequest(sequence_ids=range(3)))
        seen = set()
        while not freeing.done():
            await life.call(session, "match_prefix", blocks_pb2.MatchPrefixRequest(token_ids=[1]))
            seen.add(num_free(life))
            await asyncio.sleep(0)
        assert {LONG, 2 * LONG} <= seen
        assert num_free(life) == 3 * LONG

    asyncio.run(scenario())


def test_a_call_whose_caller_is_gone_is_ended(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 3)
        call = free(life, session, blocks_pb2.FreeRequest(sequence_ids=range(3)))
        await comes(lambda: num_free(life) > 0)
        assert num_free(life) < 3 * LONG
        call.cancel()
        await comes(call.done)
        assert call.cancelled()
        await comes(lambda: num_free(life) == 3 * LONG)
        life.manager.check_integrity()

    asyncio.run(scenario())


def test_a_call_that_is_sent_again_meanwhile_has_the_same_answer(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 3)
        request = blocks_pb2.FreeRequest(request_id=1, sequence_ids=range(3))
        first, again = await asyncio.gather(free(life, session, request), free(life, session, request))
        assert first is again
        assert num_free(life) == 3 * LONG
        assert await free(life, session, request) is first

    asyncio.run(scenario())


def test_a_session_counts_until_all_of_it_is_freed(life: Life) -> None:
    async def scenario() -> None:
        life.open()
        full = opened(life, 3)
        closing = life.sessions.close_in_slices(full)
        next(closing)
        assert len(life.sessions) == 1
        with pytest.raises(QuotaExceededError):
            life.open()
        for _ in closing:
            pass
        assert num_free(life) == 3 * LONG
        life.open()

    asyncio.run(scenario())


def test_a_call_that_is_refused_in_a_later_slice_may_be_sent_again(life: Life) -> None:
    async def scenario() -> None:
        session = opened(life, 2)
        sequences = [blocks_pb2.SequenceAllocation(sequence_id=n, token_ids=[n]) for n in range(SLICE_SEQUENCES + 1)]
        request = blocks_pb2.AllocateRequest(request_id=1, sequences=sequences)
        with pytest.raises(DuplicateSequenceError) as caught:
            await life.call(session, "allocate", request)
        assert caught.value.field == "sequences[0].sequence_id"
        await free(life, session, blocks_pb2.FreeRequest(sequence_ids=[0, 1]))
        response: Any = await life.call(session, "allocate", request)
        assert len(response.num_blocks) == len(sequences)
        assert await life.call(session, "allocate", request) is response

    asyncio.run(scenario())


# ---- unary calls of a session have turns


class Unary:
    """A port on which unary calls come."""

    def __init__(self, life: Life) -> None:
        given: Any = SimpleNamespace(local=True, admit=lambda _: None)
        slots = Slots(life.config)
        self.services = Services(life.dispatcher, life.sessions, given, life.config.request_limits, given, slots)
        self._slots = slots

    def call(self, path: str, request: Message) -> asyncio.Task[bytes]:
        answer: Any = self.services.handlers()[f"/kvservice.v1.{path}"]
        details: list[str] = []
        context: Any = Mock(peer=lambda: "unix:", set_details=details.append)

        async def call() -> bytes:
            task = asyncio.current_task()
            assert task is not None
            RPC.set(Rpc(task, None, self._slots, "session call"))
            reply: bytes = await answer.unary_unary(request.SerializeToString(), context)
            assert not context.abort_with_status.called, "it would keep the message"
            if details:
                raise RuntimeError(details[0])
            return reply

        return asyncio.create_task(call())


def held(life: Life, event: asyncio.Event) -> None:
    """Have calls of free wait for the event."""

    def free(_: Any, __: Any) -> Generator[Any, None, Any]:
        yield event.wait()
        return blocks_pb2.FreeResponse()

    handlers = life.dispatcher._handlers
    handlers["free"] = replace(handlers["free"], start=free)


def test_a_unary_call_runs_when_those_before_it_of_its_session_have_ended(life: Life) -> None:
    """Also one whose message does not begin with the token. Those of unknown sessions have turns together."""

    async def scenario() -> None:
        held(life, event := asyncio.Event())
        port, mine, other = Unary(life), life.open().token, life.open().token

        def describe(token: bytes) -> asyncio.Task[bytes]:
            return port.call("BlockService/Describe", blocks_pb2.DescribeRequest(session_token=token))

        freeing, gone = (port.call("BlockService/Free", blocks_pb2.FreeRequest(session_token=mine)) for _ in range(2))
        waiting = [
            describe(mine),
            port.call("RegionService/ListRegions", regions_pb2.ListRegionsRequest(session_token=mine)),
        ]
        unknown = [describe(token) for token in (b"", b"nobody", bytes(200))]
        await describe(other)
        for call in unknown:
            with pytest.raises(RuntimeError, match="session"):
                await call
        gone.cancel()
        await comes(gone.done)
        assert not any(call.done() for call in (freeing, *waiting))
        event.set()
        await asyncio.gather(freeing, *waiting)
        assert gone.cancelled()
        await comes(lambda: life.dispatcher.turns._waiting == {})

    asyncio.run(scenario())


def test_one_at_a_time_has_the_turn_and_all_have_it_in_order() -> None:
    async def scenario(random: Random) -> None:
        turns, running, had = SessionTurns(), Counter[bytes](), list[tuple[bytes, int]]()

        async def work(key: bytes, number: int) -> None:
            await turns.begin(key)
            had.append((key, number))
            running[key] += 1
            try:
                for _ in range(random.randrange(3)):
                    await asyncio.sleep(0)
                    assert running[key] == 1
            finally:
                running[key] -= 1
                turns.end(key)

        tasks = {}
        for number in range(100):
            key = random.choice((b"a", b"b", b"c"))
            tasks[key, number] = asyncio.create_task(work(key, number))
            await asyncio.sleep(0)
            if random.random() < 0.3:
                random.choice(list(tasks.values())).cancel()
        await asyncio.wait(tasks.values())
        assert {each for each, task in tasks.items() if not task.cancelled()} <= set(had)
        for key in (b"a", b"b", b"c"):
            numbers = [number for each, number in had if each == key]
            assert numbers == sorted(numbers)
        while turns._waiting:  # until the pauses have ended
            await asyncio.sleep(0)
        assert turns._since == {}

    for seed in range(100):
        asyncio.run(scenario(Random(seed)))


def test_who_is_gone_does_not_wait_for_a_turn() -> None:
    """Calls that a client ends and makes again take no memory while one of its calls takes long."""

    async def scenario() -> None:
        turns = SessionTurns()
        await turns.begin(b"a")
        stays = asyncio.create_task(turns.begin(b"a"))
        for _ in range(10):
            gone = asyncio.create_task(turns.begin(b"a"))
            await asyncio.sleep(0)
            gone.cancel()
            await asyncio.wait((gone,))
        assert len(turns._waiting[b"a"]) == 1
        turns.end(b"a")
        await stays
        turns.end(b"a")

    asyncio.run(scenario())


@pytest.mark.parametrize(("turns_s", "pauses"), [(-1.0, True), (math.inf, False)])
def test_turns_that_take_long_have_pauses(monkeypatch: pytest.MonkeyPatch, turns_s: float, pauses: bool) -> None:
    monkeypatch.setattr("kvservice.server.rpc.slots.TURNS_S", turns_s)
    monkeypatch.setattr("kvservice.server.rpc.slots.PAUSE_S", 3600.0)

    async def scenario() -> None:
        turns = SessionTurns()
        await turns.begin(b"a")
        following = asyncio.create_task(turns.begin(b"a"))
        await asyncio.sleep(0)
        turns.end(b"a")
        for _ in range(5):
            await asyncio.sleep(0)
        assert following.done() is not pauses
        following.cancel()
        await turns.begin(b"b")
        turns.end(b"b")
        assert (b"b" in turns._waiting) == pauses, "nobody waited, and the next one would"

    asyncio.run(scenario())


def test_a_pause_goes_on_while_more_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a limit, and not for what has another key."""
    monkeypatch.setattr("kvservice.server.rpc.slots.TURNS_S", -1.0)

    async def scenario(coming: bytes, num_pauses: int) -> None:
        timers: list[Callable[[], object]] = []

        def call_later(_: float, call: Callable[..., object], *args: Any) -> None:
            timers.append(lambda: call(*args))

        monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        turns = SessionTurns()
        await turns.begin(b"a")
        await turns.begin(b"b")
        following = asyncio.create_task(turns.begin(b"a"))
        await asyncio.sleep(0)
        turns.end(b"a")
        tasks, count = [following], 0
        while not following.done():
            tasks.append(asyncio.create_task(turns.begin(coming)))
            await asyncio.sleep(0)
            timers.pop()()
            count += 1
            await asyncio.sleep(0)
            assert len(timers) <= 1
        assert count == num_pauses
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def one_after_the_other() -> None:
        timers: list[Callable[[], object]] = []
        monkeypatch.setattr(
            asyncio.get_running_loop(), "call_later", lambda _, call, *args: timers.append(lambda: call(*args))
        )
        turns = SessionTurns()
        for _ in range(3):
            following = asyncio.create_task(turns.begin(b"a"))
            await asyncio.sleep(0)
            if timers:
                timers.pop()()
            await asyncio.sleep(0)
            assert following.done(), "after one pause"
            turns.end(b"a")
            assert len(timers) == 1

    with each_row() as row:
        for coming, num_pauses in ((b"a", MAX_PAUSES), (b"b", 1)):
            with row(coming):
                asyncio.run(scenario(coming, num_pauses))
        with row("one after the other"):
            asyncio.run(one_after_the_other())
