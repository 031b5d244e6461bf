"""Cost of a layer with each transport of its tensors to the daemon, and of the same work in this process.

A step has 32 layers over short contexts, with one kernel thread on each side, so that the transport dominates. All
transports take turns, with one step each, so that a slow machine affects all of them. The client measures the times.
Tensors are in host memory, in a region if the transport can use one; those of the native call are in the pool's memory.
"""

from __future__ import annotations

import contextlib
import mmap
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import grpc
import numpy as np
from rich.console import Console

from kvservice import ops
from kvservice.bench import normal, quantiles, seconds_of, table
from kvservice.client import KVClient, SharedRegion, Step
from kvservice.client.channel import CHANNEL_OPTIONS
from kvservice.client.threads import finish
from kvservice.errors import FailedPreconditionError
from kvservice.launch import Daemon
from kvservice.pool.layout import DTYPES
from kvservice.v1 import attention_pb2, attention_pb2_grpc, pool_pb2
from kvservice.wire.tensors import put_tensor, to_array

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 2, 28, 128, 16
# Bytes of query, key and value of one token, bfloat16.
TOKEN_BYTES = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE * 2
# All sequences of a batch share one block. Each token is the first in a private block of its sequence.
CONTEXT = BLOCK_SIZE
SIZES = {"16k": 16 << 10, "256k": 256 << 10, "2m": 2 << 20}
# Large steps take part in each of so many rounds only.
SELDOM = {"256k": 2, "2m": 5}
TRANSPORTS = ("inline", "region", "lane", "mapped")
LABELS = {
    "native": "native call",
    "unary": "inline, unary",
    "inline": "inline, stream",
    "region": "region, stream",
    "lane": "lane",
    "mapped": "mapped pool",
}
PROBES = {"echo_unary": "echo, unary", "echo_stream": "echo, stream", "ring": "ring"}
POOL: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "bfloat16",
    "block_size": BLOCK_SIZE,
    "num_blocks": 320,
    "swap_space_gib": 0.0,
    "num_threads": 1,
    "share_pool": "write",
}


def context_kv() -> Any:
    """Return the keys and values of the common prefix of all sequences."""
    return normal(NUM_LAYERS, CONTEXT, NUM_KV_HEADS, HEAD_SIZE)


def tokens_of(size: str) -> int:
    return SIZES[size] // TOKEN_BYTES


class Way(Protocol):
    def step(self, size: str) -> list[float]:
        """Return the seconds of each layer of one step, whose query, key and value have `size` bytes."""


class Tensors:
    """Query, key, value and output of a layer; one after the other in `memory`, if there is any."""

    def __init__(self, num_tokens: int, memory: SharedRegion | None = None) -> None:
        self.num_tokens = num_tokens
        arrays, offset = [], 0
        for num_heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS, NUM_HEADS):
            shape = (num_tokens, num_heads, HEAD_SIZE)
            array = np.empty(shape, DTYPES["bfloat16"]) if memory is None else memory.array(shape, "bfloat16", offset)
            array[...] = normal(*shape)
            arrays.append(array)
            offset += array.nbytes
        self.query, self.key, self.value, self.out = arrays


class NativeWay:
    """The work of a layer in this process: write keys and values, and attend over a pool like the daemon's."""

    def __init__(self) -> None:
        self.tensors = {size: Tensors(tokens_of(size)) for size in SIZES}
        num_blocks = 1 + max(tensors.num_tokens for tensors in self.tensors.values())
        # A memory file like the daemon's pool, because large pages would change the result.
        memory = mmap.mmap(-1, num_blocks * NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_SIZE * BLOCK_SIZE * 2)
        shape = (num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, HEAD_SIZE * BLOCK_SIZE)
        self._pool: Any = np.ndarray(shape, DTYPES["bfloat16"], memory)
        for layer, kv in enumerate(context_kv()):
            ops.write_kv(self._pool, layer, np.arange(CONTEXT), kv, kv)

    def step(self, size: str) -> list[float]:
        tensors = self.tensors[size]
        slots, query_lens, tables, context_lens = native_tables(tensors.num_tokens)

        def layer(number: int) -> None:
            ops.write_kv(self._pool, number, slots, tensors.key, tensors.value)
            ops.attention(self._pool, number, tensors.query, query_lens, tables, context_lens, out=tensors.out)

        return [seconds_of(partial(layer, number)) for number in range(NUM_LAYERS)]


def native_tables(num_seqs: int) -> tuple[Any, Any, Any, Any]:
    """Return slot mapping, query lengths, block tables and context lengths of a step. All sequences share block 0."""
    own = np.arange(1, num_seqs + 1)
    tables = np.stack([np.zeros_like(own), own], 1).astype(np.int32)
    return own * BLOCK_SIZE, np.ones(num_seqs, np.int32), tables, np.full(num_seqs, CONTEXT + 1, np.int32)


class ClientWay:
    """A layer by a session's transport. Raises the errors of `KVClient.session`."""

    def __init__(self, address: str, transport: str, cleanup: contextlib.ExitStack) -> None:
        self.client = cleanup.enter_context(KVClient(address, transport=transport))
        self.session = cleanup.enter_context(self.client.session("bench"))
        self.tensors = {size: self._make_tensors(tokens_of(size)) for size in SIZES}
        self._parent = self.session.allocate(random.choices(range(50_000), k=CONTEXT))
        self.session.open_step([self._parent]).write(context_kv(), context_kv())

    def _make_tensors(self, num_tokens: int) -> Tensors:
        regions = self.session.transport in ("region", "lane")
        return Tensors(num_tokens, self.session.create_region(2 * num_tokens * TOKEN_BYTES) if regions else None)

    def step(self, size: str) -> list[float]:
        tensors = self.tensors[size]
        sequences = self.session.fork_batch([self._parent] * tensors.num_tokens)
        step = self.session.append(sequences, [7] * tensors.num_tokens)
        seconds = [seconds_of(partial(self._attend, step, layer, tensors)) for layer in range(NUM_LAYERS)]
        self.session.free(sequences)
        return seconds

    def _attend(self, step: Step, layer: int, tensors: Tensors) -> None:
        step.decode(layer, tensors.query, tensors.key, tensors.value, out=tensors.out)


class UnaryWay(ClientWay):
    """A layer by a unary RPC, which the client never uses."""

    def __init__(self, address: str, cleanup: contextlib.ExitStack) -> None:
        super().__init__(address, "inline", cleanup)
        channel = cleanup.enter_context(grpc.insecure_channel(address, CHANNEL_OPTIONS))
        self._stub = attention_pb2_grpc.AttentionServiceStub(channel)  # type: ignore[no-untyped-call]

    def _attend(self, step: Step, layer: int, tensors: Tensors) -> None:
        request = attention_pb2.AttendRequest(session_token=self.session.token, step_id=step.step_id, layer=layer)
        put_tensor(tensors.query, request.query)
        put_tensor(tensors.key, request.key)
        put_tensor(tensors.value, request.value)
        np.copyto(tensors.out, to_array(self._stub.Decode(request).output, "output"))


def open_ways(address: str, native: Way, cleanup: contextlib.ExitStack) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the available transports by name, and the reasons why others are missing."""
    unary = UnaryWay(address, cleanup)
    ways: dict[str, Way] = {"native": native, "unary": unary}
    refused = {}
    for name in TRANSPORTS:
        if name == "mapped" and unary.session.info.device != "cpu":
            refused[name] = "With the pool of a GPU it takes tensors that are there too: see kvservice bench lane."
            continue
        try:
            ways[name] = ClientWay(address, name, cleanup)
        except FailedPreconditionError as error:
            refused[name] = str(error)
    return ways, refused


def probes(ways: dict[str, Way]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls without work, by client and transport: the minimum of a round trip."""
    inline = ways["inline"]
    assert isinstance(inline, ClientWay), "the daemon refuses it to nobody"
    payload = bytes(100)
    request = pool_pb2.PingRequest(payload=payload)
    yield "echo_unary", lambda: inline.client.ping(payload)
    yield "echo_stream", lambda: finish(inline.session._core.context.connection.call("ping", request))
    if isinstance(way := ways.get("lane"), ClientWay):
        lane = way.session._core.calls.transport._lane  # type: ignore[attr-defined]

        def ring() -> None:
            """Send a call of an unknown step, which is refused immediately."""
            number = lane.submit(1 << 40, 0, True, NUM_HEADS, (0, 0), (0, 0), (0, 0), (0, 0), None)
            assert lane.wait(number, 10.0)[0] == "UNKNOWN_STEP"

        yield "ring", ring


def measure(address: str, native: Way, rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds of each call by transport, and the reasons of missing transports."""
    samples: dict[str, list[float]] = {}
    with contextlib.ExitStack() as cleanup:
        ways, refused = open_ways(address, native, cleanup)
        for number in range(rounds):
            for name, call in probes(ways):
                call()
                samples.setdefault(name, []).extend(seconds_of(call) for _ in range(NUM_LAYERS))
            for size in SIZES:
                if number % SELDOM.get(size, 1):
                    continue
                for name, way in ways.items():
                    way.step(size)  # wakes up sleeping threads
                    samples.setdefault(f"{name}_{size}", []).extend(way.step(size))
    return samples, refused


def run(native: Way, device: str, quick: bool) -> dict[str, Any]:
    """Return `<way>_<size>_<p50_s|p99_s>`, for calls without work `<echo_unary|echo_stream|ring>_<p50_s|p99_s>`, and in
    `refused` the reasons for missing transports."""
    threads = ops.num_threads()
    ops.set_num_threads(1)
    try:
        with Daemon(**POOL, device=device) as daemon:
            samples, refused = measure(daemon.address, native, 1 if quick else 10)
    finally:
        ops.set_num_threads(threads)
    results: dict[str, Any] = {"refused": refused}
    for name, seconds in samples.items():
        results |= quantiles(name, seconds)
    return results


def render(results: dict[str, Any], console: Console) -> None:
    title = "A layer of a decode step, µs; in brackets: in units of the native call"
    rows = table(title, ("tensors", "way"), ("p50", "p99", "over native", "in stream echoes"))
    for name, label in PROBES.items():
        if f"{name}_p50_s" in results:
            rows.add_row("none", label, *_cells(results, name, None))
    for size in SIZES:
        rows.add_section()
        for way, label in LABELS.items():
            if way not in results["refused"]:
                rows.add_row(f"{size.upper()}iB", label, *_cells(results, f"{way}_{size}", f"native_{size}"))
    console.print(rows)
    for way, why in results["refused"].items():
        console.print(f"{LABELS[way]}: not measured. {why}")


def _cells(results: dict[str, Any], name: str, native: str | None) -> tuple[str, str, str, str]:
    p50, p99 = results[f"{name}_p50_s"], results[f"{name}_p99_s"]
    echoes = f"{p50 / results['echo_stream_p50_s']:.2f}"
    if native is None:
        return _us(p50), _us(p99), "", echoes
    base = results[f"{native}_p50_s"]
    return f"{_us(p50)} ({p50 / base:.2f})", _us(p99), "" if name == native else _us(p50 - base), echoes


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.{0 if seconds >= 1e-4 else 1}f}"
