"""Cost of observation: calls to a daemon with a million blocks, without and with many observers.

Each kind of observation has its own daemon, one after the other, because observers of one would disturb another, and
filling a pool takes longer than the calls. The observers run in a separate process.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvloop
from rich.console import Console

from kvservice.bench.harness import quantiles, table
from kvservice.bench.workloads import IN_FLIGHT, Api, Append, Echo, Fork, Workload, connected, latencies, new_sequence
from kvservice.launch import Daemon
from kvservice.owned import OwnedProcess
from kvservice.v1 import blocks_pb2

NUM_PAGES = 10
SHAPE = (1, 1, 32)
NUM_BLOCKS, NUM_BLOCKS_QUICK = 1_000_000, 100_000
# Length of the sequences that fill most of the pool.
LARGE = 16_384
POOL: dict[str, Any] = {
    "num_layers": SHAPE[0],
    "num_kv_heads": SHAPE[1],
    "head_size": SHAPE[2],
    "dtype": "bfloat16",
    "block_size": 2,
    "swap_space_gib": 0.0,
    "max_sequences": 4096,
    "num_threads": 1,
}


@dataclass(frozen=True)
class Watch:
    """`options` of the daemon, the number of open pages, and whether Prometheus scrapes and a router follows events."""

    label: str
    options: dict[str, Any]
    pages: int = 0
    scrapes: bool = False
    events: bool = False


def ways(port: int) -> dict[str, Watch]:
    http = {"http_address": f"127.0.0.1:{port}"}
    return {
        "nobody": Watch("nobody; no HTTP, no events", {"event_window": 0}),
        "scraped": Watch("Prometheus, each second", http, scrapes=True),
        "pages": Watch(f"{NUM_PAGES} pages, and Prometheus", http, pages=NUM_PAGES, scrapes=True),
        "events": Watch("a subscriber to block events", {}, events=True),
    }


async def fill(api: Api, num_blocks: int) -> None:
    """Fill most of the pool with active and cached blocks."""
    for n in range(num_blocks * POOL["block_size"] * 9 // 10 // LARGE):
        sequence_id = await new_sequence(api, LARGE, SHAPE)
        if n % 2:
            await api.call("free", blocks_pb2.FreeRequest(sequence_ids=[sequence_id]))


async def measure(address: str, watch: Watch, port: int, num_blocks: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call by operation."""
    async with connected(address) as api:
        await fill(api, num_blocks)
        append = Append(api, IN_FLIGHT, 64, 64, SHAPE)
        await append.prepare()
        workloads: dict[str, Workload] = {
            "echo": Echo(api),
            "fork": Fork(api, append.groups[0][0]),
            "append_64": append,
        }
        samples: dict[str, list[float]] = {name: [] for name in workloads}
        with watched(address, watch, port):
            for round_number in range(rounds + 1):
                for name, workload in workloads.items():
                    seconds = await latencies(workload, api.call)
                    if round_number:  # the first call is a warm-up
                        samples[name] += seconds
        return samples


@contextlib.contextmanager
def watched(address: str, watch: Watch, port: int) -> Iterator[None]:
    """Run the observers in a separate process."""
    if not (watch.pages or watch.scrapes or watch.events):
        yield
        return
    wanted = [str(port), str(watch.pages), str(int(watch.scrapes)), address if watch.events else ""]
    command = [sys.executable, "-P", "-m", "kvservice.bench.watchers", *wanted]
    with OwnedProcess(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != b"watching\n":
                raise RuntimeError("the observer process has ended early")
            yield
            if process.poll() is not None:
                raise RuntimeError("the observer process has ended during the measurement")
        finally:
            process.kill()


def run(quick: bool) -> dict[str, Any]:
    """Return `<way>_<call>_<p50_s|p99_s>`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_blocks, rounds = (NUM_BLOCKS_QUICK, 5) if quick else (NUM_BLOCKS, 60)
    samples: dict[str, dict[str, list[float]]] = {}
    for name, watch in ways(port).items():
        with Daemon(**POOL, num_blocks=num_blocks, **watch.options) as daemon:
            samples[name] = uvloop.run(measure(daemon.address, watch, port, num_blocks, rounds))
    results: dict[str, float] = {}
    for name, calls in samples.items():
        for call, seconds in calls.items():
            results |= quantiles(f"{name}_{call}", seconds)
    return results


def render(results: dict[str, Any], console: Console) -> None:
    title = "Calls on the stream while others watch, µs; in brackets: in units of nobody watching"
    calls = ("echo", "fork", "append_64")
    rows = table(title, ("who watches",), (heading for call in calls for heading in (f"{call} p50", "p99")))
    for name, watch in ways(0).items():
        keys = [f"{call}_{quantile}" for call in calls for quantile in ("p50_s", "p99_s")]
        cells = [(results[f"{name}_{key}"], results[f"nobody_{key}"]) for key in keys]
        rows.add_row(watch.label, *(f"{value * 1e6:.0f} ({value / base:.2f})" for value, base in cells))
    console.print(rows)
