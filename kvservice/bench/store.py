"""Cost of the block store: copies of blocks by every way, against memcpy of the same bytes, and calls in stream echoes.

A daemon and one client on a unix socket. All ways, memcpy and the peers take turns, so that a slow machine affects all
of them. A put stores blocks that are missing, in memory that was used before; a get copies them to the caller's array.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console

from kvservice.bench.harness import medians, seconds_of, table, take_turns
from kvservice.bench.peer_process import BlockBatch, BlockWay, PeerMissingError
from kvservice.bench.store_peers import PEERS
from kvservice.client import KVClient, PutStatus, Store, StoreNamespace
from kvservice.client.threads import finish
from kvservice.launch import Daemon
from kvservice.v1 import pool_pb2

SIZES = {"2m": 2 << 20, "256k": 256 << 10, "32k": 32 << 10}
# Bytes of the blocks of one put or get.
BATCH_BYTES, BATCH_BYTES_QUICK = 64 << 20, 4 << 20
ROUNDS, ROUNDS_QUICK = 15, 1
ROUNDS_OF_CALLS, ROUNDS_OF_CALLS_QUICK = 200, 3
TRANSPORTS = ("mapped", "region", "inline")
LABELS = {"memcpy": "memcpy", "mapped": "mapped", "region": "region", "inline": "inline"}
COUNTS = (32, 2048)
CALLS = {"lookup": "lookup", "acquire": "acquire, release", "reserve": "reserve, abort"}
SMALL_BLOCK = 64
OPTIONS: dict[str, Any] = {
    "num_layers": 1,
    "num_kv_heads": 1,
    "head_size": 32,
    "num_blocks": 64,
    "swap_space_gib": 0.0,
    "store_gib": 1.0,
    "share_store": "write",
    "max_region_mib": 512,
}


class MemcpyWay:
    """The same bytes copied in this process, to and from a memory file like the store's."""

    def __init__(self, batch: BlockBatch) -> None:
        self.batch = batch
        self._memory = np.frombuffer(mmap.mmap(-1, batch.values.nbytes), np.uint8).reshape(batch.values.shape)

    def put(self) -> None:
        np.copyto(self._memory, self.batch.values)

    def get(self) -> None:
        np.copyto(self.batch.out, self._memory)

    def empty(self) -> None:
        """Nothing has to be removed."""


class StoreWay:
    """A store's transport. Values of the region transport lie in a region."""

    def __init__(self, store: Store, batch: BlockBatch) -> None:
        self.store, self.batch = store, batch
        self._values = batch.values
        if store.transport == "region":
            self._values = store.create_region(batch.values.nbytes).array(batch.values.shape, "uint8")
            self._values[...] = batch.values

    def put(self) -> None:
        statuses = self.store.put(self.batch.keys, self._values)
        assert (statuses == PutStatus.DONE).all(), "there is room, and they are missing"

    def get(self) -> None:
        assert self.store.get(self.batch.keys, self.batch.out).all(), "they were put"

    def empty(self) -> None:
        self.store.clear()


@contextlib.contextmanager
def ways(client: KVClient, block_bytes: int, num_bytes: int) -> Iterator[tuple[dict[str, BlockWay], dict[str, str]]]:
    """Yield the ways by name, each with blocks of its own, and the reasons why peers are missing."""
    opened: dict[str, BlockWay] = {"memcpy": MemcpyWay(BlockBatch(block_bytes, num_bytes))}
    missing = {}
    with contextlib.ExitStack() as cleanup:
        for name in TRANSPORTS:
            namespace = StoreNamespace("bench", block_bytes, layout=name)
            store = cleanup.enter_context(client.store(namespace, transport=name))
            opened[name] = StoreWay(store, BlockBatch(block_bytes, num_bytes))
        for name, peer in PEERS.items():
            try:
                opened[name] = cleanup.enter_context(peer(BlockBatch(block_bytes, num_bytes)))
            except PeerMissingError as error:
                missing[name] = str(error)
        yield opened, missing


def timed(call: Callable[[], object], before: Callable[[], object]) -> float:
    before()
    return seconds_of(call)


def measure_copies(client: KVClient, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Return `<way>_<put|get>_<size>_s`, and in `missing` the reasons why peers were not measured."""
    results: dict[str, Any] = {"missing": {}}
    for size, block_bytes in SIZES.items():
        with ways(client, block_bytes, num_bytes) as (opened, missing):
            results["missing"] |= missing
            contenders = {}
            for name, way in opened.items():
                contenders[f"{name}_put_{size}_s"] = functools.partial(timed, way.put, way.empty)
                contenders[f"{name}_get_{size}_s"] = functools.partial(seconds_of, way.get)
            results |= medians(take_turns(contenders, rounds, warm_ups=1))
            for way in opened.values():
                way.empty()
    return results


def measure_calls(client: KVClient, rounds: int) -> dict[str, float]:
    """Return `echo_s`, and `<call>_<count>_s` for calls of this many keys."""
    rng = np.random.default_rng(0)
    with client.store(StoreNamespace("bench", SMALL_BLOCK), transport="mapped") as store:
        contenders: dict[str, Callable[[], float]] = {"echo_s": functools.partial(seconds_of, echo_of(store))}
        for count in COUNTS:
            there, missing = rng.bytes(32 * count), rng.bytes(32 * count)
            store.put(there, np.zeros((count, SMALL_BLOCK), np.uint8))
            for name, call in calls_of(store, there, missing).items():
                contenders[f"{name}_{count}_s"] = functools.partial(seconds_of, call)
        return medians(take_turns(contenders, rounds, warm_ups=3))


def echo_of(store: Store) -> Callable[[], object]:
    """Return a call of 100 bytes on the store's own stream."""
    link = store._core._access.link
    assert link is not None, "the daemon is there"
    request = pool_pb2.PingRequest(payload=bytes(100))
    return lambda: finish(link.connection.call("ping", request))


def calls_of(store: Store, there: bytes, missing: bytes) -> dict[str, Callable[[], object]]:
    return {
        "lookup": lambda: store.lookup(there),
        "acquire": lambda: store.acquire(there).release(),
        "reserve": lambda: store.reserve(missing).abort(),
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Return the results of `measure_copies` and `measure_calls`, and `batch_bytes`."""
    num_bytes = BATCH_BYTES_QUICK if quick else BATCH_BYTES
    with Daemon(**OPTIONS) as daemon, KVClient(daemon.address) as client:
        results = measure_copies(client, num_bytes, ROUNDS_QUICK if quick else ROUNDS)
        calls = measure_calls(client, ROUNDS_OF_CALLS_QUICK if quick else ROUNDS_OF_CALLS)
    return {"batch_bytes": num_bytes} | results | calls


def render(results: dict[str, Any], console: Console) -> None:
    labels = LABELS | {name: name for name in PEERS if name not in results["missing"]}
    rows = table("Blocks, GB/s; in brackets: in units of memcpy", ("block", "way"), ("put", "get"))
    for size in SIZES:
        rows.add_section()
        for way, label in labels.items():
            rows.add_row(
                f"{size.upper()}iB", label, *(_rate(results, way, f"{call}_{size}_s") for call in ("put", "get"))
            )
    console.print(rows)
    for name, why in results["missing"].items():
        console.print(f"{name}: not measured. {why}")
    rows = table("Calls, µs; in brackets: in units of an echo on the stream", ("call",), [f"{n} keys" for n in COUNTS])
    rows.add_row("echo", _us(results, "echo_s"), "")
    for call, label in CALLS.items():
        rows.add_row(label, *(_us(results, f"{call}_{count}_s") for count in COUNTS))
    console.print(rows)


def _rate(results: dict[str, Any], way: str, figure: str) -> str:
    seconds, memcpy = results[f"{way}_{figure}"], results[f"memcpy_{figure}"]
    return f"{results['batch_bytes'] / seconds / 1e9:.2f} ({memcpy / seconds:.2f})"


def _us(results: dict[str, Any], name: str) -> str:
    return f"{results[name] * 1e6:.0f} ({results[name] / results['echo_s']:.2f})"
