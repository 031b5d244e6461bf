"""The scheduler of a session without a daemon: what happens between the slices of its calls, and its limits."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life, finish
from manual_clock import ManualClock

from kvservice.blocks import AllocationRequest
from kvservice.errors import (
    DuplicateSequenceError,
    InternalError,
    InvalidArgumentError,
    QuotaExceededError,
    UnknownSessionError,
)
from kvservice.scheduler import Phase, Report, Request
from kvservice.v1 import scheduler_pb2

LONG = 32768


class Rig:
    """A daemon without its server, and the scheduler of a session in it."""

    def __init__(self, clock: ManualClock, max_requests: int, max_tokens: int) -> None:
        self.life = Life(
            clock=clock, num_blocks=16384, max_sequence_tokens=65536, max_sequences=16, store_gib=0.0,
            share_store="off", swap_space_gib=0.0, max_queued_requests=max_requests, max_queued_tokens=max_tokens,
        )  # fmt: skip
        self.manager = self.life.manager
        self.session, self.one = self.open()

    def open(self) -> tuple[Any, Any]:
        """Open a session. Returns it, and its scheduler."""

        async def opened() -> Any:
            session = self.life.open()
            await self.life.call(session, "open_scheduler", scheduler_pb2.OpenSchedulerRequest(max_running=8))
            return session

        session = asyncio.run(opened())
        return session, session.scheduler

    def has_room_for(self, num_requests: int) -> bool:
        """Return whether another scheduler may have so many requests, and not one more."""
        other = self.open()[1]
        with pytest.raises(QuotaExceededError):
            finish(other.add([request(number) for number in range(num_requests + 1)], 0.0, ()))
        finish(other.add([request(number) for number in range(num_requests)], 0.0, ()))
        other.close()
        return True


@pytest.fixture
def make_rig(clock: ManualClock) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(max_requests: int = 100, max_tokens: int = 1 << 20) -> Rig:
        made.append(Rig(clock, max_requests, max_tokens))
        return made[-1]

    yield make
    for rig in made:
        rig.life.kill()


def request(request_id: int, num_tokens: int = 3, **options: Any) -> Request:
    return Request(request_id, np.arange(num_tokens, dtype=np.int32), 4, **options)


def test_long_prompts_are_added_in_slices(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=3)
    slices = rig.one.add([request(1, LONG), request(2, LONG)], 0.0, ())
    next(slices)
    assert len(rig.one) == 0
    assert rig.has_room_for(1)
    finish(slices)
    assert len(rig.one) == 2
    assert checked(rig)


def test_many_short_prompts_are_added_in_slices(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=1000)
    slices = rig.one.add([request(number) for number in range(1000)], 0.0, ())
    next(slices)
    finish(slices)
    assert len(rig.one) == 1000


def test_of_two_additions_in_slices_one_gets_the_id(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=4)
    first, second = rig.one.add([request(1, LONG)], 0.0, ()), rig.one.add([request(7), request(1, LONG)], 0.0, ())
    next(first)
    next(second)
    finish(first)
    with pytest.raises(DuplicateSequenceError) as caught:
        finish(second)
    assert caught.value.field == "requests[1].request_id"
    assert rig.has_room_for(3)
    assert list(rig.one.scheduler.queues.requests) == [1]


def test_a_session_that_ends_meanwhile_gets_no_requests(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=2)
    slices = rig.one.add([request(1, LONG)], 0.0, ())
    next(slices)
    finish(rig.life.sessions.close_in_slices(rig.session))
    with pytest.raises(UnknownSessionError):
        finish(slices)
    assert rig.has_room_for(2)


def test_ids_that_an_allocation_will_have_are_refused(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=2)
    with pytest.raises(DuplicateSequenceError) as caught:
        finish(rig.one.add([request(1), request(5, width=4)], 0.0, {8}))
    assert (caught.value.field, caught.value.metadata["sequence_id"]) == ("requests[1].request_id", "8")
    assert rig.has_room_for(2)


def test_all_schedulers_share_the_limits(make_rig: Callable[..., Rig]) -> None:
    for limits, limit in (((3, 100), "max_queued_requests"), ((100, 11), "max_queued_tokens")):
        rig = make_rig(*limits)
        other = rig.open()[1]
        finish(rig.one.add([request(1), request(2)], 0.0, ()))
        finish(other.add([request(1)], 0.0, ()))
        with pytest.raises(QuotaExceededError) as caught:
            finish(other.add([request(2)], 0.0, ()))
        assert (caught.value.field, caught.value.metadata["limit"]) == ("requests", limit)
        assert other.scheduler.queues.counters.refused == 1
        assert rig.one.abort([2]) == [2]
        finish(other.add([request(2)], 0.0, ()))
        rig.one.close()
        assert len(other) == 2
        finish(other.add([request(3)], 0.0, ()))


def test_a_bad_request_leaves_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=2)
    with pytest.raises(InvalidArgumentError) as caught:
        finish(rig.one.add([request(1), request(2, stop_lengths=[1])], 0.0, ()))
    assert caught.value.field == "requests[1].stop_lengths[0]"
    assert len(rig.one.scheduler) == 0
    assert rig.has_room_for(2)


def checked(rig: Rig) -> Any:
    """Run the integrity check of the daemon."""
    return finish(rig.life.core.check_in_slices())


def running(rig: Rig) -> Rig:
    """Give a rig one decode, one prefill in chunks, one waiting request, and a sequence of the client's own."""
    scheduler, namespace = rig.one.scheduler, rig.session.namespace
    rig.manager.allocate(namespace, [AllocationRequest(99, [1, 2, 3])])
    finish(rig.one.add([request(1, 9)], 0.0, ()))
    batch = scheduler.schedule()
    assert batch.step is not None
    assert checked(rig)
    rig.manager.mark_all_layers(namespace, batch.step.step_id)
    assert checked(rig)
    scheduler.update(Report(batch.number, [7]))
    finish(rig.one.add([request(2, 40, extra_keys=[(0, b"k")]), request(3, 40, extra_keys=[(0, b"k")])], 0.0, ()))
    batch = scheduler.schedule(max_step_tokens=9)
    assert batch.step is not None
    rig.manager.mark_all_layers(namespace, batch.step.step_id)
    scheduler.update(Report(batch.number, [8]))
    assert checked(rig)
    return rig


def test_the_daemon_checks_the_schedulers(make_rig: Callable[..., Rig]) -> None:
    corruptions: list[Callable[[Any], object]] = [
        lambda queues: queues.decodes.lengths.__setitem__(0, 5),
        lambda queues: queues.decodes.blocks.__setitem__(0, 77),
        lambda queues: queues.states.pop(3),
        lambda queues: queues.requests.pop(1),
        lambda queues: queues.waiting.remove(queues.states[3]),
        lambda queues: setattr(queues.states[2], "pending", 1),
        lambda queues: setattr(queues.states[2], "phase", Phase.SWAPPED),
        lambda queues: queues.manager.free(queues.namespace, [1]),
    ]
    for corrupt in corruptions:
        rig = running(make_rig())
        corrupt(rig.one.scheduler.queues)
        with pytest.raises(InternalError):
            checked(rig)


def test_a_scheduler_may_end_while_it_is_checked(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=1000)
    finish(rig.one.add([request(number) for number in range(500)], 0.0, ()))
    slices = rig.life.core.engine.schedulers.check_in_slices()
    next(slices)
    rig.one.abort(range(200, 300))
    next(slices)
    rig.one.close()
    finish(slices)
    assert rig.has_room_for(1000)


def test_an_engine_that_is_away_is_not_hungry(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    other = rig.open()[1]
    finish(rig.one.add([request(1)], 0.0, ()))
    rig.one.scheduler.share.hungry = True
    shares = rig.one.scheduler._shares
    assert shares.allowance(other.scheduler.share) < 16384
    rig.one.pause()
    assert shares.allowance(other.scheduler.share) == 16384


def test_the_memory_of_a_closed_scheduler_is_given_back_in_slices(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(max_requests=300)
    finish(rig.one.add([request(number) for number in range(300)], 0.0, ()))
    tokens = weakref.ref(rig.one.scheduler.queues.states[0].tokens)
    gc.disable()
    try:
        slices = rig.one.close()
        assert len(list(slices)) == 3
        assert tokens() is None, "without the garbage collector"
    finally:
        gc.enable()
    assert rig.has_room_for(300)
