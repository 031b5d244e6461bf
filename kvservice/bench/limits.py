"""Latency of a client while another client sends the largest requests that the daemon accepts or refuses.

One process sends each request of `largest.py` repeatedly, one at a time. Another process only pings, on a separate
connection. A ping counts for the request that is in progress at the midpoint of the ping. Pings during idle times are
the baseline; they alternate with the requests, so that a slow machine affects both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import uvloop
from rich.console import Console

from kvservice.bench.harness import table
from kvservice.bench.largest import Cycle, cycles
from kvservice.bench.pinger import Pinger, Pings
from kvservice.bench.sending import Sender
from kvservice.launch import Daemon

# Goal for the longest time that a request blocks the event loop.
GOAL_S: Final = 0.020
QUANTILES: Final = {"ping_p50_s": 50, "ping_p99_s": 99, "ping_max_s": 100}
IDLE: Final = ("idle", "")
IDLE_S, IDLE_QUICK_S = 0.5, 0.02
# Seconds for which each cycle is repeated.
REPEAT_S, REPEAT_QUICK_S = 3.0, 0.0
# Block events include token ids, and there are enough blocks for the largest requests.
POOL: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": "bfloat16",
    "num_blocks": 65536,
    "swap_space_gib": 0.0625,
    "max_sequences": 4096,
    "event_token_ids": "true",
    "num_threads": 1,
    "share_pool": "write",
    "store_gib": 0.0625,
    "share_store": "write",
}


@dataclass(frozen=True)
class Span:
    """The time of a request from sending to response, named by RPC and content, or an idle time."""

    name: tuple[str, str]
    start: float
    end: float
    status: str


class Timeline:
    """The sequence of spans. They do not overlap."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @asynccontextmanager
    async def span(self, rpc: str, content: str) -> AsyncIterator[list[str]]:
        """Open a span. The caller appends the status of the response to the list."""
        status: list[str] = []
        start = time.monotonic()
        yield status
        self.spans.append(Span((rpc, content), start, time.monotonic(), *status))

    async def idle(self, seconds: float) -> None:
        async with self.span(*IDLE) as status:
            await asyncio.sleep(seconds)
            status.append("OK")

    def rows(self, pings: Pings) -> dict[tuple[str, str], dict[str, Any]]:
        """Return the pings of each span by RPC and content. `pings` is float64[n, 2]."""
        starts, ends = (np.array([getattr(span, name) for span in self.spans]) for name in ("start", "end"))
        middles = pings.mean(1)
        during = np.searchsorted(starts, middles, "right") - 1
        inside = (during >= 0) & (middles < ends[during])
        seconds, during = (pings[:, 1] - pings[:, 0])[inside], during[inside]
        return {name: self._row(name, seconds, during) for name in dict.fromkeys(span.name for span in self.spans)}

    def _row(self, name: tuple[str, str], seconds: Pings, during: Any) -> dict[str, Any]:
        chosen = [i for i, span in enumerate(self.spans) if span.name == name]
        felt = seconds[np.isin(during, chosen)]
        spans = [self.spans[i] for i in chosen]
        row = {
            "requests": len(spans),
            "statuses": sorted({span.status for span in spans}),
            "request_p50_s": float(np.median([span.end - span.start for span in spans])),
            "pings": len(felt),
        }
        # A request may be answered before the first ping.
        return row | (quantiles(felt) if len(felt) else dict.fromkeys(QUANTILES))


def quantiles(seconds: Pings) -> dict[str, Any]:
    return {name: float(np.percentile(seconds, percent)) for name, percent in QUANTILES.items()}


async def repeat(cycle: Cycle, seconds: float) -> None:
    stop = time.monotonic() + seconds
    while True:
        await cycle()
        if time.monotonic() >= stop:
            return


async def send_all(address: str, timeline: Timeline, quick: bool) -> None:
    async with Sender.connected(address, timeline.span) as sender:
        async for cycle in cycles(sender):
            await timeline.idle(IDLE_QUICK_S if quick else IDLE_S)
            await repeat(cycle, REPEAT_QUICK_S if quick else REPEAT_S)


def run(quick: bool = False) -> dict[str, Any]:
    """Return `idle`, the row without requests, and `rows`: `{rpc, content, requests, statuses, request_p50_s, pings,
    ping_p50_s, ping_p99_s, ping_max_s}`. The quantiles are None if no ping counts for a request."""
    timeline, pinger = Timeline(), Pinger()
    with Daemon(**POOL) as daemon, pinger.pinging(daemon.address):
        uvloop.run(send_all(daemon.address, timeline, quick))
    rows = timeline.rows(pinger.pings)
    idle = rows.pop(IDLE)
    return {"idle": idle, "rows": [{"rpc": rpc, "content": content} | row for (rpc, content), row in rows.items()]}


def render(results: dict[str, Any], console: Console) -> None:
    idle = results["idle"]
    title = "Pings while another client sends its largest requests, ms; in brackets: in units of pings while it is idle"
    rows = table(title, ("RPC", "content", "answer"), ("ms", "ping p50", "p99", "max"))
    rows.add_row(*IDLE, "", "", *(_ms(idle[name]) for name in QUANTILES))
    for row in results["rows"]:
        cells = (_cell(row, idle, name) for name in QUANTILES)
        rows.add_row(row["rpc"], row["content"], ", ".join(row["statuses"]), _ms(row["request_p50_s"]), *cells)
    console.print(rows)
    slow = [f"{row['rpc']} ({row['content']})" for row in results["rows"] if (row["ping_p99_s"] or 0.0) > GOAL_S]
    console.print(f"p99 above {_ms(GOAL_S)} ms: {', '.join(slow) or 'none'}.")


def _cell(row: dict[str, Any], idle: dict[str, Any], name: str) -> str:
    return "-" if row[name] is None else f"{_ms(row[name])} ({row[name] / idle[name]:.1f})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
