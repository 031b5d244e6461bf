"""When a daemon starts again, and when it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvservice.keeper.restarts import CrashLoopError, Ending, Restarts

CRASH = Ending(139, signal.SIGSEGV)
KILLED = Ending(137, signal.SIGKILL)


@pytest.mark.parametrize(
    ("code", "expected", "text"),
    [
        ("import os; os.kill(os.getpid(), 9)", KILLED, "signal 9"),
        ("raise SystemExit(70)", Ending(70), "status 70"),
        ("", Ending(0), "status 0"),
    ],
)
def test_an_ending_is_a_status_or_a_signal(code: str, expected: Ending, text: str) -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    ending = Ending.from_wait(os.waitpid(process.pid, 0)[1])
    process.returncode = 0
    assert ending == expected
    assert str(ending) == text


def test_each_crash_waits_longer_until_the_last() -> None:
    restarts = Restarts()
    assert [restarts.delay_s(CRASH, None) for _ in range(4)] == [0, 1, 2, 4]
    with pytest.raises(CrashLoopError) as caught:
        restarts.delay_s(Ending(1), 0.25)
    start = "signal 11 at its start, " * 4
    expected = f"the daemon ended 5 times in a row within 60 s of service: {start}status 1 after 0.2 s of service"
    assert str(caught.value) == expected


def test_a_minute_of_service_ends_the_series() -> None:
    restarts = Restarts()
    assert [restarts.delay_s(CRASH, 59.9) for _ in range(4)] == [0, 1, 2, 4]
    assert restarts.delay_s(CRASH, 60.0) == 0
    assert restarts.delay_s(CRASH, 59.9) == 1


def test_a_daemon_that_somebody_kills_again_and_again_has_not_crashed() -> None:
    restarts = Restarts()
    assert {restarts.delay_s(KILLED, 0.5) for _ in range(300)} == {0.0}
    assert restarts.delay_s(CRASH, 0.5) == 0
    assert restarts.delay_s(KILLED, 0.5) == 0
    assert restarts.delay_s(CRASH, 0.5) == 1


def test_one_that_is_killed_at_its_start_has() -> None:
    """The kernel also sends SIGKILL to a process that needs more memory than there is."""
    restarts = Restarts()
    for _ in range(4):
        restarts.delay_s(KILLED, None)
    with pytest.raises(CrashLoopError, match="signal 9 at its start"):
        restarts.delay_s(KILLED, None)
