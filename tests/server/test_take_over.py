"""A process of the daemon that takes over from one that was killed: sessions, sequences, replies, limits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life, caller, end_stream
from kept_files import HeldFiles
from manual_clock import ManualClock

from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    QuotaExceededError,
    SessionTakenError,
    StaleStepError,
    UnknownSessionError,
)
from kvservice.v1 import blocks_pb2, scheduler_pb2

GRACE_S = 20.0
TOKENS = list(range(10))


@pytest.fixture
def held() -> Iterator[HeldFiles]:
    held = HeldFiles()
    yield held
    held.close()


@pytest.fixture
def start(held: HeldFiles, clock: ManualClock) -> Iterator[Callable[..., Life]]:
    """Return a function that starts the next process of the daemon, after the end of the one before."""
    lives: list[Life] = []

    def start(*, kill: bool = True, **options: Any) -> Life:
        if lives and kill:
            lives[-1].kill()
        lives.append(Life(held, clock, session_grace_s=GRACE_S, max_detach_ttl_s=1000.0, **options))
        return lives[-1]

    yield start
    if lives:
        lives[-1].kill()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_a_session_resumes_with_its_token_sequences_and_kv(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        assert (life.core.report.outcome, life.core.report.is_kept) == ("first start", True)
        session = life.open("engine", tenant="acme")
        computed = await life.compute(session, 7, TOKENS, seed=1)
        await life.allocate(session, 8, [50, 51])
        cached = await life.compute(session, 9, list(range(100, 108)), seed=2)
        await life.call(session, "free", blocks_pb2.FreeRequest(sequence_ids=[9]))

        life = start()
        report = life.core.report
        assert (report.outcome, report.kept.sessions, report.kept.sequences) == ("taken over", 1, 2)
        assert (report.kept.cached_blocks, report.lost.sequences) == (2, 0)
        again = life.attach(session.token, reconnects=True)
        assert (again.session_id, again.name, again.tenant) == (session.session_id, "engine", "acme")
        assert again.namespace.sequence_ids() == [7, 8]
        assert np.array_equal(await life.read(again, 7, len(TOKENS)), computed)
        response = await life.allocate(again, 10, list(range(100, 109)))
        assert list(response.num_cached_tokens) == [8]
        assert np.array_equal(await life.read(again, 10, 8), cached)
        step = await life.call(again, "append", blocks_pb2.AppendRequest(sequence_ids=[7], token_ids=[3]))
        await life.write(again, step.step_id, 1)
        life.manager.check_integrity()
        another = life.open()
        assert another.session_id > session.session_id
        assert another.token != session.token

    run(scenario())


def test_tokens_and_identities_are_checked_as_before(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        with caller("alice"):
            session = start().open()
        life = start()
        for name, token in (("bob", session.token), ("", session.token), ("alice", b"x" * 16)):
            with caller(name), pytest.raises(UnknownSessionError):
                life.attach(token)
        assert life.sessions.num_foreign == 2
        with caller("alice"):
            assert life.attach(session.token).session_id == session.session_id

    run(scenario())


def test_a_client_that_was_taken_over_from_before_stays_out(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        life.attach(session.token, holder=2)
        life = start()
        with pytest.raises(SessionTakenError):
            life.attach(session.token, holder=1, reconnects=True)
        life.attach(session.token, holder=2, reconnects=True)
        assert [one.holder for one in start().sessions] == [2]

    run(scenario())


def test_a_closed_session_stays_closed(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        await life.compute(session, 1, TOKENS)
        other = life.open()
        closing = life.sessions.close_in_slices(session)
        next(closing, None)
        life = start()
        assert [one.session_id for one in life.sessions] == [other.session_id]
        with pytest.raises(UnknownSessionError) as closed:
            life.attach(session.token)
        assert "began empty" not in closed.value.message, "this daemon has the sessions of the one before"
        assert life.manager.stats().sequences == 0
        assert life.core.report.lost.sequences == 0

    run(scenario())


def test_a_daemon_that_began_empty_says_so_of_sessions_that_it_does_not_know(start: Callable[..., Life]) -> None:
    with pytest.raises(UnknownSessionError, match=r"this daemon began empty: sessions from before it, .* are gone"):
        start().attach(b"from the daemon before")


# ---- times


def test_an_attached_session_waits_for_its_stream(start: Callable[..., Life], clock: ManualClock) -> None:
    """The grace time begins with the restart, because nobody could attach before."""

    async def scenario() -> None:
        session = start().open()
        clock.advance(10 * GRACE_S)
        life = start()
        clock.advance(GRACE_S - 0.01)
        assert len(life.sessions) == 1
        clock.advance(0.02)
        assert len(life.sessions) == 0
        assert life.sessions.num_lost == 1
        with pytest.raises(UnknownSessionError):
            life.attach(session.token)

    run(scenario())


def test_the_time_of_a_detached_session_goes_on(start: Callable[..., Life], clock: ManualClock) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open(detachable=True, detach_ttl_s=100.0)
        life.sessions.detach(session, end_stream)
        clock.advance(30.0)
        start()
        clock.advance(30.0)
        life = start()
        clock.advance(39.9)
        assert len(life.sessions) == 1
        clock.advance(0.2)
        assert len(life.sessions) == 0

    run(scenario())


def test_every_session_has_the_grace_time_to_reconnect(start: Callable[..., Life], clock: ManualClock) -> None:
    """Also one whose time was over while there was no daemon, and one that never had a stream."""

    async def scenario() -> None:
        life = start()
        session = life.open(detachable=True, detach_ttl_s=100.0)
        life.sessions.detach(session, end_stream)
        life.open(attached=False)
        life.kill()
        clock.now += 1000.0
        life = start(kill=False)
        clock.advance(GRACE_S - 0.01)
        assert len(life.sessions) == 2
        life.attach(session.token)
        clock.advance(0.02)
        assert len(life.sessions) == 1

    run(scenario())


# ---- limits and tables


def test_sessions_count_in_limits_and_tables(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start(max_sessions=2)
        first = life.open("one", tenant="acme")
        await life.compute(first, 1, TOKENS)
        second = life.open("two", tenant="zoo")
        await life.compute(second, 1, TOKENS[:4])
        life = start(max_sessions=2)
        with pytest.raises(QuotaExceededError):
            life.open()
        rows = life.core.kept.arrays.kept("sessions", (2, 10), np.int64)
        tenants = life.core.kept.arrays.kept("tenants", (33, 4), np.int64)
        assert sorted(rows[:, 3].tolist()) == [first.session_id, second.session_id]
        assert rows[:, 4].tolist() == [0, 0], "no stream is attached"
        assert sorted(rows[:, 0].tolist()) == [4, 10], "the counters go on"
        list(life.sessions.close_in_slices(life.attach(first.token)))
        third = life.open("three", tenant="acme")
        assert tenants[:, 0].tolist()[:2] == [10, 0]
        assert life.core.kept.arrays.kept("sessions", (2, 10), np.int64)[third.row.number, 9] == 0, "acme's row"

    run(scenario())


def test_pins_and_swapped_sequences_live_on(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        kv = await life.compute(session, 1, TOKENS)
        pin = await life.call(session, "pin", blocks_pb2.PinRequest(token_ids=TOKENS[:8], ttl_s=60.0))
        await life.call(session, "swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[1]))
        life = start()
        assert life.core.report.kept.pins == 1
        session = life.attach(session.token)
        await life.call(session, "swap_in", blocks_pb2.SwapInRequest(sequence_ids=[1]))
        assert np.array_equal(await life.read(session, 1, len(TOKENS)), kv)
        await life.call(session, "unpin", blocks_pb2.UnpinRequest(pin_id=pin.pin_id))

    run(scenario())


def test_a_scheduler_ends_and_its_client_opens_another(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        opening = scheduler_pb2.OpenSchedulerRequest(request_id=1)
        requests = [scheduler_pb2.ScheduledRequest(request_id=5, token_ids=TOKENS, max_tokens=4, width=1)]
        adding = scheduler_pb2.AddRequestsRequest(request_id=2, requests=requests)
        scheduling = scheduler_pb2.ScheduleRequest(request_id=3)
        for method, request in (("open_scheduler", opening), ("add_requests", adding), ("schedule", scheduling)):
            await life.call(session, method, request)
        assert life.manager.stats().sequences == 1
        life = start()
        assert (life.core.report.lost.schedulers, life.core.report.lost.sequences) == (1, 0)
        assert life.manager.stats().sequences == 0
        session = life.attach(session.token)
        for method, request in (("add_requests", adding), ("schedule", scheduling)):
            with pytest.raises(FailedPreconditionError, match="no scheduler"):
                await life.call(session, method, request)
        for method, request in (("open_scheduler", opening), ("add_requests", adding), ("schedule", scheduling)):
            await life.call(session, method, request)
        assert life.manager.stats().sequences == 1

    run(scenario())


# ---- replies


def append(request_id: int, token: int = 3) -> blocks_pb2.AppendRequest:
    return blocks_pb2.AppendRequest(request_id=request_id, sequence_ids=[1], token_ids=[token])


def test_a_repeated_request_gets_its_reply_and_is_not_executed_again(start: Callable[..., Life]) -> None:
    async def scenario() -> None:
        life = start()
        session = life.open()
        allocated = await life.allocate(session, 1, TOKENS, request_id=1)
        appended = await life.call(session, "append", append(2))
        life = start()
        session = life.attach(session.token, reconnects=True)
        assert await life.allocate(session, 1, TOKENS, request_id=1) == allocated
        assert await life.call(session, "append", append(2)) == appended
        assert life.manager.describe(session.namespace, [1])[0].length == len(TOKENS) + 1
        with pytest.raises(StaleStepError):
            await life.write(session, appended.step_id, len(TOKENS) + 1)
        with pytest.raises(InvalidArgumentError, match="used for append"):
            await life.call(session, "free", blocks_pb2.FreeRequest(request_id=2, sequence_ids=[1]))
        await life.call(session, "append", append(3))
        assert life.manager.describe(session.namespace, [1])[0].length == len(TOKENS) + 2

    run(scenario())


def test_an_operation_whose_reply_was_not_kept_is_undone(
    start: Callable[..., Life], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process ends between the operation and its end. The repeated request is executed, once."""

    class KilledError(BaseException):
        pass

    async def scenario() -> None:
        for is_kept in (False, True):
            life = start()
            session = life.open()
            await life.allocate(session, 1, TOKENS)
            keep = session.replies.keep

            def keep_and_die(*reply: Any, is_kept: bool = is_kept, keep: Callable[..., object] = keep) -> None:
                if is_kept:
                    keep(*reply)
                raise KilledError

            with monkeypatch.context() as patched:
                patched.setattr(session.replies, "keep", keep_and_die)
                with pytest.raises(KilledError):
                    await life.call(session, "append", append(1))
            life = start()
            session = life.attach(session.token)
            assert life.manager.describe(session.namespace, [1])[0].length == len(TOKENS)
            await life.call(session, "append", append(1))
            await life.call(session, "append", append(1))
            assert life.manager.describe(session.namespace, [1])[0].length == len(TOKENS) + 1
            life.manager.check_integrity()

    run(scenario())
