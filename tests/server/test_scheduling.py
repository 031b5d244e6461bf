"""The scheduler of a session without a daemon: what happens between the slices of its calls, and its limits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvservice.blocks import BlockManager, BlocksConfig
from kvservice.blocks.slices import finish
from kvservice.errors import DuplicateSequenceError, InvalidArgumentError, QuotaExceededError, UnknownSessionError
from kvservice.scheduler import Request, Scheduler, SchedulerConfig
from kvservice.scheduler.integrity import check_integrity
from kvservice.server.scheduling import QueueTotals, SchedulerSettings, SessionScheduler

LONG = 32768


class Rig:
    """A scheduler, and the totals that it shares with others."""

    def __init__(self, max_requests: int = 100, max_tokens: int = 1 << 20) -> None:
        config = BlocksConfig(num_blocks=16384, block_size=4, max_sequence_tokens=65536, max_sequences=16)
        self.manager = BlockManager(config)
        self.engine: Any = SimpleNamespace(schedulers=Scheduler(self.manager))
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
