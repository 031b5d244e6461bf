"""The peers of `bench store`: bare gRPC, and other stores if they are installed."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from kvservice.bench.grpc_peer import grpc_peer
from kvservice.bench.harness import Array
from kvservice.bench.peer_process import BlockBatch, BlockWay, PeerMissingError, connect, free_port, running
from kvservice.owned import OwnedFolder

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
