"""A Redis server, which `bench store` measures with the same keys and values if it is installed."""

from __future__ import annotations

import contextlib
import importlib
import shutil
from collections.abc import Iterator
from typing import Any

from kvservice.bench.peer_process import PeerMissingError, running
from kvservice.bench.store_blocks import BlockBatch, BlockWay
from kvservice.owned import OwnedFolder


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
