"""Deadlines of blocking calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvservice.client.watchdog import Watchdog


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    made = Watchdog()
    yield made
    made.close()


def test_what_is_not_done_by_its_deadline_expires(watchdog: Watchdog) -> None:
    order: list[str] = []
    last = threading.Event()
    begin = time.monotonic()
    watchdog.watch(begin + 3600, lambda: order.append("an hour"))
    watchdog.watch(begin + 0.04, lambda: (order.append("later"), last.set()))
    watchdog.watch(begin + 0.02, lambda: order.append("sooner"))
    assert last.wait(60)
    assert order == ["sooner", "later"]
    assert time.monotonic() >= begin + 0.04


def test_what_is_done_does_not_expire(watchdog: Watchdog) -> None:
    expired: list[str] = []
    last = threading.Event()
    watchdog.forget(watchdog.watch(time.monotonic() + 0.02, lambda: expired.append("done")))
    watchdog.watch(time.monotonic() + 0.04, last.set)
    assert last.wait(60)
    assert expired == []


def test_nothing_expires_after_the_end(watchdog: Watchdog) -> None:
    expired: list[str] = []
    watchdog.watch(time.monotonic() + 3600, lambda: expired.append("late"))
    threads = threading.active_count()
    watchdog.close()
    assert threading.active_count() == threads - 1
    watchdog.watch(time.monotonic(), lambda: expired.append("after the end"))
    assert threading.active_count() == threads - 1
    assert expired == []


def test_it_has_no_thread_where_no_call_has_a_limit(watchdog: Watchdog) -> None:
    threads = threading.active_count()
    watchdog.close()
    assert threading.active_count() == threads
