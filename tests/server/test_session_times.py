"""The times at which sessions without a stream end, on a clock that the tests advance."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from blocks_rig import identity, keys
from daemon_lives import Life, end_stream, finish
from each_row import each_row
from manual_clock import ManualClock

from kvservice.errors import QuotaExceededError, UnknownSessionError
from kvservice.server.rpc.slots import Rpc, Slots
from kvservice.server.rpc.stream import Stream
from kvservice.v1 import session_pb2

# How long a session waits for its first stream at least.
ATTACH_S = 5.0
SHORT_GRACE_S, LONG_GRACE_S = ATTACH_S / 10, ATTACH_S * 2


@pytest.fixture
def make_registry(clock: ManualClock) -> Iterator[Callable[..., Any]]:
    lives: list[Life] = []

    def make(**options: Any) -> Any:
        lives.append(Life(clock=clock, **options))
        return lives[-1].sessions

    yield make
    for life in lives:
        life.kill()


def attach(registry: Any, session: Any) -> None:
    registry.attach(session.token, 1, False, end_stream)


def open_attached(registry: Any, **options: Any) -> Any:
    session = registry.open("", "", options.get("detachable", False), options.get("detach_ttl_s", 0.0))
    attach(registry, session)
    return session


def test_a_session_that_was_left_ends_in_its_time(make_registry, clock) -> None:
    rows: dict[str, tuple[dict[str, Any], float]] = {
        "not detachable": ({}, SHORT_GRACE_S),
        "shorter than grace": ({"detachable": True, "detach_ttl_s": SHORT_GRACE_S / 2}, SHORT_GRACE_S / 2),
        "longer than grace": ({"detachable": True, "detach_ttl_s": 60.0}, 60.0),
        "the daemon's limit": ({"detachable": True}, 3600.0),
    }
    with each_row() as row:
        for name, (options, wait_s) in rows.items():
            with row(name):
                registry = make_registry(session_grace_s=SHORT_GRACE_S)
                session = open_attached(registry, **options)
                clock.advance(10_000)
                registry.detach(session, end_stream)
                clock.advance(wait_s * 0.99)
                assert len(registry) == 1
                clock.advance(wait_s * 0.02)
                assert (len(registry), registry.num_lost) == (0, 1)
                with pytest.raises(UnknownSessionError):
                    registry.get(session.token)


def test_a_session_never_attached_ends(make_registry, clock) -> None:
    for grace_s, wait_s in ((SHORT_GRACE_S, ATTACH_S), (LONG_GRACE_S, LONG_GRACE_S)):
        registry = make_registry(session_grace_s=grace_s)
        registry.open("", "", True, 0.0)
        clock.advance(wait_s * 0.99)
        assert len(registry) == 1
        clock.advance(wait_s * 0.02)
        assert (len(registry), registry.num_lost) == (0, 1)


def test_who_comes_back_in_time_finds_a_session_that_stays(make_registry, clock) -> None:
    registry = make_registry(session_grace_s=SHORT_GRACE_S)
    session = open_attached(registry)
    for _ in range(3):
        registry.detach(session, end_stream)
        clock.advance(SHORT_GRACE_S * 0.99)
        attach(registry, session)
        clock.advance(SHORT_GRACE_S * 2)
    assert len(registry) == 1
    # A stream that lost the session to another one starts no time.
    registry.attach(session.token, 2, False, lambda _: None)
    registry.detach(session, end_stream)
    clock.advance(SHORT_GRACE_S * 2)
    assert len(registry) == 1


def test_what_a_detachable_session_shares_is_closed_after_the_grace_time(make_registry, clock, monkeypatch) -> None:
    registry = make_registry(session_grace_s=SHORT_GRACE_S)
    session = open_attached(registry, detachable=True)
    closed: list[float] = []
    monkeypatch.setattr(session, "unshare", lambda **__: closed.append(clock.now))
    registry.detach(session, end_stream)
    clock.advance(60)
    assert closed == [SHORT_GRACE_S]
    assert len(registry) == 1


def test_only_a_holder_that_closes_its_session_has_stopped_to_write(make_registry, clock, monkeypatch) -> None:
    ends: list[bool] = []
    registry = make_registry()
    by_holder, by_token, taken, lost = (open_attached(registry) for _ in range(4))
    for session in (by_holder, by_token, taken, lost):
        monkeypatch.setattr(session, "unshare", lambda *, writers_done=False: ends.append(writers_done))
    finish(registry.close_for_in_slices(by_holder.token, 1))
    finish(registry.close_for_in_slices(by_token.token, 0))
    assert ends == [True, False]
    registry.attach(taken.token, 2, False, end_stream)
    assert ends == [True, False, False]
    registry.detach(lost, end_stream)
    clock.advance(1000.0)
    assert ends[3:]
    assert not any(ends[3:])


def test_sessions_that_come_and_go_do_not_fill_the_log(make_registry, caplog) -> None:
    registry = make_registry()
    caplog.set_level(logging.INFO, "kvservice.server")
    for _ in range(100):
        finish(registry.close_in_slices(registry.open("engine", "", False, 0.0)))
    said = [record.message.split()[2] for record in caplog.records]
    assert Counter(said) == {"opened": 20, "closed,": 20}
    assert [record.session_id for record in caplog.records[:2]] == [1, 1]


class FakeScheduler:
    """A scheduler with four requests."""

    def __len__(self) -> int:
        return 4

    def pause(self) -> None:
        pass

    def close(self) -> Iterator[None]:
        yield from ()


def test_the_log_says_which_sessions_were_lost_and_why(make_registry, clock, caplog) -> None:
    registry = make_registry(session_grace_s=SHORT_GRACE_S)
    left, closed = open_attached(registry), open_attached(registry)
    registry.open("", "", False, 0.0)
    namespace = closed.store.open(identity())[1]
    assert closed.store.reserve(namespace, keys(1))[0]
    left.scheduler = FakeScheduler()
    caplog.set_level(logging.INFO, "kvservice.server")
    finish(registry.close_in_slices(closed))
    registry.detach(left, end_stream)
    clock.advance(ATTACH_S)
    assert [(record.session_id, record.reason, record.message) for record in caplog.records] == [
        (2, "closed", "session 2 closed, 0 sequences freed, 0 leases and 1 reservations ended"),
        (
            1,
            "lost",
            "session 1 lost: no stream attached to it for 0.5 s, 0 sequences freed, 0 leases and 0 reservations ended, "
            "4 unfinished requests dropped",
        ),
        (
            3,
            "lost",
            "session 3 lost: no stream attached to it for 5 s, 0 sequences freed, 0 leases and 0 reservations ended",
        ),
    ]


def test_a_session_too_many_names_the_option_also_in_the_log(make_registry, caplog) -> None:
    registry = make_registry(max_sessions=2)
    for _ in range(2):
        open_attached(registry)
    for _ in range(100):
        with pytest.raises(QuotaExceededError, match="2 sessions are open: see max_sessions"):
            registry.open("", "", False, 0.0)
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert said == ["a session was refused: 2 are open, see max_sessions"] * 20


def test_an_engine_that_is_away_keeps_no_blocks_free_for_itself(make_registry: Any) -> None:
    registry = make_registry()
    session = open_attached(registry, detachable=True)
    paused: list[str] = []
    session.scheduler = SimpleNamespace(pause=lambda: paused.append("now"), close=lambda: iter(()))
    registry.detach(session, end_stream)
    assert paused == ["now"]


def fail(*_: object, **__: object) -> None:
    raise IndexError("a fault of the daemon")


def test_a_session_whose_record_cannot_be_kept_ends_in_its_time(make_registry, clock, monkeypatch) -> None:
    registry = make_registry(session_grace_s=LONG_GRACE_S)
    session = open_attached(registry)
    with monkeypatch.context() as fault:
        fault.setattr(registry, "save", fail)
        with pytest.raises(IndexError):
            registry.detach(session, end_stream)
    assert len(registry) == 1
    clock.advance(LONG_GRACE_S)
    assert len(registry) == 0


@pytest.mark.parametrize("method", ["save", "unshare"])
def test_a_stream_that_could_not_attach_has_no_lease(make_registry, clock, monkeypatch, method) -> None:
    registry = make_registry(session_grace_s=LONG_GRACE_S)
    session = open_attached(registry)
    with monkeypatch.context() as fault:
        if method == "save":
            fault.setattr(registry, "save", fail)
        else:
            fault.setattr(session, "unshare", fail)
        with pytest.raises(IndexError):
            registry.attach(session.token, 2, False, fail)
    assert session.end_stream is None
    attach(registry, session)
    registry.detach(session, end_stream)
    clock.advance(LONG_GRACE_S)
    assert len(registry) == 0


def test_a_session_that_fails_while_it_is_closed_is_closed(make_registry, monkeypatch) -> None:
    registry = make_registry(max_sessions=2)
    for _ in range(3):
        session = open_attached(registry)
        monkeypatch.setattr(session, "unshare", fail)
        with pytest.raises(IndexError):
            finish(registry.close_in_slices(session))
        assert session.namespace.closed
    assert len(registry) == 0


@pytest.mark.parametrize("place", ["registry", "memory"])
def test_a_session_that_cannot_be_opened_takes_no_place(make_registry, monkeypatch, place) -> None:
    registry = make_registry(max_sessions=2)
    with monkeypatch.context() as fault:
        if place == "registry":
            fault.setattr(registry, "save", fail)
        else:
            fault.setattr(type(registry._memory), "new_session_id", fail)
        for _ in range(3):
            with pytest.raises(IndexError):
                registry.open("", "", False, 0.0)
    assert len(registry) == 0
    for _ in range(2):
        registry.open("", "", False, 0.0)


def test_an_attach_that_fails_is_an_internal_error(clock, monkeypatch, caplog) -> None:
    life = Life(clock=clock)
    try:
        monkeypatch.setattr(life.sessions, "attach", fail)
        parts: Any = SimpleNamespace(check=lambda _: None)
        slots = Slots(life.config)
        rpc = Rpc(parts, None, slots, "session stream")
        stream = Stream(life.dispatcher, life.sessions, parts, parts, slots, rpc)
        call = session_pb2.Call(call_id=7, attach=session_pb2.AttachRequest(session_token=bytes(16)))
        reply = session_pb2.Reply.FromString(asyncio.run(stream._answer(call)))
        assert (reply.call_id, reply.error.code) == (7, 13)
        assert reply.error.message == "attach failed; the daemon's log says why"
        assert "a fault of the daemon" in caplog.text
    finally:
        life.kill()
