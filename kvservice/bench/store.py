"""Cost of the block store: copies of blocks by every way, against memcpy of the same bytes, and calls in stream echoes.

A daemon and one client on a unix socket. All ways, memcpy and the peers take turns, so that a slow machine affects all
of them. A put stores blocks that are missing, in memory that was used before; a get copies them to the caller's array.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import mmap
import os
import queue
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import numpy as np
import uvloop
from rich.console import Console

from kvservice.bench import Array, PeerMissingError, connect, free_port, medians, running, seconds_of, table, take_turns
from kvservice.client import KVClient, PutStatus, Store, StoreNamespace
from kvservice.client.channel import CHANNEL_OPTIONS
from kvservice.client.store.link import MESSAGE_BYTES
from kvservice.client.threads import finish
from kvservice.environment import GRPC_ENVIRONMENT, MALLOC_ENVIRONMENT
from kvservice.launch import Daemon
from kvservice.owned import OwnedFolder
from kvservice.v1 import pool_pb2

# ---- the blocks, and what moves them


class BlockBatch:
    """Blocks of random bytes, their keys, and an array for the blocks that are read."""

    def __init__(self, block_bytes: int, num_bytes: int) -> None:
        count = max(1, num_bytes // block_bytes)
        rng = np.random.default_rng(block_bytes)
        self.keys = [rng.bytes(32) for _ in range(count)]
        self.values = rng.integers(0, 256, (count, block_bytes), np.uint8)
        self.out = np.zeros_like(self.values)


class BlockWay(Protocol):
    """A way by which the blocks of a batch are put and got."""

    batch: BlockBatch

    def put(self) -> object:
        """Store the blocks, which are missing."""

    def get(self) -> object:
        """Copy the blocks to `batch.out`."""

    def empty(self) -> object:
        """Remove the blocks. This is not timed."""


# ---- a store of nothing but messages: the least that messages over gRPC for Python can take
#
# Each message has as many blocks as the client of the block store puts into one, and is answered before the next is
# sent. The server: `python -m kvservice.bench.store ADDRESS`.

PATH: Final = "/bare/Exchange"


class GrpcPeer:
    """Sends the blocks in messages and receives them in others."""

    def __init__(self, channel: Any, batch: BlockBatch) -> None:
        self.batch = batch
        self._step = max(1, MESSAGE_BYTES // batch.values.shape[1])
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._replies: Any = channel.stream_stream(PATH)(iter(self._requests.get, None))

    def _exchange(self, message: bytes) -> bytes:
        self._requests.put(message)
        reply: bytes = next(self._replies)
        return reply

    def put(self) -> None:
        for first in range(0, len(self.batch.values), self._step):
            self._exchange(self.batch.values[first : first + self._step].tobytes())

    def get(self) -> None:
        for first in range(0, len(self.batch.out), self._step):
            part = self.batch.out[first : first + self._step]
            part.reshape(-1).data[:] = self._exchange(b"get")

    def empty(self) -> None:
        self._exchange(b"clear")

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)


@contextlib.contextmanager
def grpc_peer(batch: BlockBatch) -> Iterator[BlockWay]:
    """Start the server. Raises PeerMissingError."""
    errors, environment = (grpc.FutureTimeoutError,), GRPC_ENVIRONMENT | MALLOC_ENVIRONMENT
    with OwnedFolder("kvservice-grpc-") as directory:
        address = f"unix:{directory}/grpc.sock"
        with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
            ready = grpc.channel_ready_future(channel)
            serving = [sys.executable, "-P", "-m", "kvservice.bench.store", address]
            with (
                running(serving, lambda: ready.result(timeout=1.0), errors, environment),
                contextlib.closing(GrpcPeer(channel, batch)) as peer,
            ):
                yield peer


async def serve_messages(address: str) -> None:
    """Keep the messages of a put, and return them one after the other, again and again."""
    kept: list[bytes] = []

    async def exchange(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        number = 0
        async for message in requests:
            if message == b"get":
                yield kept[number % len(kept)]
                number += 1
            elif message == b"clear":
                kept.clear()
                number = 0
                yield b"done"
            else:
                kept.append(message)
                yield b"done"

    _, service, method = PATH.split("/")
    handlers: dict[str, Any] = {method: grpc.stream_stream_rpc_method_handler(exchange)}
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(address)
    await server.start()
    await server.wait_for_termination()


# ---- a Redis server, which `bench store` measures with the same keys and values if it is installed


class RedisPeer:
    """A Redis server on a unix socket, with pipelined SET and MGET. Values are copied to `batch.out`."""

    def __init__(self, client: Any, batch: BlockBatch) -> None:
        self._client, self.batch = client, batch

    def put(self) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key, value in zip(self.batch.keys, self.batch.values, strict=True):
                pipeline.set(key, value.data)
            pipeline.execute()

    def get(self) -> None:
        for row, value in zip(self.batch.out, self._client.mget(self.batch.keys), strict=True):
            row.data[:] = value

    def empty(self) -> None:
        self._client.flushall()


@contextlib.contextmanager
def redis_peer(batch: BlockBatch) -> Iterator[BlockWay]:
    """Start a Redis server without persistence. Raises PeerMissingError."""
    server = shutil.which("redis-server")
    if server is None:
        raise PeerMissingError("There is no redis-server.")
    try:
        redis = importlib.import_module("redis")
    except ModuleNotFoundError:
        raise PeerMissingError("The package redis is missing.") from None
    with OwnedFolder("kvservice-redis-") as directory:
        path = str(directory / "redis.sock")
        options = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", str(directory)]
        with (
            redis.Redis(unix_socket_path=path) as client,
            running([server, *options], client.ping, (redis.ConnectionError,)),
        ):
            yield RedisPeer(client, batch)


# ---- a Mooncake Store, which `bench store` measures with the same keys and values if it is installed
#
# Its package, mooncake-transfer-engine or a variant of it, has the programs as well: a master, which knows where
# objects are and serves the metadata of transfers, and a client, which owns the memory of the store in a process of its
# own, as the daemon does. The bench is another client. It names addresses of registered buffers, so that Python copies
# nothing. The master listens on the loopback interface; the transfer ports of Mooncake's clients listen on all.


HOST = "127.0.0.1"
SEGMENT = "1 GB"
# Mooncake's own buffer in the bench, which transfers to and from registered buffers do not use.
LOCAL_BYTES = 16 << 20


class MooncakePeer:
    """Batches of zero-copy puts and gets of one client."""

    def __init__(self, store: Any, batch: BlockBatch) -> None:
        self._store, self.batch = store, batch
        self._keys = [key.hex() for key in batch.keys]
        self._sizes = [batch.values.shape[1]] * len(batch.keys)
        for array in (batch.values, batch.out):
            check(store.register_buffer(array.ctypes.data, array.nbytes))

    def put(self) -> None:
        check(*self._store.batch_put_from(self._keys, rows_of(self.batch.values), self._sizes))

    def get(self) -> None:
        sizes = self._store.batch_get_into(self._keys, rows_of(self.batch.out), self._sizes)
        assert sizes == self._sizes, "they were put"

    def empty(self) -> None:
        self._store.remove_all(True)  # also those that were read a moment ago


def rows_of(blocks: Array) -> list[int]:
    """Return the addresses of blocks, uint8 `[num_blocks, block_bytes]`."""
    start, stride = blocks.ctypes.data, blocks.shape[1]
    return list(range(start, start + blocks.nbytes, stride))


def check(*codes: int) -> None:
    """Raise PeerMissingError unless all codes of Mooncake are 0, success."""
    if any(codes):
        raise PeerMissingError(f"It fails with {next(filter(None, codes))}.")


@contextlib.contextmanager
def mooncake_peer(batch: BlockBatch) -> Iterator[BlockWay]:
    """Transfer over TCP. Raises PeerMissingError."""
    with mooncake_processes() as (store, master, metadata, _):
        check(store.setup(HOST, metadata, 0, LOCAL_BYTES, "tcp", "", master))
        yield MooncakePeer(store, batch)


@contextlib.contextmanager
def mooncake_memory_peer(batch: BlockBatch) -> Iterator[BlockWay]:
    """Copy in the process that owns the store, which maps the bench's buffers. Raises PeerMissingError."""
    with mooncake_processes() as (store, _, __, owner):
        check(store.setup_dummy(2 * batch.values.nbytes, LOCAL_BYTES, owner))
        batch.values = _shared(store.alloc_from_mem_pool, batch.values)
        batch.out = _shared(store.alloc_from_mem_pool, batch.out)
        yield MooncakePeer(store, batch)


def _shared(allocate: Callable[[int], int], array: Array) -> Array:
    """Return a copy of an array in memory that Mooncake shares with the owner of the store."""
    memory = (ctypes.c_uint8 * array.nbytes).from_address(allocate(array.nbytes))
    copy: Array = np.ctypeslib.as_array(memory).reshape(array.shape)
    copy[...] = array
    return copy


@contextlib.contextmanager
def mooncake_processes() -> Iterator[tuple[Any, str, str, str]]:
    """Start a master and the owner of the store's memory. Yields a client that is not set up, and the addresses of the
    master, of the metadata and of the owner. Raises PeerMissingError."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise PeerMissingError(f"The package mooncake-transfer-engine is missing: {error}") from None
    programs = Path(str(module.__file__)).parent
    rpc, metrics, http, owner = (free_port() for _ in range(4))
    master, metadata = f"{HOST}:{rpc}", f"http://{HOST}:{http}/metadata"
    listening = [f"--rpc_address={HOST}", f"--metrics_host={HOST}", f"--http_metadata_server_host={HOST}"]
    numbers = [f"--rpc_port={rpc}", f"--metrics_port={metrics}", f"--http_metadata_server_port={http}"]
    serving = [str(programs / "mooncake_master"), "--enable_http_metadata_server=true", *listening, *numbers]
    owning = [
        str(programs / "mooncake_client"),
        f"--host={HOST}",
        f"--port={owner}",
        f"--global_segment_size={SEGMENT}",
        f"--master_server_address={master}",
        f"--metadata_server={metadata}",
    ]
    refused = (ConnectionRefusedError,)
    with (
        running(serving, lambda: connect(rpc, metrics, http), refused),
        running(owning, lambda: connect(owner), refused),
        contextlib.closing(module.MooncakeDistributedStore()) as store,
    ):
        yield store, master, metadata, f"{HOST}:{owner}"


# ---- all of them


# Raise PeerMissingError if the peer is not installed, or does not start.
PEERS: dict[str, Callable[[BlockBatch], AbstractContextManager[BlockWay]]] = {
    "grpc": grpc_peer,
    "redis": redis_peer,
    "mooncake": mooncake_peer,
    "mooncake_memory": mooncake_memory_peer,
}


# ---- the measurement

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


def puts_and_gets(opened: Mapping[str, BlockWay], size: str) -> dict[str, Callable[[], float]]:
    """Return the contenders `<way>_<put|get>_<size>_s`."""
    contenders: dict[str, Callable[[], float]] = {}
    for name, way in opened.items():
        contenders[f"{name}_put_{size}_s"] = functools.partial(timed, way.put, way.empty)
        contenders[f"{name}_get_{size}_s"] = functools.partial(seconds_of, way.get)
    return contenders


def measure_copies(client: KVClient, num_bytes: int, rounds: int) -> dict[str, Any]:
    """Return `<way>_<put|get>_<size>_s`, and in `missing` the reasons why peers were not measured."""
    results: dict[str, Any] = {"missing": {}}
    for size, block_bytes in SIZES.items():
        with ways(client, block_bytes, num_bytes) as (opened, missing):
            results["missing"] |= missing
            results |= medians(take_turns(puts_and_gets(opened, size), rounds, warm_ups=1))
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
                f"{size.upper()}iB",
                label,
                *(rate(results, way, f"{call}_{size}_s", "memcpy") for call in ("put", "get")),
            )
    console.print(rows)
    for name, why in results["missing"].items():
        console.print(f"{name}: not measured. {why}")
    rows = table("Calls, µs; in brackets: in units of an echo on the stream", ("call",), [f"{n} keys" for n in COUNTS])
    rows.add_row("echo", _us(results, "echo_s"), "")
    for call, label in CALLS.items():
        rows.add_row(label, *(_us(results, f"{call}_{count}_s") for count in COUNTS))
    console.print(rows)


def rate(results: dict[str, Any], way: str, figure: str, unit: str) -> str:
    """Return GB/s of a way, and in brackets the same in units of another way."""
    seconds, other = results[f"{way}_{figure}"], results[f"{unit}_{figure}"]
    return f"{results['batch_bytes'] / seconds / 1e9:.2f} ({other / seconds:.2f})"


def _us(results: dict[str, Any], name: str) -> str:
    return f"{results[name] * 1e6:.0f} ({results[name] / results['echo_s']:.2f})"


if __name__ == "__main__":
    uvloop.run(serve_messages(sys.argv[1]))
