"""The calls of the scheduler over a real daemon: what they answer, what they refuse, and how they are repeated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from each_row import each_row

from kvservice.v1 import attention_pb2, blocks_pb2, scheduler_pb2

KINDS = scheduler_pb2
HUGE = (1 << 63) - 1


class RawScheduler:
    """A scheduler on the wire. Its calls are unary and over the stream, in turns."""

    def __init__(self, raw: Any, session: Any) -> None:
        self._raw, self.session = raw, session
        self._transports = itertools.cycle(("unary", "stream"))

    def call(self, name: str, request: Any) -> Any:
        return self.session.call(name, request, next(self._transports))

    def refused(self, name: str, request: Any) -> tuple[str, str, str]:
        """Return (status, reason, field) of a call that must not change anything."""
        before = self.session.describe(), self.session.wire.stats()
        answer = self.call(name, request)
        assert isinstance(answer, self._raw.Refusal), answer
        assert (self.session.describe(), self.session.wire.stats()) == before
        return answer.code, answer.reason, answer.field

    def ok(self, name: str, request: Any) -> Any:
        answer = self.call(name, request)
        assert not isinstance(answer, self._raw.Refusal), answer
        return answer

    def open(self, **settings: Any) -> Any:
        return self.ok("open_scheduler", KINDS.OpenSchedulerRequest(**settings))

    def add(self, request_id: int, prompt: range, max_tokens: int = 4) -> None:
        one = KINDS.ScheduledRequest(request_id=request_id, token_ids=prompt, max_tokens=max_tokens, width=1)
        self.ok("add_requests", KINDS.AddRequestsRequest(requests=[one]))

    def schedule(self, **fields: Any) -> Any:
        return self.ok("schedule", KINDS.ScheduleRequest(**fields))

    def compute(self, response: Any, num_layers: int = 2) -> None:
        """Write the first layers of a batch's step."""
        tensor = self._raw.tensor(sum(response.step.query_lens), 2, 32)
        for layer in range(num_layers):
            request = attention_pb2.WriteRequest(step_id=response.step.step_id, layer=layer, key=tensor, value=tensor)
            self.ok("write", request)


@contextmanager
def new_scheduler(raw: Any, wire: Any) -> Iterator[RawScheduler]:
    session = raw.RawSession(wire)
    session.ok("reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
    try:
        yield RawScheduler(raw, session)
    finally:
        session.ok("reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
        session.close()


@contextmanager
def new_running(raw: Any, wire: Any) -> Iterator[tuple[RawScheduler, Any]]:
    """A scheduler with two computed requests, 7 and 8, whose tokens are not reported, and one that waits, 9."""
    with new_scheduler(raw, wire) as scheduler:
        scheduler.open(max_running=2)
        for number in (7, 8, 9):
            scheduler.add(number, range(10 * number, 11 * number))
        response = scheduler.schedule()
        scheduler.compute(response)
        yield scheduler, response


@pytest.fixture
def scheduler(raw: Any, wire: Any) -> Iterator[RawScheduler]:
    raw.await_no_sessions(wire)
    with new_scheduler(raw, wire) as opened:
        yield opened


@pytest.fixture
def running(raw: Any, wire: Any) -> Iterator[tuple[RawScheduler, Any]]:
    raw.await_no_sessions(wire)
    with new_running(raw, wire) as opened:
        yield opened


def test_what_a_batch_says(scheduler: RawScheduler) -> None:
    opened = scheduler.open()
    assert opened == KINDS.OpenSchedulerResponse(
        max_step_tokens=8192, max_running=64, lookahead=0, max_requests=65536, existed=False
    )
    assert scheduler.open().existed
    assert scheduler.schedule() == KINDS.ScheduleResponse()
    scheduler.add(3, range(6))
    scheduler.add(4, range(10, 15))
    first = scheduler.schedule(max_step_tokens=9)
    assert first == KINDS.ScheduleResponse(
        batch=2,
        step=blocks_pb2.StepResponse(step_id=1, query_lens=[6, 3], context_lens=[6, 3]),
        sequence_ids=[3, 4],
        sampled_ids=[3],
        sampled_rows=[0],
        num_running=2,
    )
    scheduler.compute(first)
    second = scheduler.schedule(reports=[KINDS.StepReport(batch=2, token_ids=[77])])
    assert (list(second.step.query_lens), list(second.step.context_lens)) == ([1, 2], [7, 5])
    assert (second.num_decodes, list(second.sampled_ids), list(second.sampled_rows)) == (1, [3, 4], [0, 1])
    scheduler.compute(second)
    report = KINDS.StepReport(batch=second.batch, token_ids=[78, 79], finished_ids=[4])
    third = scheduler.schedule(reports=[report])
    assert (list(third.finished_ids), list(third.sequence_ids), third.num_running) == ([4], [3], 1)
    (described,) = scheduler.session.describe().sequences
    assert list(described.token_ids) == [0, 1, 2, 3, 4, 5, 77, 78]


def test_reports_that_are_refused(raw: Any, wire: Any) -> None:
    raw.await_no_sessions(wire)
    precondition, invalid = "FAILED_PRECONDITION", "INVALID_ARGUMENT"
    rows: list[tuple[dict[str, Any], str, str]] = [
        ({"batch": 0}, precondition, "batch"),
        ({"batch": (1 << 64) - 1}, precondition, "batch"),
        ({"token_ids": []}, invalid, "token_ids"),
        ({"token_ids": [1]}, invalid, "token_ids"),
        ({"token_ids": [1, 2, 3]}, invalid, "token_ids"),
        ({"token_ids": [1, -2]}, invalid, "token_ids[1]"),
        ({"finished_ids": [9]}, invalid, "finished_ids"),
        ({"finished_ids": [HUGE]}, invalid, "finished_ids"),
    ]
    with each_row() as row:
        for report, code, field in rows:
            with row(report), new_running(raw, wire) as (scheduler, response):
                wrong = KINDS.StepReport(**({"batch": response.batch, "token_ids": [1, 2]} | report))
                answer = scheduler.refused("schedule", KINDS.ScheduleRequest(reports=[wrong]))
                assert answer == (code, code, f"reports[0].{field}")
                # The right report is still accepted.
                right = KINDS.StepReport(batch=response.batch, token_ids=[1, 2])
                assert scheduler.schedule(reports=[right]).num_decodes == 2


def test_a_report_with_bad_budgets_is_not_applied(raw: Any, wire: Any) -> None:
    raw.await_no_sessions(wire)
    with each_row() as row:
        for field, value in (
            ("max_step_tokens", -1),
            ("max_step_tokens", 8193),
            ("max_step_tokens", HUGE),
            ("max_running", 3),
            ("max_running", -HUGE),
        ):
            with row((field, value)), new_running(raw, wire) as (scheduler, response):
                report = KINDS.StepReport(batch=response.batch, token_ids=[1, 2])
                budget: dict[str, Any] = {field: value}
                request = KINDS.ScheduleRequest(reports=[report], **budget)
                assert scheduler.refused("schedule", request) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", field)
                assert scheduler.schedule(reports=[report]).num_decodes == 2


def test_a_batch_is_reported_before_the_next_one(running: Any) -> None:
    scheduler, response = running
    expected = ("FAILED_PRECONDITION", "FAILED_PRECONDITION", "reports")
    assert scheduler.refused("schedule", KINDS.ScheduleRequest()) == expected
    report = KINDS.StepReport(batch=response.batch, token_ids=[1, 2])
    twice = KINDS.ScheduleRequest(reports=[report, report])
    assert scheduler.refused("schedule", twice)[2] == "reports[1].batch"
    many = KINDS.ScheduleRequest(reports=[report, report, report])
    assert scheduler.refused("schedule", many) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", "reports")
    scheduler.schedule(reports=[report])


def test_tokens_without_their_kv_are_refused(scheduler: RawScheduler) -> None:
    scheduler.open()
    scheduler.add(7, range(7))
    response = scheduler.schedule()
    scheduler.compute(response, num_layers=1)
    request = KINDS.ScheduleRequest(reports=[KINDS.StepReport(batch=response.batch, token_ids=[1])])
    expected = ("FAILED_PRECONDITION", "FAILED_PRECONDITION", "reports[0].batch")
    assert scheduler.refused("schedule", request) == expected


def test_calls_without_a_scheduler(scheduler: RawScheduler) -> None:
    one = KINDS.ScheduledRequest(request_id=1, token_ids=[1], max_tokens=1, width=1)
    for name, request in (
        ("add_requests", KINDS.AddRequestsRequest(requests=[one])),
        ("abort_requests", KINDS.AbortRequestsRequest(request_ids=[1])),
        ("schedule", KINDS.ScheduleRequest()),
        ("describe_requests", KINDS.DescribeRequestsRequest()),
    ):
        assert scheduler.refused(name, request)[:2] == ("FAILED_PRECONDITION", "FAILED_PRECONDITION"), name


def test_requests_behind_the_last_one(running: Any) -> None:
    scheduler, _ = running
    for first, expected in ((0, [7, 8, 9]), (2, [9]), (3, []), (2**63 - 1, [])):
        found = scheduler.ok("describe_requests", KINDS.DescribeRequestsRequest(first=first)).requests
        assert [one.request_id for one in found] == expected, first


def test_aborts_that_are_refused(raw: Any, wire: Any) -> None:
    raw.await_no_sessions(wire)
    invalid, unknown = ("INVALID_ARGUMENT", "INVALID_ARGUMENT"), ("NOT_FOUND", "UNKNOWN_SEQUENCE")
    rows = [
        ([], (*invalid, "request_ids")),
        ([9, 1], (*unknown, "request_ids[1]")),
        ([-1], (*unknown, "request_ids[0]")),
        ([9, 9], (*invalid, "request_ids")),
    ]
    with each_row() as row:
        for ids, expected in rows:
            with row(ids), new_running(raw, wire) as (scheduler, _):
                assert scheduler.refused("abort_requests", KINDS.AbortRequestsRequest(request_ids=ids)) == expected
                aborted = scheduler.ok("abort_requests", KINDS.AbortRequestsRequest(request_ids=[9, 7]))
                assert list(aborted.finished_ids) == [9]


def test_a_repeated_schedule_never_applies_a_report_twice(running: Any) -> None:
    scheduler, response = running
    report = KINDS.StepReport(batch=response.batch, token_ids=[1, 2])
    first = scheduler.schedule(reports=[report], request_id=5)
    assert scheduler.schedule(reports=[report], request_id=5) == first
    lengths = [one.length for one in scheduler.session.describe().sequences]
    assert lengths == [8, 9]
    assert scheduler.refused("schedule", KINDS.ScheduleRequest(reports=[report]))[2] == "reports[0].batch"


def test_a_refused_request_id_can_be_used_again(running: Any) -> None:
    scheduler, response = running
    assert scheduler.refused("schedule", KINDS.ScheduleRequest(request_id=6))[2] == "reports"
    report = KINDS.StepReport(batch=response.batch, token_ids=[1, 2])
    assert scheduler.schedule(reports=[report], request_id=6).num_decodes == 2


def test_a_closed_session_ends_its_scheduler(raw: Any, wire: Any) -> None:
    session = raw.RawSession(wire)
    scheduler = RawScheduler(raw, session)
    scheduler.open()
    scheduler.add(1, range(9))
    scheduler.schedule()
    session.close()
    raw.await_no_sessions(wire)
    assert wire.stats().sequences == 0


def test_unknown_choices(scheduler: RawScheduler) -> None:
    for field in ("policy", "order", "preemption"):
        choice: dict[str, Any] = {field: 9}
        request = KINDS.OpenSchedulerRequest(**choice)
        assert scheduler.refused("open_scheduler", request) == ("INVALID_ARGUMENT", "INVALID_ARGUMENT", field)
    assert not scheduler.open().existed


def test_of_two_reports_none_is_applied_if_one_is_wrong(scheduler: RawScheduler) -> None:
    scheduler.open()
    scheduler.add(7, range(7))
    scheduler.add(8, range(80, 88), max_tokens=9)
    first = scheduler.schedule()
    scheduler.compute(first)
    report = KINDS.StepReport(batch=first.batch, token_ids=[1, 2])
    second = scheduler.schedule(reports=[report])
    third = scheduler.schedule(ahead=True)
    assert list(third.sampled_ids) == [7, 8]
    expected = ("FAILED_PRECONDITION", "FAILED_PRECONDITION", "reports")
    assert scheduler.refused("schedule", KINDS.ScheduleRequest(ahead=True)) == expected
    reports = [
        KINDS.StepReport(batch=second.batch, token_ids=[3, 4], finished_ids=[7]),
        KINDS.StepReport(batch=third.batch, token_ids=[5]),
    ]
    scheduler.compute(second)
    assert scheduler.refused("schedule", KINDS.ScheduleRequest(reports=reports))[2] == "reports[1].batch"
    scheduler.compute(third)
    for wrong, field in (({"token_ids": [5, 6]}, "token_ids"), ({"finished_ids": [7]}, "finished_ids")):
        changed: dict[str, Any] = {"batch": third.batch, "token_ids": [5]} | wrong
        request = KINDS.ScheduleRequest(reports=[reports[0], KINDS.StepReport(**changed)])
        assert scheduler.refused("schedule", request)[2] == f"reports[1].{field}"
    last = scheduler.schedule(reports=reports)
    assert (list(last.finished_ids), list(last.sampled_ids)) == ([7], [8])
    (described,) = scheduler.session.describe().sequences
    assert list(described.token_ids) == [*range(80, 88), 2, 4, 5]
