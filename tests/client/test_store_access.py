"""The store's link: when it counts as lost, what calls do then, and how it is opened again. On a fake clock."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from each_row import each_row
from fake_streams import FakeWaiting, finish

from kvservice.client.store import Dialer, StoreAccess, StoreOptions
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    DrainingError,
    InternalError,
    InvalidArgumentError,
    KVServiceError,
    QuotaExceededError,
    StoreOffError,
    TLSHandshakeError,
    UnknownNamespaceError,
    UnknownSessionError,
)

AWAY = ConnectionLostError("UNAVAILABLE: connection refused")
LATE = CallTimeoutError("late")
FULL = QuotaExceededError("there are 8 sessions", limit="max_sessions", value=8)
PASSING = [AWAY, CallTimeoutError("late"), DrainingError("stops"), FULL]
LOSSES = [AWAY, DrainingError("stops"), UnknownSessionError("?"), UnknownNamespaceError("?")]


# Longest pauses between attempts, in seconds: for so many seconds at first, later, and while the daemon refuses.
QUICK_PAUSE_S, QUICK_S, MAX_PAUSE_S, MAX_REFUSED_PAUSE_S = 0.05, 10.0, 0.5, 10.0
# Closes a session without the promise of its holder.
ANY_HOLDER = 0

STORE = "the block store at unix:///there for a-model"


class FakeLink:
    token = b"token"

    def __init__(self, connected: bool = True) -> None:
        self.connection = SimpleNamespace(connected=connected)
        self.closed = False
        # Requests without an answer, and the errors with which attempts to settle them end.
        self.unanswered: list[str] = []
        self.script: list[KVServiceError | None] = []
        self.num_settled = 0

    async def close(self, _: Dialer, *, lost: bool = False) -> None:  # noqa: ARG002
        self.closed = True

    async def settle(self) -> None:
        self.num_settled += 1
        if self.script and (error := self.script.pop(0)) is not None:
            raise error
        self.unanswered.clear()


class Rig:
    """A StoreAccess whose attempts to open a link end as scripted: with a link (None), or an error. Without a script
    they succeed."""

    def __init__(self, *script: KVServiceError | None, raises: bool = False) -> None:
        self.waiting = FakeWaiting()
        self.script = list(script)
        self.opened: list[FakeLink] = []
        self.attempts: list[float] = []
        # The test sets what happens while the next link is opened, and whether its connection is there afterwards.
        self.meanwhile: Callable[[], object] = lambda: None
        self.connected = True
        self.on_break: Callable[[KVServiceError], None] | None = None
        self.closed_sessions: list[tuple[bytes, int]] = []
        dialer = cast(
            Dialer, SimpleNamespace(waiting=self.waiting, address="unix:///there", close_session=self.close_session)
        )
        options = SimpleNamespace(raises=raises, namespace=SimpleNamespace(model="a-model"))
        self.access: Any = StoreAccess(dialer, cast(StoreOptions, options), self.open_link)

    async def close_session(self, token: bytes, holder: int) -> None:
        self.closed_sessions.append((token, holder))

    async def open_link(self, _: Dialer, __: StoreOptions, on_break: Callable[[KVServiceError], None]) -> Any:
        self.attempts.append(self.waiting.now)
        self.on_break = on_break
        if self.script and (error := self.script.pop(0)) is not None:
            raise error
        self.opened.append(FakeLink(self.connected))
        self.connected = True
        self.meanwhile()
        return self.opened[-1]

    def start(self) -> None:
        finish(self.access.start())

    def call(self, error: Exception | None = None) -> bool:
        """Make a call, which fails with `error`. Returns whether it was sent and answered."""

        async def work(_: Any) -> None:
            if error is not None:
                raise error

        done: bool = finish(self.access.attempt(work))
        return done


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*script: KVServiceError | None, raises: bool = False) -> Rig:
        made.append(Rig(*script, raises=raises))
        return made[-1]

    yield make
    for one in made:
        finish(one.access.close())


Make = Callable[..., Rig]


def test_after_the_first_failure_calls_are_answered_at_once(rig: Make) -> None:
    with each_row() as row:
        for loss in LOSSES:
            with row(loss):
                store = rig()
                store.start()
                assert store.call()
                assert store.access.reachable
                assert not store.call(loss)
                assert not store.access.reachable
                before = store.waiting.now
                assert not store.call(AssertionError("nothing is sent"))
                assert store.waiting.now == before
                store.waiting.work()
                assert store.opened[0].closed
                assert store.access.reachable
                assert store.call()


def test_calls_can_raise_instead(rig: Make) -> None:
    with each_row() as row:
        for loss in LOSSES:
            with row(loss):
                store = rig(raises=True)
                store.start()
                with pytest.raises(type(loss)):
                    store.call(loss)
                with pytest.raises(DaemonAwayError):
                    store.call()
                store.waiting.work()
                assert store.call()


def test_a_link_without_an_answer_in_time_is_used_again_after_an_answer(rig: Make) -> None:
    store = rig()
    store.start()
    link = store.access.link
    assert not store.call(LATE)
    assert not store.access.reachable
    assert not store.call(InternalError("it is sent"))
    assert not finish(store.access.attempt_on(link, unexpected))
    store.waiting.work()
    assert store.access.reachable
    assert store.access.link is link
    assert (len(store.opened), store.opened[0].closed, store.opened[0].num_settled) == (1, False, 1)
    assert store.call()


def test_calls_without_an_answer_can_raise(rig: Make) -> None:
    store = rig(raises=True)
    store.start()
    with pytest.raises(CallTimeoutError):
        store.call(LATE)
    with pytest.raises(DaemonAwayError, match="late"):
        store.call()
    store.waiting.work()
    assert store.call()


def test_a_link_that_cannot_be_settled_is_lost(rig: Make) -> None:
    with each_row() as row:
        for error in (*LOSSES, LATE, InternalError("forgotten")):
            with row(error):
                store = rig()
                store.start()
                store.opened[0].script = [error]
                assert not store.call(LATE)
                store.waiting.work()
                assert store.opened[0].closed
                assert store.access.link is store.opened[1]
                assert store.access.reachable


def test_a_cancelled_call_is_settled_while_others_go_on(rig: Make) -> None:
    store = rig()
    store.start()

    async def work(link: Any) -> None:
        link.unanswered.append(("store_reserve", None))
        raise asyncio.CancelledError

    for _ in range(2):
        with pytest.raises(asyncio.CancelledError):
            finish(store.access.attempt(work))
    assert store.call()
    assert len(store.waiting.started) == 1
    store.waiting.work()
    assert not store.opened[0].unanswered
    assert store.call()


def test_calls_left_while_others_are_settled_are_settled_too(rig: Make) -> None:
    store = rig()
    store.start()
    (link,) = store.opened
    settle = link.settle

    async def settle_while_another_is_left() -> None:
        await settle()
        if link.num_settled == 1:
            link.unanswered.append("store_reserve")

    link.settle = settle_while_another_is_left  # type: ignore[method-assign]
    assert not store.call(LATE)
    store.waiting.work()
    assert link.num_settled == 2
    assert store.access.reachable


async def unexpected(_: Any) -> None:
    raise AssertionError("it is sent")


def test_other_errors_are_raised_and_keep_the_link(rig: Make) -> None:
    store = rig()
    store.start()
    with pytest.raises(InternalError):
        store.call(InternalError("a bug"))
    assert store.access.reachable
    assert len(store.attempts) == 1


def test_a_break_is_noticed_without_a_call(rig: Make) -> None:
    store = rig()
    store.start()
    store.opened[0].connection.connected = False
    assert store.on_break is not None
    store.on_break(AWAY)
    assert not store.access.reachable
    store.waiting.work()
    assert store.access.reachable
    assert store.opened[0].closed


def test_the_break_of_an_earlier_link_does_not_count(rig: Make) -> None:
    store = rig()
    store.start()
    assert not store.call(AWAY)
    late = store.on_break
    store.waiting.work()
    assert late is not None
    late(AWAY)
    assert store.access.link is store.opened[1]
    assert not store.waiting.started


def test_a_link_that_breaks_before_it_is_used_is_opened_again(rig: Make) -> None:
    store = rig()
    store.connected = False
    store.start()
    assert not store.access.reachable
    store.waiting.work()
    assert store.opened[0].closed
    assert store.access.reachable


def test_it_goes_on_trying_with_longer_pauses(rig: Make) -> None:
    store = rig(None, *[AWAY] * 300)
    store.start()
    assert not store.call(AWAY)
    store.waiting.work()
    pauses = [later - earlier for earlier, later in zip(store.attempts[1:], store.attempts[2:], strict=False)]
    begin = store.attempts[1]
    soon = [pause for pause, at in zip(pauses, store.attempts[1:], strict=False) if at < begin + QUICK_S]
    assert max(soon) == pytest.approx(QUICK_PAUSE_S), "a daemon that restarts is found at once"
    assert len(soon) > 100
    assert [round(pause, 9) for pause in pauses] == sorted(round(pause, 9) for pause in pauses)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S)
    assert store.access.reachable


def test_the_session_of_a_lost_link_is_closed_when_the_daemon_is_back(rig: Make) -> None:
    """A daemon that has restarted keeps it."""
    store = rig(None, AWAY)
    store.start()
    assert not store.call(AWAY)
    assert store.closed_sessions == []
    store.waiting.work()
    assert store.closed_sessions == [(b"token", ANY_HOLDER)]


def test_a_store_opens_while_the_daemon_is_away(rig: Make) -> None:
    with each_row() as row:
        for error in PASSING:
            with row(error):
                store = rig(error)
                store.start()
                assert not store.access.reachable
                assert not store.call()
                store.waiting.work()
                assert store.call()


def test_opening_can_raise_instead(rig: Make) -> None:
    with each_row() as row:
        for error in PASSING:
            with row(error):
                store = rig(error, raises=True)
                with pytest.raises(type(error)):
                    store.start()
                assert not store.waiting.started


def test_opening_raises_what_waiting_does_not_mend(rig: Make) -> None:
    with each_row() as row:
        for error in (StoreOffError("off"), InvalidArgumentError("large"), TLSHandshakeError("?")):
            with row(error):
                store = rig(error)
                with pytest.raises(type(error)):
                    store.start()
                assert not store.waiting.started


def test_a_daemon_that_restarts_without_a_store_counts_as_away(rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    store = rig(None, StoreOffError("store_gib is 0"), StoreOffError("store_gib is 0"), None)
    store.start()
    assert not store.call(AWAY)
    store.waiting.work()
    assert store.call()
    assert [record.message for record in caplog.records if "store_gib" in record.message] == [
        f"{STORE} is out of reach: store_gib is 0; calls are misses until it is back"
    ]


def test_a_quota_of_the_tenant_is_an_error_where_a_full_daemon_is_none(rig: Make) -> None:
    over = QuotaExceededError("there are 8 sessions", limit="max_sessions", value=8, tenant="red")
    with pytest.raises(QuotaExceededError):
        rig(over).start()
    patient = rig(over, None)
    finish(patient.access.start(patient=True))
    assert not patient.access.reachable
    patient.waiting.work()
    assert patient.access.reachable


def test_attempts_that_the_daemon_refuses_get_rare(rig: Make) -> None:
    with each_row() as row:
        for refusal in (StoreOffError("off"), FULL):
            with row(refusal):
                store = rig(None, *[refusal] * 12, AWAY, AWAY, None)
                store.start()
                assert not store.call(AWAY)
                store.waiting.work()
                pauses = [
                    later - earlier for earlier, later in zip(store.attempts[1:], store.attempts[2:], strict=False)
                ]
                assert pauses[:12] == sorted(pauses[:12])
                assert pauses[11] == pytest.approx(MAX_REFUSED_PAUSE_S)
                assert pauses[12:] == [pytest.approx(MAX_PAUSE_S)] * 2, "a daemon that starts is found soon"
                assert store.access.reachable
                assert not store.call(AWAY)
                num_attempts = len(store.attempts)
                store.script = [refusal, None]
                store.waiting.work()
                assert store.attempts[-1] - store.attempts[num_attempts] < 0.1, "after a success it starts again"


def test_the_log_says_once_that_the_store_is_away_and_back(rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = rig(FULL, FULL, AWAY, None)
    store.start()
    store.waiting.work()
    store.call(LATE)
    store.waiting.work()
    assert store.access.reachable
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"{STORE} is out of reach: there are 8 sessions; calls are misses until it is back"),
        ("INFO", f"{STORE} is back"),
        ("WARNING", f"{STORE} is out of reach: late; calls are misses until it is back"),
        ("INFO", f"{STORE} is back"),
    ]


def test_what_belongs_to_a_lost_link_is_not_called(rig: Make) -> None:
    store = rig()
    store.start()
    first = store.access.link
    assert not store.call(AWAY)
    store.waiting.work()

    assert not finish(store.access.attempt_on(first, unexpected))
    assert not finish(store.access.attempt_on(None, unexpected))
    assert store.access.reachable


def test_closing_stops_the_attempts(rig: Make) -> None:
    store = rig(None, *[AWAY] * 3)
    store.start()
    assert not store.call(AWAY)
    finish(store.access.close())
    assert len(store.attempts) == 1
    with pytest.raises(ConnectionLostError, match="the store is closed"):
        store.call()
    assert not finish(store.access.attempt_on(store.opened[0], unexpected))
    assert store.opened[0].closed


def test_a_link_that_opens_while_the_store_is_closed_is_closed(rig: Make) -> None:
    store = rig()
    store.start()
    assert not store.call(AWAY)
    store.meanwhile = lambda: finish(store.access.close())
    store.waiting.work()
    assert len(store.opened) == 2
    assert store.opened[1].closed
    assert not store.access.reachable
