"""Calls that run in slices: other calls run between the slices, and a started operation completes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from small_pool import SMALL_POOL

from kvservice.blocks import AllocationRequest, Slices
from kvservice.blocks.slices import SLICE_SEQUENCES
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.errors import DuplicateSequenceError, InvalidArgumentError, QuotaExceededError
from kvservice.kept import KeptState
from kvservice.server import slices
from kvservice.server.calls import session_handlers
from kvservice.server.dispatch import Dispatcher
from kvservice.server.saved_sessions import SavedSessions
from kvservice.server.server_session import SessionMemory
from kvservice.server.sessions import SessionRegistry
from kvservice.server.slices import Caller, despite_leaving, in_slices
from kvservice.telemetry.calls import CallTable
from kvservice.v1 import blocks_pb2

# The number of blocks of a long sequence. Each slice frees one sequence of this size.
LONG = 20_000
POOL = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "block_size": 1,
    "num_blocks": 3 * LONG,
    "max_sequence_tokens": LONG,
    "max_sessions": 2,
    "max_sequences": 2 * SLICE_SEQUENCES,
}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "PAUSE_S", 0)


async def turns(log: list[str], count: int) -> None:
    """Other work on the event loop."""
    for n in range(count):
        log.append(f"other {n}")
        await asyncio.sleep(0)


def work(log: list[str], count: int) -> Slices[int]:
    for n in range(count):
        if n:
            yield
        log.append(f"slice {n}")
    return count


def test_one_slice_is_answered_at_once() -> None:
    """A single slice needs no event loop."""
    log: list[str] = []
    assert in_slices(work(log, 1)) == 1
    assert log == ["slice 0"]


def test_others_have_their_turns_between_slices() -> None:
    async def scenario() -> list[str]:
        log: list[str] = []
        answer = in_slices(work(log, 3))
        assert isinstance(answer, asyncio.Task)
        await asyncio.gather(turns(log, 3), answer)
        assert answer.result() == 3
        return log

    log = asyncio.run(scenario())
    assert [log.index(f"slice {n}") < log.index(f"slice {n + 1}") for n in range(2)] == [True, True]
    assert log.index("slice 0") < log.index("other 0") < log.index("slice 2")


def test_slices_pause_for_calls_of_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, turn = [], asyncio.sleep

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await turn(0)

    async def scenario() -> None:
        monkeypatch.setattr(asyncio, "sleep", pause)
        assert await in_slices(work([], 3)) == 3  # type: ignore[misc]

    monkeypatch.setattr(slices, "PAUSE_S", 0.001)
    asyncio.run(scenario())
    assert pauses == [0.001, 0.001]


def test_what_the_first_slice_refuses_is_raised_at_once() -> None:
    def refusing() -> Slices[None]:
        raise InvalidArgumentError("no")
        yield

    with pytest.raises(InvalidArgumentError):
        in_slices(refusing())


class Rig:
    """The calls of a daemon without its server."""

    def __init__(self) -> None:
        config = ServeConfig(**SMALL_POOL | POOL)
        self.device = open_device(config)
        arrays = KeptState.fresh().arrays
        self.engine = CacheEngine(config, self.device, arrays)
        memory = SessionMemory.of(config, arrays, {})
        self.sessions = SessionRegistry(config, self.engine.manager, self.device, memory)
        saved = SavedSessions(config, self.engine.manager, self.sessions, files=None)
        handlers = session_handlers(config, self.engine, None, saved)
        calls = CallTable([handler.method for handler in handlers], arrays.zeros)
        self.dispatcher = Dispatcher(handlers, self.sessions, calls, None, lambda: None)

    def open(self, num_sequences: int) -> Any:
        session = self.sessions.open("", "", False, 0.0)
        for n in range(num_sequences):
            tokens = np.arange(n * LONG, (n + 1) * LONG, dtype=np.int32)
            self.engine.manager.allocate(session.namespace, [AllocationRequest(n, tokens)])
        return session

    async def free(self, session: Any, request: blocks_pb2.FreeRequest) -> Any:
        return await self.dispatcher.call("free", request, session, "stream", True)

    @property
    def num_free(self) -> int:
        return self.engine.manager.stats().free_blocks


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.device.close()


def test_a_call_whose_caller_is_gone_is_ended(rig: Rig) -> None:
    async def scenario() -> None:
        session = rig.open(3)
        call = asyncio.create_task(rig.free(session, blocks_pb2.FreeRequest(sequence_ids=range(3))))
        await asyncio.sleep(0)
        assert 0 < rig.num_free < 3 * LONG
        call.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert call.cancelled()
        assert rig.num_free == 3 * LONG
        rig.engine.manager.check_integrity()

    asyncio.run(scenario())


def test_a_call_that_is_sent_again_meanwhile_has_the_same_answer(rig: Rig) -> None:
    async def scenario() -> None:
        session = rig.open(3)
        request = blocks_pb2.FreeRequest(request_id=1, sequence_ids=range(3))
        first, again = await asyncio.gather(rig.free(session, request), rig.free(session, request))
        assert first is again
        assert rig.num_free == 3 * LONG
        assert await rig.free(session, request) is first

    asyncio.run(scenario())


def test_a_session_counts_until_all_of_it_is_freed(rig: Rig) -> None:
    async def scenario() -> None:
        rig.open(0)
        full = rig.open(3)
        closing = in_slices(rig.sessions.close_in_slices(full))
        assert isinstance(closing, asyncio.Task)
        assert len(rig.sessions) == 1
        with pytest.raises(QuotaExceededError):
            rig.open(0)
        await closing
        assert rig.num_free == 3 * LONG
        rig.open(0)

    asyncio.run(scenario())


def test_a_call_that_is_refused_in_a_later_slice_may_be_sent_again(rig: Rig) -> None:
    async def scenario() -> None:
        session = rig.open(2)
        sequences = [blocks_pb2.SequenceAllocation(sequence_id=n, token_ids=[n]) for n in range(SLICE_SEQUENCES + 1)]
        request = blocks_pb2.AllocateRequest(request_id=1, sequences=sequences)
        allocate = functools.partial(rig.dispatcher.call, "allocate", request, session, "stream", True)
        with pytest.raises(DuplicateSequenceError) as caught:
            await allocate()
        assert caught.value.field == "sequences[0].sequence_id"
        await rig.free(session, blocks_pb2.FreeRequest(sequence_ids=[0, 1]))
        response: Any = await allocate()
        assert len(response.num_blocks) == len(sequences)
        assert await allocate() is response

    asyncio.run(scenario())


def test_work_goes_on_when_its_caller_leaves_and_knows_it() -> None:
    async def main() -> None:
        begun, left, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        seen: list[bool] = []

        async def work(caller: Caller) -> None:
            begun.set()
            seen.append(caller.gone)
            await left.wait()
            seen.append(caller.gone)
            ended.set()

        calling = asyncio.create_task(despite_leaving(work))
        await begun.wait()
        calling.cancel()
        await asyncio.wait([calling])
        left.set()
        await ended.wait()
        assert calling.cancelled()
        assert seen == [False, True]

    asyncio.run(main())
