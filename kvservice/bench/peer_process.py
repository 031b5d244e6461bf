"""Processes of other stores that `bench store` measures, and the blocks that it moves."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from kvservice.errors import KVServiceError
from kvservice.owned import OwnedProcess

START_S = 10.0


class PeerMissingError(KVServiceError):
    """The peer is not installed here, or does not start."""


@contextlib.contextmanager
def running(
    command: Sequence[str],
    ping: Callable[[], object],
    errors: tuple[type[Exception], ...],
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Run a process, with more variables in its environment. It is ready when `ping` raises none of `errors`. Raises
    PeerMissingError."""
    try:
        added = os.environ | dict(environment or {})
        process = OwnedProcess(command, env=added, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError as error:
        raise PeerMissingError(f"It does not start: {error}") from None
    try:
        await_answer(ping, errors)
        yield
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


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


def connect(*ports: int) -> None:
    """Raises ConnectionRefusedError unless processes listen on these ports of the loopback interface."""
    for port in ports:
        socket.create_connection(("127.0.0.1", port)).close()


# ---- the blocks that `bench store` moves


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
