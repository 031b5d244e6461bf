"""The scheduler of a session without a daemon: what happens between the slices of its calls, and its limits."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvservice.blocks import AllocationRequest, BlockManager, BlocksConfig
from kvservice.blocks.slices import finish
from kvservice.errors import (
    DuplicateSequenceError,
    InternalError,
    InvalidArgumentError,
    QuotaExceededError,
    UnknownSessionError,
)
from kvservice.scheduler import Phase, Report, Request, Scheduler, SchedulerConfig
from kvservice.scheduler.integrity import check_integrity
from kvservice.server.core import Core
from kvservice.server.scheduler_values import QueueTotals, SchedulerSettings
from kvservice.server.scheduling import SessionScheduler

LONG = 32768


class Rig:
    """A scheduler, and the totals that it shares with others."""

    def __init__(self, max_requests: int = 100, max_tokens: int = 1 << 20) -> None:
        config = BlocksConfig(num_blocks=16384, block_size=4, max_sequence_tokens=65536, max_sequences=16)
        self.manager = BlockManager(config)
        self.engine: Any = SimpleNamespace(manager=self.manager, schedulers=Scheduler(self.manager))
        self.totals = QueueTotals(max_requests, max_tokens)
        self.one = self.open()

    def open(self) -> SessionScheduler:
        settings = SchedulerSettings(SchedulerConfig(max_running=8), 1.0)
        return SessionScheduler(self.engine, self.manager.open_namespace(), settings, self.totals)

    def counts(self) -> tuple[int, int]:
        return self.totals.requests, self.totals.tokens


def request(request_id: int, num_tokens: int = 3, **options: Any) -> Request:
    return Request(request_id, np.arange(num_tokens, dtype=np.int32), 4, **options)


def test_long_prompts_are_added_in_slices() -> None:
    rig = Rig()
    slices = rig.one.add([request(1, LONG), request(2, LONG)], 0.0, ())
    next(slices)
    assert len(rig.one) == 0
    assert rig.counts() == (2, 2 * LONG)
    finish(slices)
    assert len(rig.one) == 2
    check_integrity(rig.one.scheduler)


def test_many_short_prompts_are_added_in_slices() -> None:
    rig = Rig(max_requests=1000)
    slices = rig.one.add([request(number) for number in range(1000)], 0.0, ())
    next(slices)
    finish(slices)
    assert len(rig.one) == 1000


def test_of_two_additions_in_slices_one_gets_the_id() -> None:
    rig = Rig()
    first, second = rig.one.add([request(1, LONG)], 0.0, ()), rig.one.add([request(7), request(1, LONG)], 0.0, ())
    next(first)
    next(second)
    finish(first)
    with pytest.raises(DuplicateSequenceError) as caught:
        finish(second)
    assert caught.value.field == "requests[1].request_id"
    assert rig.counts() == (1, LONG)
    assert list(rig.one.scheduler.queues.requests) == [1]


def test_a_session_that_ends_meanwhile_gets_no_requests() -> None:
    rig = Rig()
    slices = rig.one.add([request(1, LONG)], 0.0, ())
    next(slices)
    rig.one.close()
    rig.manager.close_namespace(rig.one._namespace)
    with pytest.raises(UnknownSessionError):
        finish(slices)
    assert rig.counts() == (0, 0)


def test_ids_that_an_allocation_will_have_are_refused() -> None:
    rig = Rig()
    with pytest.raises(DuplicateSequenceError) as caught:
        finish(rig.one.add([request(1), request(5, width=4)], 0.0, {8}))
    assert (caught.value.field, caught.value.metadata["sequence_id"]) == ("requests[1].request_id", "8")
    assert rig.counts() == (0, 0)


@pytest.mark.parametrize(("limits", "limit"), [((3, 100), "max_queued_requests"), ((100, 11), "max_queued_tokens")])
def test_all_schedulers_share_the_limits(limits: tuple[int, int], limit: str) -> None:
    rig = Rig(*limits)
    other = rig.open()
    finish(rig.one.add([request(1), request(2)], 0.0, ()))
    finish(other.add([request(1)], 0.0, ()))
    with pytest.raises(QuotaExceededError) as caught:
        finish(other.add([request(2)], 0.0, ()))
    assert (caught.value.field, caught.value.metadata["limit"]) == ("requests", limit)
    assert other.scheduler.queues.counters.refused == 1
    assert rig.one.abort([2]) == [2]
    finish(other.add([request(2)], 0.0, ()))
    rig.one.close()
    assert rig.counts() == (2, 6)


def test_a_bad_request_leaves_nothing() -> None:
    rig = Rig()
    with pytest.raises(InvalidArgumentError) as caught:
        finish(rig.one.add([request(1), request(2, stop_lengths=[1])], 0.0, ()))
    assert caught.value.field == "requests[1].stop_lengths[0]"
    assert rig.counts() == (0, 0)
    assert len(rig.one.scheduler) == 0


def checked(rig: Rig) -> bool:
    """Run the integrity check of a daemon with these schedulers."""
    daemon: Any = SimpleNamespace(engine=rig.engine, store=None)
    return finish(Core.check_in_slices(daemon))


def running() -> Rig:
    """A rig with one decode, one prefill in chunks, one waiting request, and a sequence of the client's own."""
    rig = Rig()
    scheduler = rig.one.scheduler
    rig.manager.allocate(rig.one._namespace, [AllocationRequest(99, [1, 2, 3])])
    finish(rig.one.add([request(1, 9)], 0.0, ()))
    batch = scheduler.schedule()
    assert batch.step is not None
    assert checked(rig)
    rig.manager.mark_all_layers(rig.one._namespace, batch.step.step_id)
    assert checked(rig)
    scheduler.update(Report(batch.number, [7]))
    finish(rig.one.add([request(2, 40, extra_keys=[(0, b"k")]), request(3, 40, extra_keys=[(0, b"k")])], 0.0, ()))
    batch = scheduler.schedule(max_step_tokens=9)
    assert batch.step is not None
    rig.manager.mark_all_layers(rig.one._namespace, batch.step.step_id)
    scheduler.update(Report(batch.number, [8]))
    assert checked(rig)
    return rig


def test_the_daemon_checks_the_schedulers() -> None:
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
        rig = running()
        corrupt(rig.one.scheduler.queues)
        with pytest.raises(InternalError):
            checked(rig)


def test_a_scheduler_may_end_while_it_is_checked() -> None:
    rig = Rig(max_requests=1000)
    finish(rig.one.add([request(number) for number in range(500)], 0.0, ()))
    slices = rig.engine.schedulers.check_in_slices()
    next(slices)
    rig.one.abort(range(200, 300))
    next(slices)
    rig.one.close()
    finish(slices)
    assert rig.counts() == (0, 0)


def test_an_engine_that_is_away_is_not_hungry() -> None:
    rig = Rig()
    other = rig.open()
    finish(rig.one.add([request(1)], 0.0, ()))
    rig.one.scheduler.share.hungry = True
    shares = rig.one.scheduler._shares
    assert shares.allowance(other.scheduler.share) < 16384
    rig.one.pause()
    assert shares.allowance(other.scheduler.share) == 16384


def test_the_memory_of_a_closed_scheduler_is_given_back_in_slices() -> None:
    rig = Rig(max_requests=1000)
    finish(rig.one.add([request(number) for number in range(300)], 0.0, ()))
    tokens = weakref.ref(rig.one.scheduler.queues.states[0].tokens)
    gc.disable()
    try:
        slices = rig.one.close()
        assert rig.counts() == (0, 0)
        assert len(list(slices)) == 3
        assert tokens() is None, "without the garbage collector"
    finally:
        gc.enable()
