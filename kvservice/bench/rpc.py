"""Cost of calls to a real daemon on a unix socket, as unary RPCs and on a session's stream.

The client measures the times: building the request, the round trip, decoding the response. They are meaningful in units
of the echo of the same run. Attention is over short contexts here, so that the transport dominates; `kvservice bench
attention` measures the kernels. `transports.py` compares the transports of a layer's tensors, and `observers.py`
measures the cost of observation.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import uvloop
from rich.console import Console

from kvservice.bench import observers, transports
from kvservice.bench.harness import quantiles, table
from kvservice.bench.workloads import (
    IN_FLIGHT,
    LONG_CONTEXT,
    POOL,
    Allocate,
    Api,
    Append,
    Decode,
    Echo,
    Fork,
    Free,
    Request,
    Workload,
    connected,
    latencies,
    new_sequence,
    take,
)
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder

# How often the calls take turns. A round has IN_FLIGHT calls of each kind one after the other, and as many at a time.
ROUNDS, ROUNDS_QUICK = 10, 2
# Large calls take part in each of so many rounds only.
SELDOM = {"decode_256k": 2, "decode_2m": 5}


async def _unary_at_once(api: Api, calls: list[Request]) -> None:
    async def one(name: str, build: Callable[[], Any]) -> None:
        take(await api.unary(name, build()))

    await asyncio.gather(*(one(*call) for call in calls))


async def _stream_at_once(api: Api, calls: list[Request]) -> None:
    """Make calls that wait together and go as the client sends them."""
    for response in await api.call_all(calls):
        take(response)


async def _rate(workload: Workload, run: Callable[[Api, list[Request]], Awaitable[None]]) -> float:
    """Return calls per second, with IN_FLIGHT calls at a time."""
    calls = await workload.begin()
    start = time.perf_counter()
    await run(workload.api, calls)
    seconds = time.perf_counter() - start
    await workload.end()
    return len(calls) / seconds


async def _workloads(api: Api) -> dict[str, Workload]:
    parent = await new_sequence(api, LONG_CONTEXT)
    groups = {
        "append_1": Append(api, IN_FLIGHT, 1, LONG_CONTEXT),
        "append_64": Append(api, IN_FLIGHT, 64, LONG_CONTEXT),
        "decode_16k": Decode(api, 16 << 10),
        "decode_256k": Decode(api, 256 << 10),
        "decode_2m": Decode(api, 2 << 20),
    }
    for workload in groups.values():
        await workload.prepare()
    return {
        "echo": Echo(api),
        "allocate_1024": Allocate(api, parent),
        "fork": Fork(api, parent),
        "free": Free(api, parent),
        **groups,
    }


async def measure(address: str, rounds: int) -> dict[str, Any]:
    """All calls take turns in each round, so that a slow machine affects all of them."""
    samples: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    async with connected(address) as api:
        ways = (("unary", api.unary, _unary_at_once), ("stream", api.call, _stream_at_once))
        workloads = await _workloads(api)
        for workload in workloads.values():
            for _, _, at_once in ways:
                await _rate(workload, at_once)  # a warm-up
        for number in range(rounds):
            for name, workload in workloads.items():
                if number % SELDOM.get(name, 1):
                    continue
                for way, call, at_once in ways:
                    samples.setdefault(f"{name}_{way}", []).extend(await latencies(workload, call))
                    rates.setdefault(f"{name}_{way}_per_s", []).append(await _rate(workload, at_once))
    results: dict[str, Any] = {name: statistics.median(found) for name, found in rates.items()}
    for name, taken in samples.items():
        results |= quantiles(name, taken)
    return results


# The lines of the clients' tenant, for each daemon that `run_tenants` compares. The first one has no tenants.
TENANTS = {
    "none": None,
    "tenants": "",
    "quotas": "max_blocks = 8000\nmax_sequences = 8000\nguaranteed_blocks = 10\ncalls_per_s = 1e6",
}


def run_tenants(number: int, quick: bool = False) -> dict[str, Any]:
    """Compare daemons without tenants, with so many, and with quotas for each. Return `<call>_<daemon>_p50_s` of calls
    on a stream. The daemons take turns in each round, so that a slow machine affects all."""
    with ExitStack() as stack:
        folder = stack.enter_context(OwnedFolder("kvservice-tenants-"))
        addresses = {}
        for name, lines in TENANTS.items():
            options: dict[str, Any] = {}
            if lines is not None:
                tables = [f"[tenant.number-{i}]\n{lines}\n" for i in range(number)]
                tables[-1] += 'unix_socket = "engine"\n'
                options["tenants"] = folder / f"{name}.toml"
                options["tenants"].write_text("".join(tables))
            addresses[name] = stack.enter_context(Daemon(**POOL, **options)).address
        return uvloop.run(_measure_tenants(addresses, 3 if quick else 60))


async def _measure_tenants(addresses: dict[str, str], rounds: int) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        workloads: dict[str, dict[str, Workload]] = {}
        for name, address in addresses.items():
            api = await stack.enter_async_context(connected(address))
            parent = await new_sequence(api, LONG_CONTEXT)
            append = Append(api, IN_FLIGHT, 1, LONG_CONTEXT)
            await append.prepare()
            calls = {"echo": Echo(api), "allocate_1024": Allocate(api, parent), "free": Free(api, parent)}
            workloads[name] = calls | {"append_1": append}
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for turn in range(-1, rounds):
            for call in workloads["none"]:
                for name, calls in workloads.items():
                    measured = await latencies(calls[call], calls[call].api.call)
                    if turn >= 0:
                        seconds[f"{call}_{name}"] += measured
    return {key: value for name, times in seconds.items() for key, value in quantiles(name, times).items()}


def render_tenants(results: dict[str, Any], console: Console) -> None:
    rows = table("a call on a stream: p50 in µs; in brackets: of the daemon without tenants", ("call",), tuple(TENANTS))
    for call in dict.fromkeys(key.rsplit("_", 3)[0] for key in results):
        found = [results[f"{call}_{name}_p50_s"] for name in TENANTS]
        rows.add_row(call, *(f"{one * 1e6:.1f} ({one / found[0]:.3f})" for one in found))
    console.print(rows)


def open_native(device: str) -> transports.Way:
    """Raises ModuleNotFoundError or FailedPreconditionError if the device cannot be used."""
    if device == "cpu":
        return transports.NativeWay()
    from kvservice.bench.cuda_native import CudaNativeWay

    return CudaNativeWay({size: transports.tokens_of(size) for size in transports.SIZES})


def run(quick: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Return `<call>_<unary|stream>_<p50_s|p99_s|per_s>`, and the results of `transports.run` and `observers.run`."""
    native = open_native(device)  # first, because it reports missing packages or devices
    with Daemon(**POOL, device=device) as daemon:
        results = uvloop.run(measure(daemon.address, ROUNDS_QUICK if quick else ROUNDS))
    return results | {"transports": transports.run(native, device, quick), "observers": observers.run(quick)}


def render(results: dict[str, Any], console: Console) -> None:
    title = "RPC latency in µs; in brackets: in units of the echo of the same way"
    figures = ("unary p50", "p99", f"per s, {IN_FLIGHT} in flight", "stream p50", "p99", "per s")
    rows = table(title, ("call",), figures)
    names = dict.fromkeys(key.rsplit("_", 3)[0] for key in results if key.endswith("p50_s"))
    for name in sorted(names, key=lambda name: name != "echo"):
        cells = []
        for way in ("unary", "stream"):
            p50, p99 = results[f"{name}_{way}_p50_s"], results[f"{name}_{way}_p99_s"]
            ratio = p50 / results[f"echo_{way}_p50_s"]
            cells += [f"{p50 * 1e6:.0f} ({ratio:.2f})", f"{p99 * 1e6:.0f}", f"{results[f'{name}_{way}_per_s']:.0f}"]
        rows.add_row(name, *cells)
    console.print(rows)
    transports.render(results["transports"], console)
    observers.render(results["observers"], console)
