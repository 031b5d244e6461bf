"""The times at which sessions without a stream end, on a clock that the tests advance."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from manual_clock import ManualClock
from small_pool import SMALL_POOL

from kvservice.blocks import Slices
from kvservice.blocks.slices import finish
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.engine import CacheEngine
from kvservice.errors import KVServiceError, QuotaExceededError, UnknownSessionError
from kvservice.kept import KeptState
from kvservice.server.scheduling import SessionScheduler
from kvservice.server.server_session import ServerSession, SessionMemory
from kvservice.server.sessions import ATTACH_S, SessionRegistry
from kvservice.store.session import Ended, SessionStore

SHORT_GRACE_S, LONG_GRACE_S = ATTACH_S / 10, ATTACH_S * 2


@pytest.fixture
def make_registry(clock: ManualClock):
    devices = []

    def make(**options: Any) -> SessionRegistry:
        config = ServeConfig(**(SMALL_POOL | options))
        device = open_device(config)
        devices.append(device)
        arrays = KeptState.fresh().arrays
        engine = CacheEngine(config, device, arrays)
        return SessionRegistry(config, engine.manager, device, SessionMemory.of(config, arrays, {}), clock)

    yield make
    for device in devices:
        device.close()


def end_stream(_: KVServiceError) -> None:
    """Stands for the stream that holds a session."""


def attach(registry: SessionRegistry, session: ServerSession) -> None:
    registry.attach(session.token, 1, False, end_stream)


def open_attached(registry: SessionRegistry, **options: Any) -> ServerSession:
    session = registry.open("", "", options.get("detachable", False), options.get("detach_ttl_s", 0.0))
    attach(registry, session)
    return session


@pytest.mark.parametrize(
    ("options", "wait_s"),
    [
        ({}, SHORT_GRACE_S),
        ({"detachable": True, "detach_ttl_s": SHORT_GRACE_S / 2}, SHORT_GRACE_S / 2),
        ({"detachable": True, "detach_ttl_s": 60.0}, 60.0),
        ({"detachable": True}, 3600.0),
    ],
    ids=["not detachable", "shorter than grace", "longer than grace", "the daemon's limit"],
)
def test_a_session_that_was_left_ends_in_its_time(make_registry, clock, options, wait_s) -> None:
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


@pytest.mark.parametrize(("grace_s", "wait_s"), [(SHORT_GRACE_S, ATTACH_S), (LONG_GRACE_S, LONG_GRACE_S)])
def test_a_session_never_attached_ends(make_registry, clock, grace_s, wait_s) -> None:
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


def test_a_stream_that_lost_its_session_starts_no_time(make_registry, clock) -> None:
    registry = make_registry(session_grace_s=SHORT_GRACE_S)
    session = open_attached(registry)
    registry.attach(session.token, 2, False, lambda _: None)
    registry.detach(session, end_stream)
    clock.advance(SHORT_GRACE_S * 2)
    assert len(registry) == 1


def test_what_a_detachable_session_shares_is_closed_after_the_grace_time(make_registry, clock, monkeypatch) -> None:
    registry = make_registry(session_grace_s=SHORT_GRACE_S)
    session = open_attached(registry, detachable=True)
    closed: list[float] = []
    monkeypatch.setattr(ServerSession, "unshare", lambda _, **__: closed.append(clock.now))
    registry.detach(session, end_stream)
    clock.advance(60)
    assert closed == [SHORT_GRACE_S]
    assert len(registry) == 1


def test_only_a_holder_that_closes_its_session_has_stopped_to_write(make_registry, clock, monkeypatch) -> None:
    ends: list[bool] = []
    monkeypatch.setattr(ServerSession, "unshare", lambda _, *, writers_done=False: ends.append(writers_done))
    registry = make_registry()
    by_holder, by_token, taken, lost = (open_attached(registry) for _ in range(4))
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
    caplog.set_level(logging.INFO, "kvservice.server.sessions")
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

    def close(self) -> Slices[None]:
        yield from ()


def test_the_log_says_which_sessions_were_lost_and_why(make_registry, clock, caplog) -> None:
    registry = make_registry(session_grace_s=SHORT_GRACE_S)
    left, closed = open_attached(registry), open_attached(registry)
    registry.open("", "", False, 0.0)
    closed.store = cast(SessionStore, SimpleNamespace(close=lambda **_: None, ended=Ended(3, 1)))
    left.scheduler = cast(SessionScheduler, FakeScheduler())
    caplog.set_level(logging.INFO, "kvservice.server.sessions")
    finish(registry.close_in_slices(closed))
    registry.detach(left, end_stream)
    clock.advance(ATTACH_S)
    assert [(record.session_id, record.reason, record.message) for record in caplog.records] == [
        (2, "closed", "session 2 closed, 0 sequences freed, 3 leases and 1 reservations ended"),
        (
            1,
            "lost",
            "session 1 lost: no stream attached to it for 0.5 s, 0 sequences freed, 4 unfinished requests dropped",
        ),
        (3, "lost", "session 3 lost: no stream attached to it for 5 s, 0 sequences freed"),
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
    session.scheduler = cast(Any, SimpleNamespace(pause=lambda: paused.append("now"), close=lambda: iter(())))
    registry.detach(session, end_stream)
    assert paused == ["now"]
