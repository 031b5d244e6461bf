"""Daemons whose block store has a disk below it: more than memory has room for is found, also by the next process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from both_faces import Face
from kept_daemon import next_process
from raw_store import BLOCK_BYTES, RawStore, block, blocks, keys
from store_daemons import SMALL_STORE
from store_daemons import store_of as store_of_client
from waiting import until

from kvservice.client import StoreNamespace
from kvservice.errors import InvalidArgumentError
from kvservice.launch import Daemon
from kvservice.v1 import inspect_pb2, store_pb2

# More than the memory of the store has room for.
LARGE = 512 << 10
MANY = range(100, 160)
# Those that are on the disk only.
BELOW = MANY[:16]


def options(directory: Path) -> dict[str, Any]:
    return SMALL_STORE | {"disk": str(directory), "disk_gib": 0.25, "disk_admission": "all", "session_grace_s": 60}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    with Daemon(keeper=True, **options(directory)) as opened:
        yield opened


@pytest.fixture
def wire(daemon: Daemon, raw: Any) -> Iterator[Any]:
    opened = raw.Wire(daemon.address)
    yield opened
    opened.close()


def tier(wire: Any) -> Any:
    (found,) = wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).tiers
    return found


def is_open(wire: Any) -> None:
    until(lambda: tier(wire).state == "open")


def has_values(wire: Any, count: int) -> None:
    until(lambda: tier(wire).num_values >= count)


def store_of(wire: Any) -> Any:
    return wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).store


def fill(wire: Any, store: RawStore) -> None:
    """Store more than there is memory for. The disk keeps up."""
    is_open(wire)
    for number in MANY:
        request = store_pb2.BatchPutRequest(namespace_id=store.id, keys=keys(number), data=block(number, LARGE))
        assert store.ok("batch_put", request).statuses == b"\x01"
        has_values(wire, number - MANY[0] - 28)


def looked_up(store: RawStore) -> list[int]:
    """Return which of MANY are in memory or on the disk."""
    found = []
    for first in range(MANY[0], MANY[-1] + 1, 16):
        numbers = range(first, min(first + 16, MANY[-1] + 1))
        bits = int.from_bytes(store.lookup(*numbers)[1], "little")
        found += [number for i, number in enumerate(numbers) if bits >> i & 1]
    return found


def found(store: RawStore, *numbers: int) -> list[int]:
    """Return the blocks that come back as they were stored."""
    request = store_pb2.BatchGetRequest(namespace_id=store.id, verify=True)
    there = []
    for number in numbers:
        request.keys = keys(number)
        answer = store.ok("batch_get", request)
        if answer.found == b"\x01":
            assert answer.data == block(number, LARGE)
            there.append(number)
    return there


def test_more_than_memory_has_room_for_is_found(wire: Any, raw: Any) -> None:
    store = RawStore(raw.RawSession(wire), block_bytes=LARGE)
    fill(wire, store)
    assert looked_up(store) == list(MANY)
    before = tier(wire)
    assert before.read_values == 0
    assert found(store, *BELOW) == list(BELOW)
    after = tier(wire)
    assert after.hits - before.hits == after.read_values > 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_the_next_process_finds_what_is_on_the_disk(daemon: Daemon, wire: Any, raw: Any, number: int) -> None:
    session = raw.RawSession(wire)
    store = RawStore(session, block_bytes=LARGE)
    fill(wire, store)
    next_process(daemon, signal.Signals(number))
    session.stream = wire.stream()
    assert session.stream.attach(session.token, reconnects=True).HasField("attach")
    is_open(wire)
    assert looked_up(store) == list(MANY)
    assert found(store, *BELOW) == list(BELOW)
    until(lambda: store_of(wire).leased == 0)
    assert store_of(wire).reserved == 0


def test_a_daemon_that_ends_in_order_writes_its_memory_to_the_disk(directory: Path, raw: Any) -> None:
    for turn in range(2):
        with Daemon(keeper=True, **options(directory)) as daemon:
            wire = raw.Wire(daemon.address)
            is_open(wire)
            store = RawStore(raw.RawSession(wire), block_bytes=LARGE)
            if turn == 0:
                for number in (1, 2):
                    data = block(number, LARGE)
                    request = store_pb2.BatchPutRequest(namespace_id=store.id, keys=keys(number), data=data)
                    assert store.ok("batch_put", request).statuses == b"\x01"
            else:
                assert store.acquire(1, 3, 2).found == b"\x05"
                assert found(store, 1, 2) == [1, 2]
            wire.close()


def test_removed_blocks_are_gone_from_the_disk_too(daemon: Daemon, wire: Any, raw: Any) -> None:
    session = raw.RawSession(wire)
    store = RawStore(session, block_bytes=LARGE)
    fill(wire, store)
    removed = MANY[:5]
    request = store_pb2.RemoveRequest(namespace_id=store.id, keys=keys(*removed, 7))
    assert store.ok("remove", request).num_blocks == len(removed)
    assert looked_up(store) == list(MANY[5:])
    assert found(store, *BELOW) == list(BELOW[5:])
    store.clear()
    assert looked_up(store) == []
    next_process(daemon, signal.SIGKILL)
    session.stream = wire.stream()
    assert session.stream.attach(session.token, reconnects=True).HasField("attach")
    is_open(wire)
    assert looked_up(store) == []


def test_a_namespace_that_gives_way_is_found_again(directory: Path, raw: Any) -> None:
    with Daemon(**options(directory) | {"max_store_namespaces": 1}) as daemon:
        wire = raw.Wire(daemon.address)
        is_open(wire)
        session = raw.RawSession(wire)
        RawStore(session).put(1, 2)
        session.close()
        has_values(wire, 2)
        other = raw.RawSession(wire)
        assert RawStore(other, "other").get(1) == (b"\0", b"")
        other.close()
        again = RawStore(raw.RawSession(wire))
        assert again.opened.num_blocks == 0
        assert again.get(1, 2, 3) == (b"\x03", blocks(1, 2))
        wire.close()


@pytest.mark.parametrize("face", ["blocking", "async"])
@pytest.mark.parametrize("transport", ["mapped", "region", "inline"])
def test_the_client_finds_blocks_below_memory(daemon: Daemon, wire: Any, raw: Any, face: Face, transport: str) -> None:
    session = raw.RawSession(wire)
    fill(wire, RawStore(session, block_bytes=LARGE))
    session.close()
    packed = [number.to_bytes(32, "little") for number in BELOW]
    out = np.zeros((len(BELOW), LARGE), np.uint8)

    async def work() -> None:
        namespace = StoreNamespace("m", LARGE)
        async with store_of_client(face, daemon.address, namespace, transport=transport) as store:
            found = await store.lookup(packed, max_wait_s=1000.0)
            assert found.num_leading == len(BELOW)
            assert found.num_in_memory < len(BELOW)
            assert (await store.get(packed[:8], out[:8], max_wait_s=1000.0)).all()
            assert [row.tobytes() for row in out[:8]] == [block(number, LARGE) for number in BELOW[:8]]
            lease = await store.acquire(packed[:8], leading_only=True, max_wait_s=1000.0)
            assert lease.found.all()
            assert 8 <= (await store.lookup(packed)).num_in_memory < len(BELOW)
            assert (await store.lookup(packed[:8])).num_in_memory == 8
            await lease.release()
            assert not (await store.lookup(packed[8:], max_wait_s=1e-9)).found.all(), "the disk is not that fast"
            for name in ("lookup", "acquire"):
                with pytest.raises(InvalidArgumentError) as refused:
                    await getattr(store, name)(packed, max_wait_s=-1.0)
                assert refused.value.field == "max_wait_s"

    asyncio.run(work())


@pytest.mark.parametrize("max_wait_s", [-1.0, float("nan"), float("inf")])
def test_waiting_times_that_are_none(wire: Any, raw: Any, max_wait_s: float) -> None:
    store = RawStore(raw.RawSession(wire))
    for name, kind in (
        ("lookup", store_pb2.LookupRequest),
        ("acquire", store_pb2.AcquireRequest),
        ("batch_get", store_pb2.BatchGetRequest),
    ):
        made: Any = kind
        answer = store.call(name, made(namespace_id=store.id, keys=keys(1), max_wait_s=max_wait_s))
        assert (answer.reason, answer.field) == ("INVALID_ARGUMENT", "max_wait_s")


def test_a_disk_that_cannot_be_opened_is_no_fault_of_the_daemon(directory: Path, raw: Any) -> None:
    (directory / "values").write_text("not a directory")
    with Daemon(**options(directory)) as daemon:
        wire = raw.Wire(daemon.address)
        store = RawStore(raw.RawSession(wire))
        assert store.put(1) == b"\x01"
        assert store.get(1, 2) == (b"\x01", block(1, BLOCK_BYTES))
        assert tier(wire).state in ("opening", "failed")
        wire.close()
