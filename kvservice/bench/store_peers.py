"""Other stores, which `bench store` measures with the same keys and values if they are installed."""

from __future__ import annotations

import contextlib
import importlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvservice.bench.store_blocks import BlockBatch, BlockWay
from kvservice.errors import KVServiceError

START_S = 10.0


class PeerMissingError(KVServiceError):
    """The peer is not installed here, or does not start."""


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
    with tempfile.TemporaryDirectory(prefix="kvservice-redis-") as directory:
        path = Path(directory) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no", "--dir", directory]
        process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            client = redis.Redis(unix_socket_path=str(path))
            await_answer(client.ping, (redis.ConnectionError,))
            yield RedisPeer(client, batch)
            client.close()
        finally:
            process.terminate()
            process.wait()


def await_answer(ping: Callable[[], object], errors: tuple[type[Exception], ...]) -> None:
    """Repeat `ping` until it raises none of `errors`. Raises PeerMissingError after START_S."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            ping()
            return
        except errors as error:
            if time.monotonic() > deadline:
                raise PeerMissingError(f"It does not start: {error}") from None
            time.sleep(0.02)


PEERS: dict[str, Callable[[BlockBatch], AbstractContextManager[BlockWay]]] = {"redis": redis_peer}
