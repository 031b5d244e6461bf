"""Deadlines of blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvservice.client.watchdog import Watchdog


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watchdog(clock: Clock) -> Iterator[Watchdog]:
    made = Watchdog(clock)
    yield made
    made.close()


def test_what_is_not_done_by_its_deadline_expires(watchdog: Watchdog, clock: Clock) -> None:
    an_hour, later, sooner = (threading.Event() for _ in range(3))
    watchdog.watch(3600, an_hour.set)
    watchdog.watch(0.04, later.set)
    watchdog.watch(0.02, sooner.set)
    assert not sooner.is_set()
    clock.now = 0.02
    assert sooner.wait(60)
    assert not later.is_set()
    clock.now = 0.04
    assert later.wait(60)
    assert not an_hour.is_set()


def test_what_is_done_does_not_expire(watchdog: Watchdog, clock: Clock) -> None:
    expired, last = threading.Event(), threading.Event()
    watchdog.forget(watchdog.watch(0.02, expired.set))
    watchdog.watch(0.04, last.set)
    clock.now = 0.04
    assert last.wait(60)
    assert not expired.is_set()


def test_nothing_expires_after_the_end(watchdog: Watchdog) -> None:
    expired: list[str] = []
    watchdog.watch(3600, lambda: expired.append("late"))
    threads = threading.active_count()
    watchdog.close()
    assert threading.active_count() == threads - 1
    watchdog.watch(0, lambda: expired.append("after the end"))
    assert threading.active_count() == threads - 1
    assert expired == []


def test_it_has_no_thread_where_no_call_has_a_limit(watchdog: Watchdog) -> None:
    threads = threading.active_count()
    watchdog.close()
    assert threading.active_count() == threads
