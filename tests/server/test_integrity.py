"""Integrity checks of the daemon's bookkeeping: when they run, and the effects of a failure."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import corruptible_daemon
import pytest
from click.testing import CliRunner
from scraping import POOL, scrape, scrape_until, value
from waiting import PATIENCE_S, until

from kvservice.cli import main
from kvservice.client import KVClient
from kvservice.environment import missing_environment
from kvservice.errors import InternalError
from kvservice.health import check
from kvservice.server.watching.housekeeping import SLICE_EVERY_S, IntegrityWatch

CHECKS, FAILURES = "kvservice_integrity_checks_total", "kvservice_integrity_failures_total"


class Rig:
    """A watch whose passes have `num_slices` slices; each pass ends with the next of `ends`."""

    def __init__(self, num_slices: int, *ends: Any) -> None:
        self.num_slices, self.ends = num_slices, list(ends)
        self.calls = SimpleNamespace(num_begun=0, in_flight=0)
        self.slices = 0
        self.told: list[str] = []
        self.watch = IntegrityWatch(self.check, self.calls, self.told.append)
        self.watch.turn()  # the first turn only records the number of calls

    def check(self) -> Generator[None, None, bool]:
        for _ in range(self.num_slices):
            self.slices += 1
            yield
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        return end

    def passes(self) -> int:
        """Run another pass, and return the number of its turns."""
        self.watch.begin()
        turns = 1
        while not self.watch.turn():
            turns += 1
        return turns

    def counts(self) -> tuple[int, int]:
        return self.watch.num_checks, self.watch.num_failures


def test_an_idle_daemon_does_a_slice_each_turn() -> None:
    rig = Rig(3, True, True)
    assert (rig.passes(), rig.slices, rig.counts()) == (4, 3, (1, 0))
    assert (rig.passes(), rig.slices, rig.counts()) == (4, 6, (2, 0))
    assert rig.told == []


def test_a_pass_without_the_sums_is_not_counted() -> None:
    rig = Rig(1, False, True)
    rig.passes()
    assert rig.counts() == (0, 0)
    rig.passes()
    assert rig.counts() == (1, 0)


def test_a_turn_in_or_after_a_call_does_nothing() -> None:
    rig = Rig(3, True)
    rig.watch.begin()
    assert (rig.watch.turn(), rig.slices) == (False, 1)
    rig.calls.num_begun, rig.calls.in_flight = 1, 1
    assert (rig.watch.turn(), rig.watch.turn(), rig.slices) == (False, False, 1)
    rig.calls.in_flight = 0
    assert (rig.watch.turn(), rig.slices) == (False, 2)
    rig.calls.num_begun += 5  # calls that have already ended
    assert (rig.watch.turn(), rig.slices) == (False, 2)
    assert (rig.watch.turn(), rig.slices) == (False, 3)
    assert rig.watch.turn() is True


def test_the_first_failure_is_reported_and_logged_and_the_others_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(2, True, InternalError("integrity: one"), InternalError("integrity: two"), True)
    for _ in range(4):
        rig.passes()
    assert rig.counts() == (2, 2)
    assert rig.told == [rig.watch.failure] == ["the bookkeeping is corrupt: integrity: one"]
    assert [(line.levelno, line.getMessage()) for line in caplog.records] == [(logging.ERROR, rig.told[0])]


def test_a_check_that_breaks_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(0, KeyError(b"hash"))
    rig.passes()
    assert rig.counts() == (0, 1)
    assert "corrupt" in rig.told[0]
    assert caplog.records[0].exc_info, "with what is needed to understand it"


def test_passes_come_at_their_interval() -> None:
    rig, slept = Rig(2, *[True] * 9), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 7:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(rig.watch.run(60.0, sleep))
    assert slept == [60.0, SLICE_EVERY_S, SLICE_EVERY_S] * 2 + [60.0]
    asyncio.run(rig.watch.run(0.0, sleep))
    assert len(slept) == 7


@pytest.fixture
def corruptible(tmp_path: Path, free_port: int) -> Iterator[tuple[subprocess.Popen[bytes], str, Callable[[], str]]]:
    """The process of a daemon, its address, and a function that returns its log."""
    config: dict[str, Any] = POOL | {
        "unix_socket": str(tmp_path / "socket"),
        "tcp_address": "",
        "http_address": f"127.0.0.1:{free_port}",
        "integrity_interval_s": 0.05,
        "keeper": False,
    }
    command = [sys.executable, "-P", corruptible_daemon.__file__]
    environment = os.environ | missing_environment(os.environ)
    environment |= {f"KVSERVICE_{name.upper()}": str(value) for name, value in config.items()}
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stderr=log, env=environment) as process:
        try:
            yield process, f"unix:{tmp_path}/socket", (tmp_path / "log").read_text
        finally:
            process.kill()


def test_a_corrupt_daemon_says_so_everywhere(
    corruptible: tuple[subprocess.Popen[bytes], str, Callable[[], str]], free_port: int
) -> None:
    process, address, log = corruptible
    until(lambda: check(address, timeout_s=PATIENCE_S))
    with KVClient(address) as client, client.session() as kv:
        kv.allocate([1, 2, 3])
        scrape_until(free_port, lambda found: value(found, CHECKS) > 0)
        assert value(scrape(free_port), FAILURES) == 0
        assert CliRunner().invoke(main, ["health", "--address", address]).exit_code == 0
        process.send_signal(signal.SIGUSR1)
        samples = scrape_until(free_port, lambda found: value(found, FAILURES) > 1)
        asked = CliRunner().invoke(main, ["health", "--address", address])
        assert asked.exit_code == 1
        wrong = "the bookkeeping is corrupt: integrity: a block's ref count is not the number of tables that hold it"
        assert f"not serving: it says NOT_SERVING: {wrong}" in asked.output
        assert log().count("ERROR") == log().count(wrong) == 1
        passed = value(samples, CHECKS)
        assert value(scrape_until(free_port, lambda found: value(found, FAILURES) > 3), CHECKS) == passed
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
