"""Writers, readers and daemons of the block store that are killed or frozen at each stage of an operation.

A namespace with room for just the blocks of a test shows that places come back: others can be stored in them.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import store_stages
from each_row import each_row
from grpc_health.v1 import health_pb2, health_pb2_grpc
from store_daemons import BLOCK_BYTES, SMALL_STORE, blocks_of, keys_of, new_namespace
from store_stages import READER_STAGES, WRITER_STAGES, Stopped, stopped
from waiting import until

from kvservice.client import KVClient, PutStatus, Store
from kvservice.launch import Daemon

DONE, PRESENT, BEING_WRITTEN = PutStatus.DONE, PutStatus.PRESENT, PutStatus.BEING_WRITTEN
TRANSPORTS = ("mapped", "region", "inline")
NUMBERS, OTHERS = list(range(8)), list(range(100, 108))
QUOTA_GIB = len(NUMBERS) * BLOCK_BYTES / (1 << 30)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """It checks its bookkeeping all the time."""
    options = SMALL_STORE | {"share_store": "write", "session_grace_s": 0.1, "integrity_interval_s": 0.05}
    with Daemon(**options) as running:
        yield running
        with grpc.insecure_channel(running.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        assert "ERROR" not in running.log.read_text()


@contextlib.contextmanager
def new_store(daemon: Daemon) -> Iterator[Store]:
    with KVClient(daemon.address) as client, client.store(new_namespace(), quota_gib=QUOTA_GIB) as opened:
        yield opened


@pytest.fixture
def store(daemon: Daemon) -> Iterator[Store]:
    with new_store(daemon) as opened:
        yield opened


def put_all(store: Store, numbers: list[int]) -> None:
    """Put blocks until all are there."""
    until(lambda: set(store.put(keys_of(*numbers), blocks_of(*numbers)).tolist()) <= {DONE, PRESENT})


def check(store: Store, numbers: list[int]) -> None:
    out = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
    assert store.get(keys_of(*numbers), out, verify=True).all()
    np.testing.assert_array_equal(out, blocks_of(*numbers))


def room_comes_back(store: Store) -> None:
    """All places of the namespace can be used again, by anybody."""
    for numbers in (NUMBERS, OTHERS):
        put_all(store, numbers)
        check(store, numbers)


# ---- writers


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_writer_is_killed(daemon: Daemon, transport: str) -> None:
    """It fails if an unpublished block is found, if a published one has other bytes, or if a place is lost."""
    with each_row() as row:
        for stage in WRITER_STAGES:
            with row(stage), new_store(daemon) as store:
                kill_a_writer(daemon, store, transport, stage)


def kill_a_writer(daemon: Daemon, store: Store, transport: str, stage: str) -> None:
    keys, seeds = keys_of(*NUMBERS), [number + 50 for number in NUMBERS]
    published = stage in ("sent", "committed")
    writer = store_stages.writer, daemon.address, store.namespace, transport, stage, NUMBERS, seeds
    with stopped(*writer):
        assert (store.lookup(keys).found == published).all()
        if transport == "mapped" and stage in ("half", "written"):
            assert (store.put(keys, blocks_of(*NUMBERS)) == BEING_WRITTEN).all()
    out = np.zeros((len(NUMBERS), BLOCK_BYTES), np.uint8)
    found = store.get(keys, out, verify=True)
    assert (found == published).all()
    np.testing.assert_array_equal(out[found], blocks_of(*seeds)[found])
    store.remove(keys)
    room_comes_back(store)


def test_a_writer_is_killed_with_a_reservation(daemon: Daemon, store: Store) -> None:
    with stopped(store_stages.reserver, daemon.address, store.namespace, NUMBERS):
        assert not store.lookup(keys_of(*NUMBERS)).found.any()
        assert (store.put(keys_of(*NUMBERS), blocks_of(*NUMBERS)) == BEING_WRITTEN).all()
        assert (store.put(keys_of(*OTHERS), blocks_of(*OTHERS)) == PutStatus.NO_ROOM).all()
    room_comes_back(store)


# ---- readers


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_reader_is_killed_or_frozen(daemon: Daemon, transport: str) -> None:
    """It fails if a place is lost, or if a frozen reader takes the bytes of other blocks for its own."""
    with each_row() as row:
        for stage in READER_STAGES:
            with row((stage, "killed")), new_store(daemon) as store:
                kill_a_reader(daemon, store, transport, stage)
            with row((stage, "frozen")), new_store(daemon) as store:
                freeze_a_reader(daemon, store, transport, stage)


def kill_a_reader(daemon: Daemon, store: Store, transport: str, stage: str) -> None:
    put_all(store, NUMBERS)
    with stopped(store_stages.reader, daemon.address, store.namespace, transport, stage, NUMBERS, 0.0):
        statuses = store.put(keys_of(*OTHERS), blocks_of(*OTHERS))
        assert (statuses == (PutStatus.NO_ROOM if transport == "mapped" else DONE)).all()
    room_comes_back(store)


def test_a_reader_is_killed_that_holds_views(daemon: Daemon, store: Store) -> None:
    put_all(store, NUMBERS)
    with stopped(store_stages.holder, daemon.address, store.namespace, NUMBERS, 0.0):
        assert (store.put(keys_of(*OTHERS), blocks_of(*OTHERS)) == PutStatus.NO_ROOM).all()
        check(store, NUMBERS)
    room_comes_back(store)


def freeze_a_reader(daemon: Daemon, store: Store, transport: str, stage: str) -> None:
    """Freeze it past its lease. Its places have other blocks when it goes on. It notices; what was copied for it is its
    own."""
    put_all(store, NUMBERS)
    with stopped(store_stages.reader, daemon.address, store.namespace, transport, stage, NUMBERS, 0.05) as reader:
        reader.freeze()
        put_all(store, OTHERS)
        assert not store.lookup(keys_of(*NUMBERS)).found.any()
        reader.go_on()
        found, out = reader.receive()
    assert (found == (transport != "mapped")).all()
    np.testing.assert_array_equal(out[found], blocks_of(*NUMBERS)[found])


def test_views_of_a_frozen_reader_are_known_to_be_wrong(daemon: Daemon, store: Store) -> None:
    put_all(store, NUMBERS)
    with stopped(store_stages.holder, daemon.address, store.namespace, NUMBERS, 0.05) as holder:
        holder.freeze()
        put_all(store, OTHERS)
        holder.go_on()
        assert not holder.receive().any()


# ---- all of them at random


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_at_random_agree_with_a_dict(daemon: Daemon, seed: int) -> None:
    """The dict maps the numbers of keys to the seeds of their bytes. What a killed writer had not published, another
    one stores."""
    random, there, seeds = np.random.default_rng(seed), dict[int, int](), iter(range(1000, 1 << 20))
    with KVClient(daemon.address) as client, client.store(new_namespace()) as store:
        for _ in range(8):
            numbers = random.permutation(24)[: random.integers(2, 16)].tolist()
            transport = str(random.choice(TRANSPORTS))
            if random.integers(3):
                stage, written = str(random.choice(WRITER_STAGES)), [next(seeds) for _ in numbers]
                with stopped(store_stages.writer, daemon.address, store.namespace, transport, stage, numbers, written):
                    if stage in ("sent", "committed"):
                        there = dict(zip(numbers, written, strict=True)) | there
            elif all(number in there for number in numbers):
                stage = str(random.choice(READER_STAGES))
                with stopped(store_stages.reader, daemon.address, store.namespace, transport, stage, numbers, 0.0):
                    pass
            compare(store, there)
            some = [next(seeds) for _ in numbers]
            store_missing(store, there, dict(zip(numbers, some, strict=True)))
            gone = numbers[: random.integers(0, 4)]
            assert store.remove(keys_of(*gone)) == len(gone)
            for number in gone:
                del there[number]
            compare(store, there)


def store_missing(store: Store, there: dict[int, int], values: dict[int, int]) -> None:
    """Put blocks until all are there."""

    def stored() -> bool:
        statuses = store.put(keys_of(*values), blocks_of(*values.values())).tolist()
        for (number, seed), status in zip(values.items(), statuses, strict=True):
            if status == DONE:
                assert number not in there
                there[number] = seed
        return set(statuses) <= {DONE, PRESENT}

    until(stored)


def compare(store: Store, there: dict[int, int]) -> None:
    """Compare the namespace with the dict."""
    numbers = list(range(24))
    out = np.zeros((len(numbers), BLOCK_BYTES), np.uint8)
    found = store.get(keys_of(*numbers), out, verify=True)
    assert found.tolist() == [number in there for number in numbers]
    np.testing.assert_array_equal(out[found], blocks_of(*(there[number] for number in numbers if number in there)))


# ---- the daemon

# The stages at which the daemon is killed, each with the operation and transport that leads there.
DAEMON_STAGES = (
    ("before reserve", "put", "mapped"),
    ("after reserve", "put", "mapped"),
    ("before publish", "put", "mapped"),
    ("after publish", "put", "inline"),
    ("half of copy_in", "put", "region"),
    ("after acquire", "get", "mapped"),
    ("after acquire", "get", "inline"),
    ("half of copy_out", "get", "region"),
)


def mapped_stores() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:kvservice-store")


@pytest.mark.slow
def test_the_daemon_is_killed_at_each_stage(tmp_path: Path) -> None:
    """The stores outlive all of the daemons. A daemon is also killed while a store opens its namespace again."""
    path, mapped_before = tmp_path / "k.sock", mapped_stores()
    options = SMALL_STORE | {
        "share_store": "write", "unix_socket": str(path), "tcp_address": "", "http_address": "", "log_level": "warning",
    }  # fmt: skip

    def start(stage: str) -> Stopped:
        return Stopped(store_stages.daemon, options, stage, tmp_path)

    out = np.zeros((len(NUMBERS), BLOCK_BYTES), np.uint8)
    operations = {
        "put": lambda store: store.put(keys_of(*NUMBERS), blocks_of(*NUMBERS)) == PutStatus.UNREACHABLE,
        "get": lambda store: ~store.get(keys_of(*OTHERS), out),
    }
    with KVClient(f"unix://{path}", connect_timeout_s=None) as client, ThreadPoolExecutor(1) as thread:
        namespace = new_namespace()
        stores = {transport: client.store(namespace, transport=transport) for transport in TRANSPORTS}
        for stage, operation, transport in DAEMON_STAGES:
            running = start(stage)
            try:
                until(lambda: all(store.reachable for store in stores.values()))
                store = stores[transport]
                assert not store.lookup(keys_of(*NUMBERS, *OTHERS)).found.any(), "a new daemon has nothing"
                put_all(store, OTHERS)
                check(store, OTHERS)
                assert mapped_stores() == mapped_before + 1
                running.send("arm")
                missed = thread.submit(operations[operation], store)
                running.reached()
            finally:
                running.kill()
            assert missed.result(120).all()
            assert not store.lookup(keys_of(*NUMBERS)).found.any()
        running = start("before open_namespace")
        running.send("arm")
        running.reached().kill()
        assert not any(store.reachable for store in stores.values())
        running = start("before open_namespace")
        try:
            until(lambda: all(store.reachable for store in stores.values()))
            for store in stores.values():
                put_all(store, NUMBERS)
                check(store, NUMBERS)
        finally:
            running.kill()
    assert "Traceback" not in (tmp_path / "daemon.log").read_text()
