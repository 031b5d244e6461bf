"""Cost of calls to a real daemon on a unix socket, as unary RPCs and on a session's stream.

The client measures the times: building the request, the round trip, decoding the response. They are meaningful in units
of the echo of the same run. Attention is over short contexts here, so that the transport dominates; `kvservice bench
attention` measures the kernels. `transports.py` compares the transports of a layer's tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import uvloop
from rich.console import Console

from kvservice.bench import (
    normal,
    quantiles,
    table,
    transports,
)
from kvservice.client import AsyncKVClient
from kvservice.client.channel import CHANNEL_OPTIONS
from kvservice.client.messages import (
    MAX_JOINED_BYTES,
    join_calls,
    make_call,
    open_stub,
    parse_replies,
    sequence_allocation,
    take_reply,
)
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder, OwnedProcess
from kvservice.v1 import (
    attention_pb2,
    attention_pb2_grpc,
    blocks_pb2,
    blocks_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
)
from kvservice.wire.tensors import put_tensor, to_array

# ---- calls to a real daemon: their preparation, execution and decoding


IN_FLIGHT = 32
NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 4, 2, 28, 128
# Bytes of query, key and value of one token, bfloat16.
TOKEN_BYTES = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE * 2
LONG_CONTEXT, SHORT_CONTEXT = 1024, 16
POOL: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "bfloat16",
    "num_blocks": 8192,
    "swap_space_gib": 0.0,
    "max_sequences": 8192,
    "num_threads": 1,
}

# Layers, KV heads, head size.
Shape = tuple[int, int, int]
SHAPE = (NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE)

# A call before serialization: the field of `Call`, and the function that builds the request.
Request = tuple[str, Callable[[], Any]]


class Api:
    """A session's two paths to the daemon: unary RPCs and its stream."""

    def __init__(self, channel: grpc.aio.Channel, token: bytes, stream: Any) -> None:
        stubs = (
            blocks_pb2_grpc.BlockServiceStub(channel),  # type: ignore[no-untyped-call]
            attention_pb2_grpc.AttentionServiceStub(channel),  # type: ignore[no-untyped-call]
            pool_pb2_grpc.PoolServiceStub(channel),  # type: ignore[no-untyped-call]
        )
        self._methods = {
            name.lower(): getattr(stub, name) for stub in stubs for name in vars(stub) if not name.startswith("_")
        }
        self._token = token
        self.stream = stream
        self._call_ids = itertools.count(1)

    async def unary(self, name: str, request: Any) -> Any:
        if name != "ping":
            request.session_token = self._token
        return await self._methods[name.replace("_", "")](request)

    async def call(self, name: str, request: Any) -> Any:
        await self.stream.write(make_call(next(self._call_ids), name, request))
        [reply] = await self.stream.read()
        return take_reply(reply)

    async def call_all(self, calls: list[Request]) -> list[Any]:
        """Send calls that wait together, as the client does: in few messages. Returns their responses."""
        writing = asyncio.create_task(self._write_all(calls))
        responses = await self._read_all(len(calls))
        await writing
        return responses

    async def _write_all(self, calls: list[Request]) -> None:
        waiting: list[bytes] = []
        for name, build in calls:
            call = make_call(next(self._call_ids), name, build())
            if waiting and sum(map(len, waiting)) + len(call) > MAX_JOINED_BYTES:
                await self.stream.write(join_calls(waiting))
                waiting.clear()
            waiting.append(call)
        await self.stream.write(join_calls(waiting))

    async def _read_all(self, count: int) -> list[Any]:
        responses: list[Any] = []
        while len(responses) < count:
            responses += map(take_reply, await self.stream.read())
        return responses


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Api]:
    async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        sessions = open_stub(channel, parse_replies)
        opened = await sessions.Open(session_pb2.OpenRequest(name="bench"))
        stream = sessions.Connect()
        api = Api(channel, opened.session_token, stream)
        await api.call("attach", session_pb2.AttachRequest(session_token=opened.session_token))
        yield api
        await sessions.Close(session_pb2.CloseRequest(session_token=opened.session_token))


class Workload:
    """A kind of call. `begin` and `end` run before and after a round of IN_FLIGHT independent calls, and are not
    measured."""

    def __init__(self, api: Api) -> None:
        self.api = api

    async def begin(self) -> list[Request]:
        raise NotImplementedError

    async def end(self) -> None:
        pass


class Echo(Workload):
    async def begin(self) -> list[Request]:
        return [("ping", lambda: pool_pb2.PingRequest(payload=bytes(100)))] * IN_FLIGHT


class Sequences(Workload):
    """Workloads that allocate and free sequences."""

    ids: Iterator[int] = itertools.count(1 << 40)

    def __init__(self, api: Api, parent: int) -> None:
        super().__init__(api)
        self._parent = parent
        self._made: list[int] = []

    def _new_ids(self) -> list[int]:
        self._made = list(itertools.islice(self.ids, IN_FLIGHT))
        return self._made

    async def end(self) -> None:
        await self.api.call("free", blocks_pb2.FreeRequest(sequence_ids=self._made))


class Allocate(Sequences):
    async def begin(self) -> list[Request]:
        # The first token is different in every prompt, so there are no prefix hits.
        prompts = [(i, [i & 0x7FFFFFFF, *random.choices(range(50_000), k=LONG_CONTEXT - 1)]) for i in self._new_ids()]
        return [("allocate", partial(self._request, i, prompt)) for i, prompt in prompts]

    @staticmethod
    def _request(sequence_id: int, prompt: list[int]) -> Any:
        sequence = sequence_allocation(sequence_id, prompt)
        return blocks_pb2.AllocateRequest(request_id=sequence_id, sequences=[sequence])


class Fork(Sequences):
    async def begin(self) -> list[Request]:
        return [("fork", partial(self._request, [i])) for i in self._new_ids()]

    def _request(self, child_ids: list[int]) -> Any:
        parents = [self._parent] * len(child_ids)
        return blocks_pb2.ForkRequest(request_id=child_ids[0], parent_ids=parents, child_ids=child_ids)


class Free(Fork):
    async def begin(self) -> list[Request]:
        await self.api.call("fork", self._request(self._new_ids()))
        return [("free", partial(self._free_request, i)) for i in self._made]

    @staticmethod
    def _free_request(sequence_id: int) -> Any:
        # An unused id.
        return blocks_pb2.FreeRequest(request_id=sequence_id << 1, sequence_ids=[sequence_id])

    async def end(self) -> None:
        pass


class Groups(Workload):
    """Workloads on running batches: `num_groups` batches of `size` sequences, all forks of one sequence."""

    def __init__(self, api: Api, num_groups: int, size: int, length: int, shape: Shape = SHAPE) -> None:
        super().__init__(api)
        self._length = length
        self._shape = shape
        self.groups = [list(itertools.islice(Sequences.ids, size)) for _ in range(num_groups)]

    async def prepare(self) -> None:
        parent = await new_sequence(self.api, self._length, self._shape)
        for group in self.groups:
            request = blocks_pb2.ForkRequest(parent_ids=[parent] * len(group), child_ids=group)
            await self.api.call("fork", request)

    def append_request(self, group: list[int]) -> Any:
        return blocks_pb2.AppendRequest(
            sequence_ids=group, token_ids=[7] * len(group), expected_lengths=[self._length] * len(group)
        )

    async def end(self) -> None:
        for group in self.groups:
            lengths = [self._length] * len(group)
            await self.api.call("truncate", blocks_pb2.TruncateRequest(sequence_ids=group, lengths=lengths))


class Append(Groups):
    async def begin(self) -> list[Request]:
        return [("append", partial(self.append_request, group)) for group in self.groups]


class Decode(Groups):
    def __init__(self, api: Api, num_bytes: int) -> None:
        size = num_bytes // TOKEN_BYTES
        super().__init__(api, IN_FLIGHT // NUM_LAYERS, size, SHORT_CONTEXT)
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        self._query, self._key, self._value = (normal(size, count, HEAD_SIZE) for count in heads)

    async def begin(self) -> list[Request]:
        steps = [await self.api.call("append", self.append_request(group)) for group in self.groups]
        return [
            ("decode", partial(self._request, step.step_id, layer)) for step in steps for layer in range(NUM_LAYERS)
        ]

    def _request(self, step_id: int, layer: int) -> Any:
        request = attention_pb2.AttendRequest(step_id=step_id, layer=layer)
        put_tensor(self._query, request.query)
        put_tensor(self._key, request.key)
        put_tensor(self._value, request.value)
        return request


async def new_sequence(api: Api, length: int, shape: Shape = SHAPE) -> int:
    """Return a computed sequence in a pool of that shape."""
    sequence_id = next(Sequences.ids)
    prompt = random.choices(range(50_000), k=length)
    await api.call("allocate", Allocate._request(sequence_id, prompt))
    step = await api.call("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
    request = attention_pb2.WriteRequest(step_id=step.step_id)
    num_layers, *rest = shape
    kv = normal(num_layers, length, *rest)
    put_tensor(kv, request.key)
    put_tensor(kv, request.value)
    await api.call("write", request)
    return sequence_id


def take(response: Any) -> None:
    """Decode a response as a client does: copy the tensor's bytes into an array."""
    if isinstance(response, attention_pb2.AttendResponse) and response.HasField("output"):
        to_array(response.output, "output").copy()


async def latencies(workload: Workload, call: Callable[[str, Any], Awaitable[Any]]) -> list[float]:
    """Return the seconds of each call of a round, with one call in flight."""
    seconds = []
    for name, build in await workload.begin():
        start = time.perf_counter()
        take(await call(name, build()))
        seconds.append(time.perf_counter() - start)
    await workload.end()
    return seconds


# ---- the measurement

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


# ---- cost of observation: calls to a daemon with a million blocks, without and with many observers
#
# Each kind of observation has its own daemon, one after the other, because observers of one would disturb another, and
# filling a pool takes longer than the calls. The observers run in a process of their own.

NUM_PAGES = 10
OBSERVED_SHAPE = (1, 1, 32)
NUM_BLOCKS, NUM_BLOCKS_QUICK = 1_000_000, 100_000
# Length of the sequences that fill most of the pool.
LARGE = 16_384
OBSERVED_POOL: dict[str, Any] = {
    "num_layers": OBSERVED_SHAPE[0],
    "num_kv_heads": OBSERVED_SHAPE[1],
    "head_size": OBSERVED_SHAPE[2],
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


def watches(port: int) -> dict[str, Watch]:
    http = {"http_address": f"127.0.0.1:{port}"}
    return {
        "nobody": Watch("nobody; no HTTP, no events", {"event_window": 0}),
        "scraped": Watch("Prometheus, each second", http, scrapes=True),
        "pages": Watch(f"{NUM_PAGES} pages, and Prometheus", http, pages=NUM_PAGES, scrapes=True),
        "events": Watch("a subscriber to block events", {}, events=True),
    }


async def fill(api: Api, num_blocks: int) -> None:
    """Fill most of the pool with active and cached blocks."""
    for n in range(num_blocks * OBSERVED_POOL["block_size"] * 9 // 10 // LARGE):
        sequence_id = await new_sequence(api, LARGE, OBSERVED_SHAPE)
        if n % 2:
            await api.call("free", blocks_pb2.FreeRequest(sequence_ids=[sequence_id]))


async def measure_watched(
    address: str, watch: Watch, port: int, num_blocks: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of each call by operation."""
    async with connected(address) as api:
        await fill(api, num_blocks)
        append = Append(api, IN_FLIGHT, 64, 64, OBSERVED_SHAPE)
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
    command = [sys.executable, "-P", "-m", "kvservice.bench.rpc", *wanted]
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


def run_observers(quick: bool) -> dict[str, Any]:
    """Return `<way>_<call>_<p50_s|p99_s>`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    num_blocks, rounds = (NUM_BLOCKS_QUICK, 5) if quick else (NUM_BLOCKS, 60)
    samples: dict[str, dict[str, list[float]]] = {}
    for name, watch in watches(port).items():
        with Daemon(**OBSERVED_POOL, num_blocks=num_blocks, **watch.options) as daemon:
            samples[name] = uvloop.run(measure_watched(daemon.address, watch, port, num_blocks, rounds))
    results: dict[str, float] = {}
    for name, calls in samples.items():
        for call, seconds in calls.items():
            results |= quantiles(f"{name}_{call}", seconds)
    return results


def render_observers(results: dict[str, Any], console: Console) -> None:
    title = "Calls on the stream while others watch, µs; in brackets: in units of nobody watching"
    calls = ("echo", "fork", "append_64")
    rows = table(title, ("who watches",), (heading for call in calls for heading in (f"{call} p50", "p99")))
    for name, watch in watches(0).items():
        keys = [f"{call}_{quantile}" for call in calls for quantile in ("p50_s", "p99_s")]
        cells = [(results[f"{name}_{key}"], results[f"nobody_{key}"]) for key in keys]
        rows.add_row(watch.label, *(f"{value * 1e6:.0f} ({value / base:.2f})" for value, base in cells))
    console.print(rows)


# ---- the observers: `python -m kvservice.bench.rpc PORT PAGES SCRAPES ADDRESS`
#
# They print "watching" when each of them has received its first response, and run until they are killed.

SCRAPE_EVERY_S = 1.0


async def get_http(port: int, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
    return reader, writer


async def page(port: int, first: asyncio.Event) -> None:
    reader, _ = await get_http(port, "/api/stream")
    while data := await reader.read(1 << 20):
        if b"event: frame" in data:
            first.set()
    raise ConnectionError("the page's stream has ended")


async def scrape(port: int, first: asyncio.Event) -> None:
    while True:
        reader, writer = await get_http(port, "/metrics")
        if b"kvservice_blocks" not in await reader.read():
            raise ConnectionError("no metrics")
        writer.close()
        first.set()
        await asyncio.sleep(SCRAPE_EVERY_S)


async def follow(address: str, first: asyncio.Event) -> None:
    async with AsyncKVClient(address) as client:
        async for _ in client.events(start_number=1):
            first.set()


async def watch_daemon(port: int, pages: int, scrapes: bool, address: str) -> None:
    firsts = [asyncio.Event() for _ in range(pages + scrapes + bool(address))]
    left = iter(firsts)
    watching = [page(port, next(left)) for _ in range(pages)]
    watching += [scrape(port, next(left))] if scrapes else []
    watching += [follow(address, next(left))] if address else []
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in watching]
    ready: asyncio.Future[Any] = asyncio.gather(*(first.wait() for first in firsts))
    await asyncio.wait([ready, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        print("watching", flush=True)
        await asyncio.gather(*tasks)


# ---- all of them


def open_native(device: str) -> transports.Way:
    """Raises ModuleNotFoundError or FailedPreconditionError if the device cannot be used."""
    if device == "cpu":
        return transports.NativeWay()
    from kvservice.bench.cuda_lane import CudaNativeWay

    return CudaNativeWay({size: transports.tokens_of(size) for size in transports.SIZES})


def run(quick: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Return `<call>_<unary|stream>_<p50_s|p99_s|per_s>`, and the results of `transports.run` and `run_observers`."""
    native = open_native(device)  # first, because it reports missing packages or devices
    with Daemon(**POOL, device=device) as daemon:
        results = uvloop.run(measure(daemon.address, ROUNDS_QUICK if quick else ROUNDS))
    return results | {"transports": transports.run(native, device, quick), "observers": run_observers(quick)}


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
    render_observers(results["observers"], console)


if __name__ == "__main__":
    uvloop.run(watch_daemon(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "1", sys.argv[4]))
