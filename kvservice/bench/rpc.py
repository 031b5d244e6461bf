"""Cost of calls to a real daemon on a unix socket, as unary RPCs and on a session's stream.

The client measures the times: building the request, the round trip, decoding the response. They are meaningful in units
of the echo of the same run. Attention is over short contexts here, so that the transport dominates; `kvservice bench
attention` measures the kernels. `transports.py` compares the transports of a layer's tensors, and `observers.py`
measures the cost of observation.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
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


async def unary_rate(workload: Workload, rounds: int) -> float:
    """Return calls per second, with IN_FLIGHT concurrent calls."""

    async def one(name: str, build: Callable[[], Any]) -> None:
        take(await workload.api.unary(name, build()))

    return await _rate(workload, rounds, lambda calls: asyncio.gather(*(one(*call) for call in calls)))


async def stream_rate(workload: Workload, rounds: int) -> float:
    """Return calls per second, with IN_FLIGHT calls that wait together and go as the client sends them."""

    async def all_of(calls: list[Request]) -> None:
        for response in await workload.api.call_all(calls):
            take(response)

    return await _rate(workload, rounds, all_of)


async def _rate(workload: Workload, rounds: int, run: Callable[[list[Request]], Awaitable[Any]]) -> float:
    seconds, count = 0.0, 0
    for _ in range(rounds):
        calls = await workload.begin()
        start = time.perf_counter()
        await run(calls)
        seconds += time.perf_counter() - start
        count += len(calls)
        await workload.end()
    return count / seconds


async def _workloads(api: Api) -> AsyncIterator[tuple[str, Workload]]:
    parent = await new_sequence(api, LONG_CONTEXT)
    yield "allocate_1024", Allocate(api, parent)
    yield "fork", Fork(api, parent)
    yield "free", Free(api, parent)
    groups = {
        "append_1": Append(api, IN_FLIGHT, 1, LONG_CONTEXT),
        "append_64": Append(api, IN_FLIGHT, 64, LONG_CONTEXT),
        "decode_16k": Decode(api, 16 << 10),
        "decode_256k": Decode(api, 256 << 10),
        "decode_2m": Decode(api, 2 << 20),
    }
    for name, workload in groups.items():
        await workload.prepare()
        yield name, workload


async def measure(address: str, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    async with connected(address) as api:
        echo = Echo(api)
        echoes: dict[str, list[float]] = {"unary": [], "stream": []}
        async for name, workload in _workloads(api):
            for way, call in (("unary", api.unary), ("stream", api.call)):
                await latencies(workload, call, 1)
                # The echo runs in turns with each call, so that a slow machine affects both.
                echoes[way] += await latencies(echo, call, max(1, rounds // 4))
                seconds = await latencies(workload, call, rounds)
                rate = unary_rate if way == "unary" else stream_rate
                results |= quantiles(f"{name}_{way}", seconds)
                results[f"{name}_{way}_per_s"] = await rate(workload, max(1, rounds // 2))
        for way, samples in echoes.items():
            results |= quantiles(f"echo_{way}", samples)
        results["echo_unary_per_s"] = await unary_rate(echo, rounds)
        results["echo_stream_per_s"] = await stream_rate(echo, rounds)
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
                    measured = await latencies(calls[call], calls[call].api.call, 1)
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
        results = uvloop.run(measure(daemon.address, 2 if quick else 40))
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
