"""When a breaker opens, when it lets a trial through, and when it closes."""

from __future__ import annotations

from kvservice.tiers.breaker import FAILURES, MAX_PAUSE_S, PAUSE_S, Attempt, Breaker


def begun(breaker: Breaker, now: float, kind: str = "get") -> Attempt:
    attempt = breaker.begin(kind, now)
    assert attempt is not None
    return attempt


def suspended(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    opened = [breaker.failed(begun(breaker, now), now) for _ in range(FAILURES)]
    assert opened == [False] * (FAILURES - 1) + [True]
    return breaker


def test_failures_in_a_row_suspend() -> None:
    breaker = Breaker()
    for _ in range(5):
        for _ in range(FAILURES - 1):
            assert not breaker.failed(begun(breaker, 0.0), 0.0)
        assert not breaker.succeeded(begun(breaker, 0.0))
    assert not breaker.is_suspended
    assert suspended().begin("get", PAUSE_S - 0.01) is None


def test_successes_of_another_kind_do_not_count() -> None:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.succeeded(begun(breaker, 0.0, "lookup"))
        breaker.failed(begun(breaker, 0.0), 0.0)
    assert breaker.is_suspended
    breaker.succeeded(begun(breaker, PAUSE_S, "lookup"))
    assert breaker.is_suspended, "a lookup is no trial of reads"
    assert breaker.succeeded(begun(breaker, PAUSE_S))
    assert not breaker.is_suspended


def test_one_trial_at_a_time() -> None:
    breaker = suspended()
    trial = begun(breaker, PAUSE_S)
    assert breaker.begin("get", PAUSE_S) is None
    assert breaker.begin("lookup", PAUSE_S) is None
    assert breaker.succeeded(trial)
    assert breaker.begin("get", PAUSE_S) is not None
    assert breaker.num_suspensions == 1


def test_a_trial_that_fails_doubles_the_pause() -> None:
    breaker, now, pause_s = suspended(), PAUSE_S, PAUSE_S
    for _ in range(10):
        assert not breaker.failed(begun(breaker, now), now)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
        assert breaker.begin("get", now + pause_s - 0.01) is None
        now += pause_s
    assert pause_s == MAX_PAUSE_S
    assert breaker.succeeded(begun(breaker, now))
    for _ in range(FAILURES):
        breaker.failed(begun(breaker, now), now)
    assert breaker.begin("get", now + PAUSE_S) is not None, "the first pause is short again"


def test_a_trial_without_result_makes_place_for_another() -> None:
    breaker = suspended()
    breaker.abandoned(begun(breaker, PAUSE_S))
    assert breaker.succeeded(begun(breaker, PAUSE_S))


def test_calls_from_before_do_not_count() -> None:
    breaker = Breaker()
    early = [begun(breaker, 0.0) for _ in range(FAILURES + 2)]
    for attempt in early[:FAILURES]:
        breaker.failed(attempt, 0.0)
    assert not breaker.failed(early[FAILURES], 0.5)
    assert not breaker.succeeded(early[FAILURES + 1])
    assert breaker.is_suspended
    assert breaker.begin("get", PAUSE_S) is not None, "the late failure has not made the pause longer"
