"""The benchmark of the limits: a ping counts for the request that was being answered while it waited."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvservice.bench import garbage, limits
from kvservice.bench.limits import IDLE, Span, Timeline
from kvservice.config import ServeConfig
from kvservice.server.parsing import Refused, parser
from kvservice.v1 import pool_pb2

FORK, FREE = ("Fork", "many"), ("Free", "many")


def timeline(*spans: Span) -> Timeline:
    made = Timeline()
    made.spans.extend(spans)
    return made


def test_a_ping_counts_for_the_request_at_its_middle() -> None:
    measured = timeline(
        Span(IDLE, 0.0, 1.0, "OK"), Span(FORK, 1.0, 2.0, "OK"), Span(FREE, 2.5, 3.0, "OK"), Span(FORK, 3.0, 4.0, "LATE")
    )
    pings = np.array([[0.1, 0.2], [0.9, 1.8], [1.9, 2.4], [2.4, 2.8], [3.0, 3.5], [3.9, 4.5]])
    rows = measured.rows(pings)
    assert list(rows) == [IDLE, FORK, FREE]
    # Those with their middles at 2.15 and at 4.2 fell between the requests, and after them.
    assert [rows[name]["pings"] for name in rows] == [1, 2, 1]
    assert rows[FORK]["ping_max_s"] == pytest.approx(0.9)
    assert rows[FREE]["ping_p50_s"] == pytest.approx(0.4)
    assert rows[FORK]["statuses"] == ["LATE", "OK"]
    assert rows[FORK]["requests"] == 2
    assert rows[FREE]["request_p50_s"] == pytest.approx(0.5)


def test_a_request_that_no_ping_fell_into_has_no_quantiles() -> None:
    rows = timeline(Span(IDLE, 0.0, 1.0, "OK"), Span(FORK, 1.0, 1.1, "OK")).rows(np.array([[0.1, 0.2]]))
    assert rows[FORK]["pings"] == 0
    assert rows[FORK]["ping_p99_s"] is None


def test_spans_take_the_status_of_the_answer() -> None:
    made = Timeline()

    async def one() -> None:
        async with made.span(*FORK) as status:
            status.append("NOT_FOUND")

    asyncio.run(one())
    assert [(span.name, span.status) for span in made.spans] == [(FORK, "NOT_FOUND")]
    assert made.spans[0].start <= made.spans[0].end


def test_the_table_names_what_is_above_the_goal() -> None:
    row: dict[str, Any] = {"requests": 1, "statuses": ["OK"], "request_p50_s": 0.1, "pings": 3}
    slow = {"ping_p50_s": 0.002, "ping_p99_s": 0.03, "ping_max_s": 0.04}
    idle = {"ping_p50_s": 0.001, "ping_p99_s": 0.002, "ping_max_s": 0.01}
    none = dict.fromkeys(slow)
    rows = [
        {"rpc": name, "content": "many"} | row | felt for name, felt in (("Fork", slow), ("Free", none), ("Read", idle))
    ]
    console = Console(file=io.StringIO(), width=240)
    limits.render({"idle": row | idle, "rows": rows}, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert cells[0] == ["idle", "", "", "", "1.0", "2.0", "10.0"]
    assert cells[1] == ["Fork", "many", "OK", "100.0", "2.0 (2.0)", "30.0 (15.0)", "40.0 (4.0)"]
    assert cells[2][-3:] == ["-", "-", "-"]
    assert lines[-1] == "p99 above 20.0 ms: Fork (many)."


def test_messages_without_meaning_are_as_large_as_they_are_to_be() -> None:
    size = 8 << 20
    found = list(garbage.messages(size))
    assert all(size - 512 < len(message) <= size for message in found)
    parse = parser(pool_pb2.PingRequest, ServeConfig().request_limits)
    assert [isinstance(parse(message), Refused) for message in found] == [True, False, True, True, False, True, False]
