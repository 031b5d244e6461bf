"""Cost of blocks between a client over TCP and the daemon's store, and of K/V between it and the daemon's pool: by
Transfer Engines and in messages, against a plain socket that copies the same bytes.

All processes are on this host, and talk over the loopback interface. The ways take turns, so that a slow machine
affects all of them. Checksums are compared by both ends, except by the plain socket and by the engine alone.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

import numpy as np
from rich.console import Console

from kvservice.bench import START_S, free_port, medians, table, take_turns
from kvservice.bench.store import OPTIONS, BlockBatch, BlockWay, StoreWay, rate, timed
from kvservice.client import KVClient, Session, StoreNamespace
from kvservice.launch import Daemon
from kvservice.owned import OwnedProcess
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.transfer import READ, WRITE, Endpoint, Operation, Range, TransferProcess
from kvservice.wire.tensors import Array

# ---- a plain TCP connection between two processes: the least that bytes cost between them
#
# The kernel copies them from the memory of one to the memory of the other, in system calls of a block each, and nobody
# compares them. The peer's process: `python -m kvservice.bench.remote PORT NUM_BYTES BLOCK_BYTES`.


_PUT, _GET, _DONE = b"p", b"g", b"d"
_LOOPBACK: Final = "127.0.0.1"


class SocketPeer:
    """The blocks of a batch are copied to the memory of the peer, and back."""

    def __init__(self, connection: socket.socket, batch: BlockBatch) -> None:
        self._connection, self.batch = connection, batch

    def put(self) -> None:
        self._connection.sendall(_PUT)
        send(self._connection, self.batch.values)
        assert self._connection.recv(1) == _DONE, "the peer has all of it"

    def get(self) -> None:
        self._connection.sendall(_GET)
        receive(self._connection, self.batch.out)

    def empty(self) -> None:
        """Nothing has to be removed."""


def send(connection: socket.socket, blocks: Array) -> None:
    for block in blocks:
        connection.sendall(block.data)


def receive(connection: socket.socket, blocks: Array) -> None:
    """Raises ConnectionError."""
    for block in blocks:
        left = block.data
        while left:
            count = connection.recv_into(left)
            if not count:
                raise ConnectionError("the other process has ended")
            left = left[count:]


@contextlib.contextmanager
def socket_peer(batch: BlockBatch) -> Iterator[SocketPeer]:
    """Start a peer. Raises OSError."""
    count, block_bytes = batch.values.shape
    with socket.create_server((_LOOPBACK, 0)) as listening:
        listening.settimeout(START_S)
        numbers = (listening.getsockname()[1], count * block_bytes, block_bytes)
        command = [sys.executable, "-P", "-m", "kvservice.bench.remote", *map(str, numbers)]
        process = OwnedProcess(command)
        try:
            connection = listening.accept()[0]
            with connection:
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield SocketPeer(connection, batch)
        finally:
            process.kill()
            process.wait()


def serve_socket() -> None:
    """Be the peer's process."""
    port, num_bytes, block_bytes = map(int, sys.argv[1:])
    blocks = np.ones((num_bytes // block_bytes, block_bytes), np.uint8)
    with socket.create_connection((_LOOPBACK, port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while wanted := connection.recv(1):
            if wanted == _PUT:
                receive(connection, blocks)
                connection.sendall(_DONE)
            else:
                send(connection, blocks)


# ---- K/V of a sequence between a client over TCP and the daemon's pool, written and read as a whole


LAYERS, KV_HEADS, HEAD_SIZE, DTYPE = 8, 8, 128, "bfloat16"
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * TENSOR_DTYPES[DTYPE].itemsize
# The transports of the session, by the names of the ways.
SEQUENCE_WAYS = {"kv_transfer": "transfer", "kv_inline": "inline"}
SEQUENCE_LABELS = {"kv_transfer": "Transfer Engine, through the staging region", "kv_inline": "messages"}


def pool_options(num_bytes: int) -> dict[str, Any]:
    """Return the daemon's options for sequences of all ways with so many bytes of K/V each."""
    num_tokens = num_bytes // TOKEN_BYTES
    return {
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "dtype": DTYPE,
        "num_blocks": len(SEQUENCE_WAYS) * (num_tokens // 16 + 16),
        "enable_prefix_caching": False,
        "max_sequence_tokens": max(num_tokens, 1024),
        "max_request_tokens": max(num_tokens, 65536),
    }


class SequenceWay:
    """A sequence with `num_bytes` of K/V. `key` and `value` are written; `found` are those that were read."""

    def __init__(self, kv: Session, num_bytes: int) -> None:
        self.kv = kv
        self._num_tokens = num_bytes // TOKEN_BYTES
        shape = (2, LAYERS, self._num_tokens, KV_HEADS, HEAD_SIZE)
        bits = np.random.default_rng(0).integers(0, 1 << 14, shape, np.uint16)
        self.key, self.value = bits.view(TENSOR_DTYPES[DTYPE])
        self.found = self.key, self.value
        self._sequence = kv.allocate(range(self._num_tokens))

    def empty(self) -> None:
        """Begin with a new sequence."""
        self.kv.free([self._sequence])
        self._sequence = self.kv.allocate(range(self._num_tokens))
        self._step = self.kv.open_step([self._sequence])

    def put(self) -> None:
        self._step.write(self.key, self.value)

    def get(self) -> None:
        self.found = self.kv.read(self._sequence, 0, self._num_tokens)


@contextlib.contextmanager
def sequence_ways(address: str, num_bytes: int) -> Iterator[dict[str, SequenceWay]]:
    """Yield the ways by name."""
    with contextlib.ExitStack() as cleanup:
        opened = {}
        for name, transport in SEQUENCE_WAYS.items():
            client = cleanup.enter_context(KVClient(address, transport=transport))
            opened[name] = SequenceWay(cleanup.enter_context(client.session()), num_bytes)
        yield opened


# ---- the Transfer Engine alone, between two processes
#
# Moving bytes with it costs this much, before anything is compared, copied or answered.


# The engine moves parts of this size at the same time, as it does for the daemon.
_PART_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 60.0


class EnginePeer:
    """One engine reads the blocks of a batch from the memory of the other, and writes them back to its `out`. The first
    one is where the daemon would be. It calls, and does not listen."""

    def __init__(self, calling: TransferProcess, listening: TransferProcess, batch: BlockBatch) -> None:
        """The memory of `listening` has `values` and then `out`."""
        self._calling, self._listening, self.batch = calling, listening, batch

    def put(self) -> None:
        self._move(READ, 0)

    def get(self) -> None:
        self._move(WRITE, self.batch.values.nbytes)

    def empty(self) -> None:
        """Nothing has to be removed."""

    def _move(self, operation: Operation, begin: int) -> None:
        num_bytes = self.batch.values.nbytes
        ranges = [Range(at, begin + at, min(_PART_BYTES, num_bytes - at)) for at in range(0, num_bytes, _PART_BYTES)]
        listening = self._listening
        ticket = self._calling.start(operation, listening.segments, listening.address, ranges)
        self._calling.wait(ticket, _TIMEOUT_S)


@contextlib.contextmanager
def engine_peer(batch: BlockBatch) -> Iterator[EnginePeer]:
    """Start the engines, and move the arrays of the batch to memory that one of them maps. Raises
    TransferFailedError."""
    num_bytes = batch.values.nbytes
    with contextlib.ExitStack() as cleanup:

        def process(memory_bytes: int, endpoint: Endpoint, *, shared: bool) -> tuple[TransferProcess, mmap.mmap]:
            memory = os.memfd_create("kvservice-bench", os.MFD_CLOEXEC)
            cleanup.callback(os.close, memory)
            os.ftruncate(memory, memory_bytes)
            started = TransferProcess(memory, memory_bytes, endpoint, shared=shared)
            cleanup.callback(started.kill)
            return started, mmap.mmap(memory, memory_bytes)

        listening, mapped = process(2 * num_bytes, Endpoint(_LOOPBACK, peer=_LOOPBACK), shared=True)
        calling, _ = process(num_bytes, Endpoint(_LOOPBACK, peer=_LOOPBACK, calls=True), shared=False)
        values, out = np.frombuffer(mapped, np.uint8).reshape(2, *batch.values.shape)
        values[...] = batch.values
        batch.values, batch.out = values, out
        yield EnginePeer(calling, listening, batch)


# ---- the measurement


BLOCK_BYTES = 2 << 20
BATCH_BYTES, BATCH_BYTES_QUICK = 128 << 20, 16 << 20
ROUNDS, ROUNDS_QUICK = 25, 2
# The ways without a daemon, by name.
PEERS: dict[str, Callable[[BlockBatch], AbstractContextManager[BlockWay]]] = {
    "socket": socket_peer,
    "engine": engine_peer,
}
# All ways by name: the transport of the store, None for a peer.
WAYS = {"socket": None, "engine": None, "transfer": "transfer", "staged": "transfer", "inline": "inline"}
LABELS = {
    "socket": "plain socket",
    "engine": "Transfer Engine alone, nothing compared",
    "transfer": "Transfer Engine, blocks in a region",
    "staged": "Transfer Engine, blocks elsewhere",
    "inline": "messages",
}


@contextlib.contextmanager
def ways(address: str, num_bytes: int) -> Iterator[dict[str, BlockWay]]:
    """Yield the ways by name, each with blocks of its own."""
    opened: dict[str, BlockWay] = {}
    with contextlib.ExitStack() as cleanup:
        for name, transport in WAYS.items():
            batch = BlockBatch(BLOCK_BYTES, num_bytes)
            if transport is None:
                opened[name] = cleanup.enter_context(PEERS[name](batch))
                continue
            client = cleanup.enter_context(KVClient(address))
            namespace = StoreNamespace("bench", BLOCK_BYTES, layout=name)
            store = cleanup.enter_context(client.store(namespace, transport=transport, unreachable="raise"))
            if name == "transfer":
                values, out = (store.create_region(num_bytes).array(batch.out.shape, "uint8") for _ in range(2))
                values[...] = batch.values
                batch.values, batch.out = values, out
            opened[name] = StoreWay(store, batch)
        yield opened


def run(quick: bool = False) -> dict[str, Any]:
    """Return `batch_bytes`, and `<way>_<put|get>_s`; a put of K/V is a write, and a get a read."""
    num_bytes = BATCH_BYTES_QUICK if quick else BATCH_BYTES
    address = f"127.0.0.1:{free_port()}"
    options = OPTIONS | pool_options(num_bytes) | {"tcp_address": address, "transfer_address": "127.0.0.1"}
    with Daemon(**options), ways(address, num_bytes) as blocks, sequence_ways(address, num_bytes) as sequences:
        all_ways: dict[str, BlockWay | SequenceWay] = {**blocks, **sequences}
        contenders = {}
        for call in ("put", "get"):
            for name, way in all_ways.items():
                before = way.empty if call == "put" else _nothing
                contenders[f"{name}_{call}_s"] = functools.partial(timed, getattr(way, call), before)
        results = medians(take_turns(contenders, ROUNDS_QUICK if quick else ROUNDS, warm_ups=1))
    return {"batch_bytes": num_bytes} | results


def _nothing() -> None:
    return


def render(results: dict[str, Any], console: Console) -> None:
    for what, labels, calls in (
        ("Blocks of 2 MiB", LABELS, ("put", "get")),
        ("K/V of a sequence", LABELS, ("write", "read")),
    ):
        title = f"{what} over the loopback interface, GB/s; in brackets: in units of the plain socket"
        rows = table(title, ("way",), calls)
        for name, label in labels.items():
            rows.add_row(label, *(rate(results, name, f"{call}_s", "socket") for call in ("put", "get")))
        console.print(rows)


if __name__ == "__main__":
    serve_socket()
