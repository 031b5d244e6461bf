"""What a call costs: every call against a real daemon on a unix socket, as unary RPC and on a session's stream.

Figures are those of the client: building the request, the way there and back, taking the answer apart. They mean
something in units of the echo of the same run. Attention is over short contexts here, so that it is the way that is
measured; `kvservice bench attention` measures the kernels. The ways that a layer's tensors can take are measured
beside each other in `transports.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from kvservice.environment import prepare_grpc

prepare_grpc()

import grpc  # noqa: E402  the environment comes first

from kvservice.bench import transports  # noqa: E402
from kvservice.client.channel import CHANNEL_OPTIONS, make_call, take_reply  # noqa: E402
from kvservice.launch import Daemon  # noqa: E402
from kvservice.pool.layout import DTYPES  # noqa: E402
from kvservice.v1 import (  # noqa: E402
    attention_pb2,
    attention_pb2_grpc,
    blocks_pb2,
    blocks_pb2_grpc,
    pool_pb2,
    pool_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)
from kvservice.wire.tensors import put_tensor, to_array  # noqa: E402

IN_FLIGHT = 32
NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE = 4, 2, 28, 128
# Query, key and value of one token, bfloat16.
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

# A call that is ready to be built: the field of `Call`, and what makes the request.
Request = tuple[str, Callable[[], Any]]


class Api:
    """A session's two ways to the daemon."""

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

    async def write(self, name: str, request: Any) -> None:
        await self.stream.write(make_call(next(self._call_ids), name, request))

    async def read(self) -> Any:
        return take_reply(await self.stream.read())

    async def call(self, name: str, request: Any) -> Any:
        await self.write(name, request)
        return await self.read()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Api]:
    async with grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        sessions = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
        opened = await sessions.Open(session_pb2.OpenRequest(name="bench"))
        stream = sessions.Connect()
        api = Api(channel, opened.session_token, stream)
        await api.call("attach", session_pb2.AttachRequest(session_token=opened.session_token))
        yield api
        await sessions.Close(session_pb2.CloseRequest(session_token=opened.session_token))


class Workload:
    """A kind of call. `begin` and `end` stand around a round of IN_FLIGHT calls, which are independent, and are not
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
    """Workloads that make new sequences and free them."""

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
        # The first token is new in every prompt: no prefix is known.
        prompts = [(i, [i & 0x7FFFFFFF, *random.choices(range(50_000), k=LONG_CONTEXT - 1)]) for i in self._new_ids()]
        return [("allocate", partial(self._request, i, prompt)) for i, prompt in prompts]

    @staticmethod
    def _request(sequence_id: int, prompt: list[int]) -> Any:
        sequence = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=prompt)
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
        # Any id that no fork has used.
        return blocks_pb2.FreeRequest(request_id=sequence_id << 1, sequence_ids=[sequence_id])

    async def end(self) -> None:
        pass


class Groups(Workload):
    """Workloads over running batches: `num_groups` batches of `size` sequences, all forks of one."""

    def __init__(self, api: Api, num_groups: int, size: int, length: int) -> None:
        super().__init__(api)
        self._length = length
        self.groups = [list(itertools.islice(Sequences.ids, size)) for _ in range(num_groups)]

    async def prepare(self) -> None:
        parent = await new_sequence(self.api, self._length)
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


class DecodeIds(Groups):
    """A decode call that names step and layer and brings nothing: the bookkeeping of a call without its bytes."""

    async def begin(self) -> list[Request]:
        step = await self.api.call("append", self.append_request(self.groups[0]))
        request = attention_pb2.AttendRequest(step_id=step.step_id, layer=1, validate_only=True)
        return [("decode", lambda: request)] * IN_FLIGHT


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


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(DTYPES["bfloat16"])


async def new_sequence(api: Api, length: int) -> int:
    """A computed sequence."""
    sequence_id = next(Sequences.ids)
    prompt = random.choices(range(50_000), k=length)
    await api.call("allocate", Allocate._request(sequence_id, prompt))
    step = await api.call("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
    request = attention_pb2.WriteRequest(step_id=step.step_id)
    kv = normal(NUM_LAYERS, length, NUM_KV_HEADS, HEAD_SIZE)
    put_tensor(kv, request.key)
    put_tensor(kv, request.value)
    await api.call("write", request)
    return sequence_id


def take(response: Any) -> None:
    """What a client does with an answer: its tensor's bytes become its own array."""
    if isinstance(response, attention_pb2.AttendResponse) and response.HasField("output"):
        to_array(response.output, "output").copy()


async def latencies(workload: Workload, call: Callable[[str, Any], Awaitable[Any]], rounds: int) -> list[float]:
    """Seconds of each call, one in flight."""
    seconds = []
    for _ in range(rounds):
        for name, build in await workload.begin():
            start = time.perf_counter()
            take(await call(name, build()))
            seconds.append(time.perf_counter() - start)
        await workload.end()
    return seconds


async def unary_rate(workload: Workload, rounds: int) -> float:
    """Calls per second, IN_FLIGHT at a time."""

    async def one(name: str, build: Callable[[], Any]) -> None:
        take(await workload.api.unary(name, build()))

    return await _rate(workload, rounds, lambda calls: asyncio.gather(*(one(*call) for call in calls)))


async def stream_rate(workload: Workload, rounds: int) -> float:
    async def write(calls: list[Request]) -> None:
        for name, build in calls:
            await workload.api.write(name, build())

    async def read(count: int) -> None:
        for _ in range(count):
            take(await workload.api.read())

    return await _rate(workload, rounds, lambda calls: asyncio.gather(write(calls), read(len(calls))))


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
        "append_64": Append(api, IN_FLIGHT, 64, LONG_CONTEXT),
        "decode_ids": DecodeIds(api, 1, 64, LONG_CONTEXT),
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
                # The echo beside each call, so that a machine that slows down slows both.
                echoes[way] += await latencies(echo, call, max(1, rounds // 4))
                seconds = await latencies(workload, call, rounds)
                rate = unary_rate if way == "unary" else stream_rate
                results[f"{name}_{way}_p50_s"] = statistics.median(seconds)
                results[f"{name}_{way}_p99_s"] = statistics.quantiles(seconds, n=100)[98]
                results[f"{name}_{way}_per_s"] = await rate(workload, max(1, rounds // 2))
        for way, samples in echoes.items():
            results[f"echo_{way}_p50_s"] = statistics.median(samples)
            results[f"echo_{way}_p99_s"] = statistics.quantiles(samples, n=100)[98]
        results["echo_unary_per_s"] = await unary_rate(echo, rounds)
        results["echo_stream_per_s"] = await stream_rate(echo, rounds)
    return results


def open_native(device: str) -> transports.Way:
    """Raises ModuleNotFoundError, or FailedPreconditionError, where it cannot be had."""
    if device == "cpu":
        return transports.NativeWay()
    from kvservice.bench.cuda_native import CudaNativeWay

    return CudaNativeWay({size: transports.tokens_of(size) for size in transports.SIZES})


def run(quick: bool = False, device: str = "cpu") -> dict[str, Any]:
    """All keys are `<call>_<unary|stream>_<p50_s|p99_s|per_s>`, but for `transports`: see `transports.run`."""
    native = open_native(device)  # first, for it says what is missing
    with Daemon(**POOL, device=device) as daemon:
        results = uvloop.run(measure(daemon.address, 3 if quick else 40))
    return results | {"transports": transports.run(native, device, quick)}


def render(results: dict[str, Any], console: Console) -> None:
    table = Table(title="RPC latency in µs; in brackets: in units of the echo of the same way", title_justify="left")
    for heading in ("call", "unary p50", "p99", f"per s, {IN_FLIGHT} in flight", "stream p50", "p99", "per s"):
        table.add_column(heading, justify="left" if heading == "call" else "right")
    names = dict.fromkeys(key.rsplit("_", 3)[0] for key in results if key.endswith("p50_s"))
    for name in sorted(names, key=lambda name: name != "echo"):
        cells = []
        for way in ("unary", "stream"):
            p50, p99 = results[f"{name}_{way}_p50_s"], results[f"{name}_{way}_p99_s"]
            ratio = p50 / results[f"echo_{way}_p50_s"]
            cells += [f"{p50 * 1e6:.0f} ({ratio:.2f})", f"{p99 * 1e6:.0f}", f"{results[f'{name}_{way}_per_s']:.0f}"]
        table.add_row(name, *cells)
    console.print(table)
    transports.render(results["transports"], console)
