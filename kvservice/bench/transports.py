"""What a layer costs by each way that its tensors can take to the daemon, beside the same work in this process.

A step has 32 layers over short contexts, one kernel thread on each side, so that it is the way that is measured.
Tensors lie in a region where the way can use one. Figures are those of the client, in one run with the echoes.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvservice import ops
from kvservice.client import KVClient, Sequence, Session
from kvservice.client.blocking import finish
from kvservice.launch import Daemon
from kvservice.pool.layout import DTYPES
from kvservice.v1 import attention_pb2, attention_pb2_grpc, pool_pb2
from kvservice.wire.tensors import put_tensor, to_array

NUM_LAYERS, NUM_KV_HEADS, NUM_HEADS, HEAD_SIZE, BLOCK_SIZE = 32, 2, 28, 128, 16
TOKEN_BYTES = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE * 2
CONTEXT = 16
SIZES = {"16k": 16 << 10, "256k": 256 << 10, "2m": 2 << 20}
TRANSPORTS = ("inline", "region", "lane", "mapped")
POOL: dict[str, Any] = {
    "num_layers": NUM_LAYERS,
    "num_kv_heads": NUM_KV_HEADS,
    "head_size": HEAD_SIZE,
    "dtype": "bfloat16",
    "block_size": BLOCK_SIZE,
    "num_blocks": 1024,
    "swap_space_gib": 0.0,
    "num_threads": 1,
    "allow_client_shm": True,
    "share_pool": "write",
}
HEADS = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32).astype(DTYPES["bfloat16"])


class Tensors:
    """Query, key, value and output of a layer of `num_tokens` tokens; in a region where the session can have one."""

    def __init__(self, session: Session | None, num_tokens: int) -> None:
        shapes = [(num_tokens, heads, HEAD_SIZE) for heads in HEADS]
        self.inputs = [normal(*shape) for shape in shapes]
        self.out: Any = None
        if session is not None and session.transport in ("lane", "region"):
            memory = session.create_region(4 * num_tokens * TOKEN_BYTES)
            places = itertools.count(0, num_tokens * TOKEN_BYTES)
            arrays = [memory.array(shape, "bfloat16", next(places)) for shape in [*shapes, shapes[0]]]
            for array, values in zip(arrays, self.inputs, strict=False):
                array[...] = values
            *self.inputs, self.out = arrays


def batch(session: Session, num_seqs: int) -> list[Sequence]:
    """Computed sequences of CONTEXT tokens, all forks of one."""
    parent = session.allocate(random.choices(range(50_000), k=CONTEXT))
    kv = normal(NUM_LAYERS, CONTEXT, NUM_KV_HEADS, HEAD_SIZE)
    session.open_step([parent]).write(kv, kv)
    return session.fork_batch([parent] * num_seqs)


def steps(session: Session, sequences: list[Sequence], rounds: int) -> Iterator[Any]:
    """A decode step for each round, each over CONTEXT + 1 tokens."""
    for _ in range(rounds):
        yield session.append(sequences, [7] * len(sequences))
        for sequence in sequences:
            session.truncate(sequence, CONTEXT)


def through_client(session: Session, num_bytes: int, rounds: int) -> list[float]:
    """Seconds of each layer."""
    tensors = Tensors(session, num_bytes // TOKEN_BYTES)
    sequences = batch(session, num_bytes // TOKEN_BYTES)
    seconds = []
    for step in steps(session, sequences, rounds):
        for layer in range(NUM_LAYERS):
            start = time.perf_counter()
            step.decode(layer, *tensors.inputs, out=tensors.out)
            seconds.append(time.perf_counter() - start)
    session.free(sequences)
    session.unregister_region()
    return seconds


def unary(client: KVClient, session: Session, num_bytes: int, rounds: int) -> list[float]:
    """The same with a unary RPC for each layer."""
    stub = attention_pb2_grpc.AttentionServiceStub(client._channel)  # type: ignore[no-untyped-call]
    tensors = Tensors(None, num_bytes // TOKEN_BYTES)
    sequences = batch(session, num_bytes // TOKEN_BYTES)
    seconds = []
    for step in steps(session, sequences, rounds):
        for layer in range(NUM_LAYERS):
            start = time.perf_counter()
            request = attention_pb2.AttendRequest(session_token=session.token, step_id=step.step_id, layer=layer)
            for name, array in zip(("query", "key", "value"), tensors.inputs, strict=True):
                put_tensor(array, getattr(request, name))
            to_array(stub.Decode(request).output, "output").copy()
            seconds.append(time.perf_counter() - start)
    session.free(sequences)
    return seconds


def native(num_bytes: int, rounds: int) -> list[float]:
    """The same work in this process: keys and values written, attention over the pool."""
    num_seqs = num_bytes // TOKEN_BYTES
    tensors = Tensors(None, num_seqs)
    query, key, value = tensors.inputs
    pool = normal(2 * num_seqs, NUM_LAYERS, 2, NUM_KV_HEADS, HEAD_SIZE * BLOCK_SIZE)
    tables = np.random.default_rng(1).permutation(2 * num_seqs).astype(np.int32).reshape(num_seqs, 2)
    slots = tables[:, 1].astype(np.int64) * BLOCK_SIZE
    query_lens, context_lens = np.ones(num_seqs, np.int32), np.full(num_seqs, CONTEXT + 1, np.int32)
    out = np.empty_like(query)
    seconds = []
    for _ in range(rounds):
        for layer in range(NUM_LAYERS):
            start = time.perf_counter()
            ops.write_kv(pool, layer, slots, key, value)
            ops.attention(pool, layer, query, query_lens, tables, context_lens, out=out)
            seconds.append(time.perf_counter() - start)
    return seconds


def timed(call: Callable[[], object], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def echoes(client: KVClient, session: Session, count: int) -> Iterator[tuple[str, list[float]]]:
    payload = bytes(100)
    yield "echo_unary", timed(lambda: client.ping(payload), count)
    request = pool_pb2.PingRequest(payload=payload)
    yield "echo_stream", timed(lambda: finish(session._core.call("ping", request)), count)


def ring(client: KVClient, count: int) -> list[float]:
    """A call that a lane answers without work: of a step that there is not."""
    with client.session() as session:
        lane = session._core.attending._lane  # type: ignore[attr-defined]

        def call() -> None:
            number = lane.submit(1 << 40, 0, True, NUM_HEADS, (0, 0), (0, 0), (0, 0), (0, 0), None)
            assert lane.wait(number, 10.0)[0] == "UNKNOWN_STEP"

        return timed(call, count)


def measure(address: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, by what was called."""
    samples: dict[str, list[float]] = {}
    clients = {name: KVClient(address, transport=name) for name in TRANSPORTS}
    try:
        samples["ring"] = ring(clients["lane"], 50 * rounds)
        for size, num_bytes in SIZES.items():
            # Few rounds of each, many times, so that a machine that slows down slows all.
            for _ in range(rounds):
                with clients["inline"].session() as session:
                    for name, seconds in echoes(clients["inline"], session, NUM_LAYERS):
                        samples.setdefault(name, []).extend(seconds)
                    ways = {"unary": unary(clients["inline"], session, num_bytes, 1)}
                ways["native"] = native(num_bytes, 1)
                for name, client in clients.items():
                    with client.session() as session:
                        ways[name] = through_client(session, num_bytes, 2)[NUM_LAYERS:]
                for name, seconds in ways.items():
                    samples.setdefault(f"{name}_{size}", []).extend(seconds)
    finally:
        for client in clients.values():
            client.close()
    return samples


def run(quick: bool = False) -> dict[str, float]:
    """Keys are `<way>_<size>_<p50_s|p99_s>`, and `ring`, `echo_unary` and `echo_stream` instead of way and size."""
    threads = ops.num_threads()
    ops.set_num_threads(1)
    try:
        with Daemon(**POOL) as daemon:
            samples = measure(daemon.address, 2 if quick else 20)
    finally:
        ops.set_num_threads(threads)
    results = {}
    for name, seconds in samples.items():
        results[f"{name}_p50_s"] = statistics.median(seconds)
        results[f"{name}_p99_s"] = statistics.quantiles(seconds, n=100)[98]
    return results


def render(results: dict[str, float], console: Console) -> None:
    table = Table(title="One layer of a decode step, µs: p50, p99; p50 over the work alone", title_justify="left")
    table.add_column("way")
    for size in SIZES:
        table.add_column(f"{size.upper()}iB of tensors", justify="right")
    for way in ("native", "unary", *TRANSPORTS):
        cells = []
        for size in SIZES:
            p50, p99 = results[f"{way}_{size}_p50_s"] * 1e6, results[f"{way}_{size}_p99_s"] * 1e6
            cells.append(f"{p50:.0f}, {p99:.0f}; +{p50 - results[f'native_{size}_p50_s'] * 1e6:.0f}")
        table.add_row(way, *cells)
    console.print(table)
    for name in ("echo_unary", "echo_stream", "ring"):
        p50, p99 = results[f"{name}_p50_s"] * 1e6, results[f"{name}_p99_s"] * 1e6
        console.print(f"{name}: {p50:.1f} µs, p99 {p99:.1f}")
