"""Processes that stop at a named stage of an operation on the block store, and are killed or frozen there.

They are forked from a process that has imported what they need and has no threads, so that each takes milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from client_calls import Send, around_calls, changed_calls
from store_daemons import BLOCK_BYTES, blocks_of, keys_of

from kvservice import _ext
from kvservice.client import KVClient, Scatter, StoreNamespace
from kvservice.config_sources import load_config
from kvservice.store import BlockStore

# Where a writer stops: the namespace is open; half of the bytes are written, to the store, the region or the message;
# all are; the daemon has published them, which the writer does not know yet; it knows.
WRITER_STAGES = ("opened", "half", "written", "sent", "committed")
# Where a reader stops: the daemon has leased or copied the blocks; half of them are copied in the reader.
READER_STAGES = ("sent", "half")
# The calls after which a writer or a reader is at stage "sent".
PUBLISHES = ("store_commit", "store_batch_put")
READS = ("store_acquire", "store_batch_get")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["kvservice.client", "kvservice.server.daemon"])


class Stopped:
    """A process that has stopped at its stage. `receive` and `send` talk to it."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        # The server imports with a path of its own, in which the working directory must not hide the installed package.
        with patch.dict(os.environ, PYTHONSAFEPATH="1"):
            multiprocessing.forkserver.ensure_running()
        self._connection, theirs = _context.Pipe()
        self.process = _context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def reached(self) -> Stopped:
        """Wait until it has stopped."""
        assert self.receive() == "reached"
        return self

    def receive(self) -> Any:
        assert self._connection.poll(120), "the process says nothing"
        return self._connection.recv()

    def send(self, message: str) -> None:
        self._connection.send(message)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.send("go on")

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self._connection.close()


@contextlib.contextmanager
def stopped(target: Callable[..., None], *args: Any) -> Iterator[Stopped]:
    """Run a process until it stops at its stage. At the end of the block it is killed."""
    process = Stopped(target, *args)
    try:
        yield process.reached()
    finally:
        process.kill()


def stop(connection: Connection) -> None:
    """Say that the stage is reached, and wait until the other side says to go on."""
    connection.send("reached")
    connection.recv()


# ---- clients


def writer(
    connection: Connection,
    address: str,
    namespace: StoreNamespace,
    transport: str,
    stage: str,
    numbers: list[int],
    seeds: list[int],
) -> None:
    """Put the blocks of `seeds` under the keys of `numbers`, and stop at a stage."""
    with KVClient(address) as client, client.store(namespace, transport=transport) as store:
        if stage == "opened":
            stop(connection)
        with _stopping(connection, stage, "store_copy_in", PUBLISHES):
            store.put(keys_of(*numbers), _scattered(seeds))
        stop(connection)


def _scattered(seeds: list[int]) -> Scatter:
    """Return blocks that lie in reverse order, so that they are copied on every way to the daemon."""
    places = np.arange(len(seeds))[::-1, None] * BLOCK_BYTES
    return Scatter(blocks_of(*reversed(seeds)), places, [BLOCK_BYTES])


def reserver(connection: Connection, address: str, namespace: StoreNamespace, numbers: list[int]) -> None:
    """Reserve blocks, and stop."""
    with KVClient(address) as client, client.store(namespace, transport="mapped") as store:
        reservation = store.reserve(keys_of(*numbers))
        assert reservation.reserved.all()
        stop(connection)


def reader(
    connection: Connection,
    address: str,
    namespace: StoreNamespace,
    transport: str,
    stage: str,
    numbers: list[int],
    ttl_s: float,
) -> None:
    """Get blocks of these numbers, and stop at a stage. Then send which were found, and their bytes. `ttl_s` is the
    time of its lease, 0 for the longest."""
    with KVClient(address) as client, client.store(namespace, transport=transport) as store:
        out = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
        with _leases_of(ttl_s), _stopping(connection, stage, "store_copy_out", READS):
            found = store.get(keys_of(*numbers), out)
        connection.send((found, out))


def holder(connection: Connection, address: str, namespace: StoreNamespace, numbers: list[int], ttl_s: float) -> None:
    """Hold views of leased blocks, and stop. Then send which of them are right."""
    with (
        KVClient(address) as client,
        client.store(namespace, transport="mapped") as store,
        store.acquire(keys_of(*numbers), ttl_s) as lease,
    ):
        views = lease.views
        assert all(view is not None for view in views)
        stop(connection)
        connection.send(lease.check())


@contextlib.contextmanager
def _stopping(connection: Connection, stage: str, copy: str, calls: tuple[str, ...]) -> Iterator[None]:
    """Stop in the middle of a copy ("half"), before one of the calls ("written"), or before its answer ("sent")."""

    async def call(name: str, request: Any, send: Send) -> Any:  # noqa: ARG001
        if name in calls and stage == "written":
            stop(connection)
        answer = await send()
        if name in calls and stage == "sent":
            stop(connection)
        return answer

    with (
        around_calls(call),
        patch.object(_ext, copy, _halves(copy, connection) if stage == "half" else getattr(_ext, copy)),
    ):
        yield


def _halves(name: str, connection: Connection) -> Callable[..., Any]:
    """Return a copy that stops when it has copied half of its blocks."""
    copied = getattr(_ext, name)

    def copy(
        address: int, offsets: bytes, block_bytes: int, start: int, places: bytes, sizes: bytes, *rest: Any
    ) -> Any:
        num_blocks = len(offsets) // 8
        half = num_blocks // 2
        first = offsets[: 8 * half], block_bytes, start, places[: len(places) // num_blocks * half], sizes
        copied(address, *first, *rest)
        stop(connection)
        return copied(address, offsets, block_bytes, start, places, sizes, *rest)

    return copy


@contextlib.contextmanager
def _leases_of(ttl_s: float) -> Iterator[None]:
    def change(name: str, request: Any) -> None:
        if name == "store_acquire":
            request.ttl_s = ttl_s

    with changed_calls(change):
        yield


# ---- the daemon

# The operation of the store at which a daemon stops: before it, after it, or with half of the blocks copied.
_OPERATIONS: dict[str, tuple[Any, str]] = {
    "open_namespace": (BlockStore, "open"),
    "reserve": (BlockStore, "reserve"),
    "publish": (BlockStore, "commit"),
    "acquire": (BlockStore, "acquire"),
    "copy_in": (_ext, "store_copy_in"),
    "copy_out": (_ext, "store_copy_out"),
}


def daemon(connection: Connection, options: dict[str, Any], stage: str, directory: Path) -> None:
    """Run a daemon that stops at a stage, for example "half of copy_in", after the other side has said "arm"."""
    from kvservice.server.daemon import run

    log = os.open(directory / "daemon.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 2)

    def armed() -> bool:
        return connection.poll() and connection.recv() == "arm"

    when, _, operation = stage.rpartition(" ")
    owner, name = _OPERATIONS[operation]
    execute = getattr(owner, name)

    def staged(*args: Any, **options: Any) -> Any:
        if not armed():
            return execute(*args, **options)
        if when == "half of":
            _halves(name, connection)(*args, **options)
        elif when == "after":
            execute(*args, **options)
        stop(connection)
        raise AssertionError("a daemon that has stopped is killed")

    setattr(owner, name, staged)
    run(load_config(options, {}))
