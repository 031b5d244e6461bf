"""A session's connection on a fake clock: which calls wait when it breaks, for how long, and which are sent again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar

import pytest
from fake_streams import ATTACHED, ATTACHED_BY_NEXT, FakeStream, FakeWaiting

from kvservice.client.connection import ATTEMPT_S, PAUSE_S, SessionConnection, SessionStream, first_answer, once_more
from kvservice.client.threads import finish
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    DaemonAwayError,
    DrainingError,
    InvalidArgumentError,
    KVServiceError,
    RegionsNotAllowedError,
    RestartingError,
    SessionTakenError,
    TLSHandshakeError,
    UnauthenticatedError,
    UnknownSessionError,
)

CUT = ConnectionLostError("UNAVAILABLE: Socket closed")
REFUSED = ConnectionLostError("UNAVAILABLE: SessionStream refused")
REPLACED = RestartingError("a new process takes over")
REMOVED = UnauthenticatedError("the token was removed")
WAIT_S = 2.0


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Stop everything that a test has started."""
    yield
    while Rig.made:
        finish(Rig.made.pop().connection.close())


class Rig:
    """A connection over scripted streams: the test sets the answers of each."""

    made: ClassVar[list[Rig]] = []

    def __init__(
        self,
        *scripts: list[Any],
        timeout_s: float | None = None,
        on_break: Callable[[KVServiceError], None] | None = None,
    ) -> None:
        self.made.append(self)
        self.waiting = FakeWaiting()
        self.scripts = [list(script) for script in scripts]
        self.streams: list[FakeStream] = []
        self.waits: list[bool] = []
        self.connection = SessionConnection(
            self.waiting, self.open, b"token", timeout_s=timeout_s, reconnect_wait_s=WAIT_S, on_break=on_break
        )
        assert finish(self.connection.connect(5.0)) == 7

    def open(self, on_end: Callable[[SessionStream], None], waits_for_daemon: bool) -> FakeStream:
        script = self.scripts.pop(0) if self.scripts else [REFUSED]
        self.streams.append(FakeStream(self.waiting, on_end, script))
        self.waits.append(waits_for_daemon)
        return self.streams[-1]

    def call(self, name: str = "describe", timeout_s: float | None = None) -> Any:
        return finish(self.connection.call(name, None, timeout_s))

    def fails(self, kind: type[KVServiceError], name: str = "describe", timeout_s: float | None = None) -> float:
        """Make a call, expect this error, and return the seconds until it was raised."""
        begin = self.waiting.now
        with pytest.raises(kind) as error:
            self.call(name, timeout_s)
        assert type(error.value) is kind
        return self.waiting.now - begin

    def sent(self) -> list[list[str]]:
        return [stream.calls for stream in self.streams]


def test_a_break_is_mended_in_the_background() -> None:
    rig = Rig([ATTACHED], [ATTACHED])
    rig.streams[0].breaks(CUT)
    rig.waiting.work()
    assert rig.call() == "describe"
    assert rig.sent() == [["attach"], ["attach", "describe"]]
    assert rig.waits == [False, True]  # the first attempt fails immediately if no daemon listens


def test_a_call_whose_stream_breaks_is_sent_again() -> None:
    rig = Rig([ATTACHED, CUT], [ATTACHED])
    rig.waiting.plan(0.5, rig.waiting.work)
    assert rig.call("allocate") == "allocate"
    assert rig.sent() == [["attach", "allocate"], ["attach", "allocate"]]
    assert rig.waiting.now == 100.5


def test_a_layer_whose_stream_breaks_is_not_sent_again() -> None:
    rig = Rig([ATTACHED, CUT], [ATTACHED])
    assert rig.fails(ConnectionLostError, "decode") == 0
    rig.waiting.work()
    assert rig.call("decode") == "decode"
    assert rig.sent() == [["attach", "decode"], ["attach", "decode"]]


def test_a_call_whose_stream_a_removed_token_ends_is_sent_again_with_the_next() -> None:
    rig = Rig([ATTACHED, REMOVED], [ATTACHED])
    rig.waiting.plan(0.5, rig.waiting.work)
    assert rig.call("allocate") == "allocate"
    assert rig.sent() == [["attach", "allocate"], ["attach", "allocate"]]


def test_a_layer_whose_stream_a_removed_token_ends_may_have_been_written() -> None:
    rig = Rig([ATTACHED, REMOVED], [ATTACHED])
    assert rig.fails(ConnectionLostError, "decode") == 0
    rig.waiting.work()
    assert rig.call("decode") == "decode"


def test_a_next_token_that_is_refused_too_is_what_calls_raise() -> None:
    """The client keeps trying, because the file of its token may be updated after the daemon's."""
    rig = Rig([ATTACHED, REMOVED], *3 * [[REMOVED]], [ATTACHED])
    assert rig.fails(UnauthenticatedError) == WAIT_S
    assert rig.fails(UnauthenticatedError) == 0
    rig.waiting.work()
    assert rig.call() == "describe"


def test_a_call_that_breaks_every_stream_is_given_up() -> None:
    rig = Rig(*4 * [[ATTACHED, CUT]], [ATTACHED])
    for _ in range(3):
        rig.waiting.plan(0.0, rig.waiting.work)
    assert rig.fails(ConnectionLostError) == 0
    assert rig.sent() == 4 * [["attach", "describe"]]


def test_calls_wait_once_for_all_of_them_and_then_fail_at_once() -> None:
    rig = Rig([ATTACHED])
    rig.streams[0].breaks(CUT)
    rig.waiting.now += 0.5
    assert rig.fails(DaemonAwayError) == WAIT_S - 0.5
    assert rig.fails(DaemonAwayError) == 0
    assert rig.fails(DaemonAwayError, "decode", timeout_s=30) == 0
    rig.scripts.append([ATTACHED])
    rig.waiting.work()
    assert rig.call() == "describe"


def test_nobody_waits_for_what_broke_long_ago() -> None:
    rig = Rig([ATTACHED])
    rig.streams[0].breaks(CUT)
    rig.waiting.now += 10
    assert rig.fails(DaemonAwayError) == 0
    with pytest.raises(DaemonAwayError, match=r"10\.0 s.*Socket closed"):
        rig.call()


def test_a_call_that_comes_to_its_limit_during_a_break_leaves_the_others_waiting() -> None:
    rig = Rig([ATTACHED], [ATTACHED])
    rig.streams[0].breaks(CUT)
    assert rig.fails(DaemonAwayError, timeout_s=0.05) == pytest.approx(0.05)
    rig.waiting.plan(0.5, rig.waiting.work)
    assert rig.call() == "describe"
    assert rig.waiting.now == pytest.approx(100.55)


def test_a_break_after_a_mended_one_is_waited_for_again() -> None:
    rig = Rig([ATTACHED], [ATTACHED], [ATTACHED])
    for number in (0, 1):
        rig.streams[number].breaks(CUT)
        rig.waiting.now += 10
        rig.fails(DaemonAwayError)
        rig.waiting.work()
        assert rig.call() == "describe"


def test_a_call_without_an_answer_ends_at_its_limit() -> None:
    rig = Rig([ATTACHED, None, "describe", None], timeout_s=0.5)
    assert rig.fails(CallTimeoutError) == 0.5
    assert rig.call() == "describe"  # the connection still works
    assert rig.fails(CallTimeoutError, timeout_s=0.25) == 0.25
    rig.waiting.busy = True
    assert rig.fails(CallTimeoutError) == 0.5


def test_attempts_go_on_with_pauses_until_one_succeeds() -> None:
    rig = Rig([ATTACHED], *7 * [[REFUSED]], [None], [ATTACHED])
    rig.streams[0].breaks(CUT)
    begin = rig.waiting.now
    rig.waiting.work()
    assert rig.call() == "describe"
    pauses_s = [0.02, 0.04, *6 * [0.05]]
    assert rig.waiting.now - begin == pytest.approx(sum(pauses_s) + ATTEMPT_S)
    assert all(connection.ended for connection in rig.streams[1:-1])


def test_pauses_grow_when_calls_do_not_wait_any_more() -> None:
    rig = Rig([ATTACHED], *7 * [[REFUSED]], [ATTACHED])
    rig.streams[0].breaks(CUT)
    rig.waiting.now += WAIT_S
    rig.waiting.work()
    pauses_s = [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0]
    assert rig.waiting.now == pytest.approx(100 + WAIT_S + sum(pauses_s))


def test_pauses_grow_while_a_daemon_refuses() -> None:
    rig = Rig([ATTACHED], *4 * [[DrainingError("the daemon is shutting down")]], [ATTACHED])
    rig.streams[0].breaks(CUT)
    rig.waiting.work()
    assert rig.waiting.now == pytest.approx(100 + 0.02 + 0.04 + 0.08 + 0.16)


def test_a_call_that_a_daemon_leaves_to_its_successor_is_sent_again() -> None:
    for name in ("allocate", "decode"):
        rig = Rig([ATTACHED, *3 * [REPLACED]], [REPLACED], [ATTACHED_BY_NEXT])
        rig.waiting.plan(2.5 * PAUSE_S, functools.partial(rig.streams[0].breaks, CUT))
        rig.waiting.plan(2.6 * PAUSE_S, rig.waiting.work)
        assert rig.call(name) == name
        assert rig.sent() == [["attach", name, name, name], ["attach"], ["attach", name]]
        assert rig.connection.num_restarts == 1


def test_a_daemon_that_is_not_replaced_after_all_answers() -> None:
    rig = Rig([ATTACHED, *3 * [REPLACED]])
    assert rig.call("write") == "write"
    assert rig.waiting.now == pytest.approx(100 + 3 * PAUSE_S)
    assert rig.connection.num_restarts == 0


def test_a_successor_is_not_waited_for_for_ever() -> None:
    rig = Rig([ATTACHED, *1000 * [REPLACED]])
    assert rig.fails(RestartingError) == pytest.approx(WAIT_S, abs=2 * PAUSE_S)
    assert rig.fails(RestartingError, timeout_s=0.1) == pytest.approx(0.1, abs=2 * PAUSE_S)
    rig = Rig([ATTACHED, REPLACED], on_break=lambda _: None)  # such a connection does not reconnect
    assert rig.fails(RestartingError) == 0


def test_processes_of_the_daemon_are_counted() -> None:
    rig = Rig([ATTACHED], [ATTACHED], [ATTACHED_BY_NEXT], [ATTACHED_BY_NEXT])
    for number, num_restarts in enumerate((0, 1, 1)):
        rig.streams[number].breaks(CUT)
        rig.waiting.work()
        assert rig.connection.num_restarts == num_restarts


def test_work_of_several_calls_is_done_by_one_process() -> None:
    """For example a token that one process has given is unknown to the next."""
    rig = Rig([ATTACHED], [ATTACHED_BY_NEXT])
    done: list[int] = []

    async def work() -> str:
        done.append(rig.connection.num_restarts)
        if rig.connection.num_restarts == 0:
            rig.streams[-1].breaks(CUT)
            rig.waiting.plan(0.1, rig.waiting.work)
            raise RegionsNotAllowedError("not for this token")
        return "mapped"

    assert finish(rig.connection.with_one_process(work)) == "mapped"
    assert done == [0, 1]


def test_work_that_fails_without_a_restart_is_not_repeated() -> None:
    rig, done = Rig([ATTACHED]), list[KVServiceError]()

    async def fail(error: KVServiceError) -> None:
        done.append(error)
        raise error

    errors = [RegionsNotAllowedError("not for this user"), InvalidArgumentError("bad")]
    for error in errors:
        with pytest.raises(type(error)):
            finish(rig.connection.with_one_process(functools.partial(fail, error)))
    assert done == errors


def test_a_unary_call_is_made_again_while_a_daemon_is_replaced() -> None:
    waiting = FakeWaiting()
    outcomes: list[Any] = [REPLACED, REPLACED, "opened"]
    assert finish(once_more(waiting, lambda: asked(outcomes)(0.0), 1.0, RestartingError)) == "opened"
    assert waiting.now == pytest.approx(100 + 2 * PAUSE_S)
    outcomes = [REPLACED] * 1000
    with pytest.raises(RestartingError):
        finish(once_more(waiting, lambda: asked(outcomes)(0.0), 1.0, RestartingError))
    assert waiting.now == pytest.approx(101, abs=4 * PAUSE_S)
    for error in (REFUSED, TLSHandshakeError("wrong CA")):
        outcomes = [REPLACED, error, "opened"]
        passing = (RestartingError, ConnectionLostError) if error is not REFUSED else RestartingError
        with pytest.raises(type(error)):
            finish(once_more(waiting, lambda: asked(outcomes)(0.0), 1.0, passing))  # noqa: B023
        assert outcomes == ["opened"]


def test_a_session_that_is_over_is_asked_for_no_more() -> None:
    for over in (SessionTakenError("taken"), UnknownSessionError("no such session")):
        rig = Rig([ATTACHED], [over], [ATTACHED])
        rig.streams[0].breaks(CUT)
        rig.waiting.work()
        assert rig.fails(type(over)) == 0
        assert rig.fails(type(over)) == 0
        with pytest.raises(type(over)):
            rig.connection.check()
        assert len(rig.streams) == 2
        assert finish(rig.connection.close()) is False


def test_a_stream_that_says_why_it_ends_is_believed() -> None:
    rig = Rig([ATTACHED], [ATTACHED])
    rig.streams[0].breaks(SessionTakenError("taken"))
    assert rig.fails(SessionTakenError) == 0
    assert rig.waiting.started == []


def test_what_an_old_stream_says_is_of_no_account() -> None:
    """When a session attaches its next stream, the daemon ends the old one, which it did not know to be broken."""
    rig = Rig([ATTACHED], [ATTACHED])
    old = rig.streams[0]
    old.breaks(CUT)
    rig.waiting.work()
    old.breaks(SessionTakenError("another stream of the same holder"))
    assert rig.call() == "describe"


def test_a_daemon_that_refuses_says_why() -> None:
    rig = Rig([ATTACHED], [DrainingError("the daemon is shutting down")], [ATTACHED])
    rig.streams[0].breaks(CUT)
    rig.waiting.plan(0.01, lambda: rig.fails(DrainingError))  # during a pause between attempts
    rig.waiting.work()
    assert rig.waiting.now == 100 + WAIT_S
    assert rig.call() == "describe"


def test_closing_ends_what_is_under_way() -> None:
    rig = Rig([ATTACHED], [REFUSED])
    rig.streams[0].breaks(CUT)
    rig.waiting.plan(0.5, lambda: finish(rig.connection.close()))
    assert rig.fails(ConnectionLostError) == 0.5
    assert rig.waiting.started == []
    assert finish(rig.connection.close()) is False


def test_closing_ends_the_connection() -> None:
    rig = Rig([ATTACHED])
    assert finish(rig.connection.close()) is True
    assert rig.streams[0].ended
    rig.streams[0].breaks(CUT)
    assert rig.waiting.started == []
    with pytest.raises(ConnectionLostError, match="closed"):
        rig.call()


def test_a_daemon_that_starts_is_waited_for() -> None:
    waiting = FakeWaiting()
    outcomes: list[Any] = [REFUSED, CallTimeoutError("DEADLINE_EXCEEDED"), "info"]
    assert finish(first_answer(waiting, asked(outcomes), 5.0)) == "info"
    assert waiting.now == pytest.approx(100 + 2 * PAUSE_S)
    with pytest.raises(ConnectionLostError, match=r"5 s .*SessionStream refused"):
        finish(first_answer(waiting, asked([REFUSED] * 1000), 5.0))
    assert waiting.now == pytest.approx(105 + PAUSE_S, abs=2 * PAUSE_S)
    with pytest.raises(TLSHandshakeError):
        finish(first_answer(waiting, asked([TLSHandshakeError("wrong CA")]), 5.0))


def asked(outcomes: list[Any]) -> Callable[[float], Coroutine[Any, Any, Any]]:
    async def ask(_: float) -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, KVServiceError):
            raise outcome
        return outcome

    return ask


def test_what_the_daemon_does_without_a_call_is_given_up_in_time() -> None:
    rig = Rig([ATTACHED], [ATTACHED], timeout_s=0.5)
    deadline = rig.connection.deadline()
    assert rig.connection.left_s(deadline, 0.25) == 0.25
    rig.connection.check(deadline)
    rig.waiting.now += 0.4
    assert rig.connection.left_s(deadline, 0.25) == pytest.approx(0.1)
    rig.streams[0].breaks(CUT)
    rig.connection.check(deadline)  # the connection may still reconnect
    rig.waiting.now += 0.1
    with pytest.raises(DaemonAwayError):
        rig.connection.check(deadline)
    rig.connection.check()
    rig.waiting.now += WAIT_S
    with pytest.raises(DaemonAwayError):
        rig.connection.check()
    rig.waiting.work()
    rig.connection.check()
    with pytest.raises(CallTimeoutError):
        rig.connection.check(deadline)
    assert rig.connection.deadline(float("inf")) is None
    with pytest.raises(InvalidArgumentError):
        rig.connection.deadline(0)


def test_posted_calls_are_sent_once_and_not_awaited() -> None:
    rig = Rig([ATTACHED], [ATTACHED])
    rig.connection.post("release", None)
    assert rig.call() == "describe"
    rig.streams[0].breaks(CUT)
    rig.connection.post("release", None)
    rig.waiting.work()
    assert rig.call() == "describe"
    assert rig.sent() == [["attach", "release", "describe"], ["attach", "describe"]]


def test_a_connection_can_end_where_it_would_reconnect() -> None:
    reported: list[KVServiceError] = []
    rig = Rig([ATTACHED], [ATTACHED], on_break=reported.append)
    assert rig.connection.connected
    rig.streams[0].breaks(CUT)
    assert reported == [CUT]
    assert not rig.connection.connected
    assert not rig.waiting.started
    assert rig.fails(ConnectionLostError) == 0
    assert not finish(rig.connection.close())
