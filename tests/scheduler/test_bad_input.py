"""Bad calls of the scheduler: a typed error that names the field, and nothing changed by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from each_row import each_row
from schedule_rig import make_manager, make_rig, open_rig

from kvservice.errors import (
    DuplicateSequenceError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    QuotaExceededError,
    UnknownSequenceError,
)
from kvservice.scheduler import Report, Request, Scheduler, SchedulerConfig, check_integrity

BAD_REQUESTS: list[tuple[Any, ...]] = [
    (Request(-1, [1], 1), "request_id"),
    (Request(1, [], 1), "token_ids"),
    (Request(1, [-1], 1), "token_ids[0]"),
    (Request(1, [1.5], 1), "token_ids"),
    (Request(1, np.zeros(1024, np.int32), 1), "token_ids"),
    (Request(1, [1], 0), "max_tokens"),
    (Request(1, [1], 1024), "max_tokens"),
    (Request(1, [1], 1, priority=1 << 40), "priority"),
    (Request(1, [1], 1, extra_keys=[(0, b"")]), "extra_keys[0]"),
]


def test_a_bad_request_is_refused() -> None:
    with each_row() as row:
        for request_, field in BAD_REQUESTS:
            with row((request_, field)):
                rig = make_rig(1000)
                with pytest.raises(InvalidArgumentError) as refused:
                    rig.engine.add(request_)
                assert refused.value.field == field
                assert len(rig.engine) == 0


def test_ids_in_use_are_refused() -> None:
    rig = make_rig()
    rig.add(1, 4)
    with pytest.raises(DuplicateSequenceError):
        rig.engine.add(Request(1, [1], 1))
    rig.step()
    with pytest.raises(DuplicateSequenceError):
        rig.engine.add(Request(1, [1], 1))


def test_requests_are_limited() -> None:
    rig = make_rig(max_requests=1)
    rig.add(1, 4)
    with pytest.raises(QuotaExceededError) as refused:
        rig.engine.add(Request(2, [1], 1))
    assert refused.value.metadata["limit"] == "max_requests"


def test_unknown_and_finished_requests_cannot_be_aborted() -> None:
    rig = make_rig()
    rig.add(1, 4, max_tokens=1)
    with pytest.raises(UnknownSequenceError):
        rig.engine.abort(2)
    rig.run()
    with pytest.raises(UnknownSequenceError):
        rig.engine.abort(1)


def test_a_request_of_the_current_batch_is_aborted_once_and_ends_with_it() -> None:
    rig = make_rig()
    rig.add(1, 4)
    rig.add(2, range(50, 54))
    batch = rig.begin()
    rig.engine.abort(1)
    with pytest.raises(UnknownSequenceError):
        rig.engine.abort(1)
    rig.end(batch)
    check_integrity(rig.engine)
    assert rig.finished == [1]
    assert len(rig.engine) == 1


def test_a_second_schedule_must_wait_for_the_tokens_of_the_first() -> None:
    rig = make_rig()
    rig.add(1, 4)
    batch = rig.begin()
    with pytest.raises(FailedPreconditionError, match="not reported"):
        rig.engine.schedule()
    rig.end(batch)
    assert rig.step().number == batch.number + 1


BAD_REPORTS: list[tuple[Any, ...]] = [
    ([1], [], "token_ids"),
    ([1, 2, 3], [], "token_ids"),
    ([], [], "token_ids"),
    ([1, -2], [], "token_ids[1]"),
    ([1, 2], [3], "finished"),
    ([1, 2], ["x"], "finished"),
]


def test_a_bad_report_changes_nothing() -> None:
    with each_row() as row:
        for tokens, finished, field in BAD_REPORTS:
            with row((tokens, finished, field)):
                rig = make_rig()
                rig.add(1, 4)
                rig.add(2, range(50, 54))
                rig.add(3, range(90, 94))
                batch = rig.begin(max_step_tokens=10)
                with pytest.raises(InvalidArgumentError) as refused:
                    rig.engine.update(Report(batch.number, tokens, finished=finished))
                assert refused.value.field == field
                rig.end(batch)
                check_integrity(rig.engine)
                rig.run()


def test_reports_are_for_the_current_batch_when_it_is_computed() -> None:
    rig = make_rig()
    with pytest.raises(FailedPreconditionError):
        rig.engine.update(Report(0, []))
    rig.add(1, 4)
    batch = rig.engine.schedule()
    assert batch.step is not None
    with pytest.raises(FailedPreconditionError):
        rig.engine.update(Report(batch.number + 1, [5]))
    with pytest.raises(FailedPreconditionError, match="layers"):
        rig.engine.update(Report(batch.number, [5]))
    rig.manager.mark_all_layers(rig.namespace, batch.step.step_id)
    rig.engine.update(Report(batch.number, [5]))
    with pytest.raises(FailedPreconditionError):
        rig.engine.update(Report(batch.number, [5]))


BUDGETS_ARE_CHECKED: list[Any] = [{"max_step_tokens": 0}, {"max_step_tokens": 1 << 40}, {"max_running": 1 << 40}]


def test_budgets_are_checked() -> None:
    with each_row() as row:
        for budget in BUDGETS_ARE_CHECKED:
            with row(budget):
                with pytest.raises(InvalidArgumentError) as refused:
                    make_rig().engine.schedule(**budget)
                assert refused.value.field in budget


BAD_CONFIGURATIONS: list[tuple[Any, ...]] = [
    ("max_step_tokens", 0),
    ("max_running", True),
    ("lookahead", -1),
    ("reserve_steps", 1.5),
    ("max_stalled_fraction", 1.5),
    ("delay_factor", float("nan")),
    ("swap_block_s", "x"),
    ("batches", "chunked"),
    ("order", "fcfs"),
    ("preemption", None),
]


def test_a_bad_configuration_is_refused() -> None:
    with each_row() as row:
        for field, value in BAD_CONFIGURATIONS:
            with row((field, value)):
                with pytest.raises(InvalidArgumentError) as refused:
                    SchedulerConfig(**{field: value})
                assert refused.value.field == field


def test_weights_are_numbers_in_a_range() -> None:
    with each_row() as row:
        weights: tuple[Any, ...] = (0, -1, True, float("inf"), float("nan"), "1", 5e-324, 1e-7, 1e7, 1.7e308, 10**400)
        for weight in weights:
            with row(weight):
                manager = make_manager()
                with pytest.raises(InvalidArgumentError) as refused:
                    open_rig(Scheduler(manager), manager, weight)
                assert refused.value.field == "weight"


def test_a_namespace_has_one_engine() -> None:
    manager = make_manager()
    scheduler = Scheduler(manager)
    rig = open_rig(scheduler, manager)
    with pytest.raises(KVServiceError, match="already"):
        scheduler.open_engine(rig.namespace)
