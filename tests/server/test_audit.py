"""Counters and log lines about callers, and the delay of refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from kvservice.auth import UNNAMED, Identity
from kvservice.errors import UnauthenticatedError
from kvservice.logs import LogBudget
from kvservice.server.rpc.callers import MAX_DELAYED_REFUSALS, MAX_KNOWN_CONNECTIONS, REFUSAL_DELAY_S, Audit

ERROR = UnauthenticatedError("who?", cause="unknown")


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.awake = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await self.awake.wait()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_refusal_waits_but_only_so_many_at_a_time(lines: Callable[[], list[str]]) -> None:
    async def refuse_many() -> None:
        clock = Clock()
        audit = Audit(clock, clock.sleep)
        waiting = [asyncio.create_task(audit.refused("peer", "/M", ERROR)) for _ in range(MAX_DELAYED_REFUSALS + 10)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert clock.slept == [REFUSAL_DELAY_S] * MAX_DELAYED_REFUSALS
        assert sum(task.done() for task in waiting) == 10, "the others are answered at once"
        waiting[0].cancel()
        clock.awake.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        await audit.refused("peer", "/M", ERROR)
        assert len(clock.slept) == MAX_DELAYED_REFUSALS + 1, "the places are free again"
        assert audit.refusals == {"missing": 0, "malformed": 0, "unknown": MAX_DELAYED_REFUSALS + 11}

    asyncio.run(refuse_many())
    assert len(lines()) == 20


def test_a_refusal_is_logged_with_peer_and_method_but_not_at_any_length(lines: Callable[[], list[str]]) -> None:
    async def refuse() -> None:
        clock = Clock()
        clock.awake.set()
        await Audit(clock, clock.sleep).refused("ipv4:192.0.2.1:7", "/a\nb" + "c" * 9999, ERROR)

    asyncio.run(refuse())
    (line,) = lines()
    assert line.startswith("'/a\\nbccc")
    assert line.endswith("refused to ipv4:192.0.2.1:7: unknown token")
    assert len(line) < 200


def test_a_connection_is_counted_and_logged_once(lines: Callable[[], list[str]]) -> None:
    audit = Audit()
    for _ in range(3):
        audit.accepted("ipv4:192.0.2.1:7", Identity("alice"))
        audit.accepted("ipv4:192.0.2.1:8", UNNAMED)
    audit.accepted("ipv4:192.0.2.1:7", Identity("bob"))
    assert audit.num_connections == 3
    assert lines() == [
        "alice connected from ipv4:192.0.2.1:7",
        "a client connected from ipv4:192.0.2.1:8",
        "bob connected from ipv4:192.0.2.1:7",
    ]


def test_a_connection_for_a_health_check_is_counted_but_logged_only_with_its_first_other_call(
    lines: Callable[[], list[str]],
) -> None:
    audit = Audit()
    for _ in range(2):
        audit.accepted("ipv4:192.0.2.1:7", Identity("alice"), is_check=True)
    assert (audit.num_connections, lines()) == (1, [])
    for _ in range(2):
        audit.accepted("ipv4:192.0.2.1:7", Identity("alice"))
        audit.accepted("ipv4:192.0.2.1:7", Identity("alice"), is_check=True)
    assert (audit.num_connections, lines()) == (1, ["alice connected from ipv4:192.0.2.1:7"])


def test_so_many_connections_are_remembered() -> None:
    audit = Audit()
    for port in range(MAX_KNOWN_CONNECTIONS + 1):
        audit.accepted(f"ipv4:192.0.2.1:{port}", UNNAMED)
    for port in range(1, MAX_KNOWN_CONNECTIONS + 1):
        audit.accepted(f"ipv4:192.0.2.1:{port}", UNNAMED)
    assert audit.num_connections == MAX_KNOWN_CONNECTIONS + 1
    audit.accepted("ipv4:192.0.2.1:0", UNNAMED)
    assert audit.num_connections == MAX_KNOWN_CONNECTIONS + 2, "the oldest was forgotten"


def test_a_log_has_so_many_lines_a_minute_and_says_what_is_left_out(lines: Callable[[], list[str]]) -> None:
    clock = Clock()
    budget = LogBudget(logging.getLogger("kvservice.test"), clock)
    for second in range(60):
        clock.now = float(second)
        budget.write(logging.WARNING, "line %d", second)
    assert lines() == [f"line {second}" for second in range(20)]
    for clock.now in (60.0, 120.0):
        budget.write(logging.WARNING, "next")
    assert lines()[20:] == ["40 more lines like those before were left out", "next", "next"]
