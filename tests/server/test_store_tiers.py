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
from each_row import each_row
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
# The values that are on the disk only.
BELOW = MANY[:16]


def options(directory: Path) -> dict[str, Any]:
    return SMALL_STORE | {
        "disk": str(directory),
        "disk_gib": 0.25,
        "disk_admission": "all",
        "session_grace_s": 60,
        # A disk that never opens must not hold the end of its daemon.
        "drain_timeout_s": 2,
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "disk"
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(keeper=True, **options(tmp_path_factory.mktemp("disk"))) as opened:
        yield opened


@pytest.fixture
def wire(daemon: Daemon, raw: Any) -> Iterator[Any]:
    opened = raw.Wire(daemon.address)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def filled(daemon: Daemon, raw: Any) -> str:
    """The model of a namespace with all of MANY, whose session stays open."""
    fill(raw.Wire(daemon.address), raw)
    return "filled"


def attached(wire: Any, raw: Any, model: str) -> tuple[Any, RawStore]:
    session = raw.RawSession(wire)
    return session, RawStore(session, model, block_bytes=LARGE)


def tier(wire: Any) -> Any:
    (found,) = wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).tiers
    return found


def is_open(wire: Any) -> None:
    until(lambda: tier(wire).state == "open")


def has_values(wire: Any, count: int) -> None:
    until(lambda: tier(wire).num_values >= count)


def store_of(wire: Any) -> Any:
    return wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).store


def fill(wire: Any, raw: Any) -> None:
    _, store = attached(wire, raw, "filled")
    put_many(wire, store, MANY)
    assert looked_up(store) == list(MANY)


def put_many(wire: Any, store: RawStore, numbers: range) -> None:
    """Store more than there is memory for. The disk keeps up: it gets what leaves memory soon."""
    is_open(wire)
    before = tier(wire).num_values
    for count, number in enumerate(numbers):
        request = store_pb2.BatchPutRequest(namespace_id=store.id, keys=keys(number), data=block(number, LARGE))
        assert store.ok("batch_put", request).statuses == b"\x01"
        has_values(wire, before + count - 28)


def looked_up(store: RawStore, numbers: range = MANY) -> list[int]:
    """Return which of these are in memory or on the disk."""
    there = []
    for first in range(numbers[0], numbers[-1] + 1, 16):
        some = range(first, min(first + 16, numbers[-1] + 1))
        bits = int.from_bytes(store.lookup(*some)[1], "little")
        there += [number for i, number in enumerate(some) if bits >> i & 1]
    return there


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


def test_more_than_memory_has_room_for_is_found(wire: Any, raw: Any, filled: str) -> None:
    session, store = attached(wire, raw, filled)
    before = tier(wire)
    assert found(store, *BELOW) == list(BELOW)
    after = tier(wire)
    assert after.hits - before.hits == after.read_values - before.read_values > 0
    session.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR1])
def test_the_next_process_finds_what_is_on_the_disk(
    daemon: Daemon, wire: Any, raw: Any, filled: str, number: int
) -> None:
    session, store = attached(wire, raw, filled)
    found(store, *MANY[-16:])  # push others out of memory
    # What has come up has pushed blocks out of memory, which a slow disk may not have got.
    there = looked_up(store)
    assert len(there) > 40
    next_process(daemon, signal.Signals(number))
    session.stream = wire.stream()
    assert session.stream.attach(session.token, reconnects=True).HasField("attach")
    is_open(wire)
    assert looked_up(store) == there
    assert found(store, *BELOW) == list(BELOW)
    until(lambda: store_of(wire).leased == 0)
    assert store_of(wire).reserved == 0
    session.close()


@pytest.mark.slow
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
    session, store = attached(wire, raw, "removed")
    numbers = range(200, 248)
    put_many(wire, store, numbers)
    # Blocks of earlier tests leave memory first, so a slow disk may lose some.
    there = looked_up(store, numbers)
    assert len(there) > 40
    request = store_pb2.RemoveRequest(namespace_id=store.id, keys=keys(*there[:5], 7))
    assert store.ok("remove", request).num_blocks == 5
    assert looked_up(store, numbers) == there[5:]
    assert found(store, *there[:12]) == there[5:12]
    store.clear()
    assert looked_up(store, numbers) == []
    next_process(daemon, signal.SIGKILL)
    session.stream = wire.stream()
    assert session.stream.attach(session.token, reconnects=True).HasField("attach")
    is_open(wire)
    assert looked_up(store, numbers) == []
    session.close()


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


def test_the_client_finds_blocks_below_memory(daemon: Daemon, wire: Any, raw: Any, filled: str) -> None:
    """With each transport and both APIs, byte by byte."""
    session, store = attached(wire, raw, filled)
    faces: tuple[Face, ...] = ("blocking", "asyncio")
    with each_row() as row:
        for face in faces:
            for transport in ("mapped", "region", "inline"):
                with row((face, transport)):
                    found(store, *MANY[-32:])  # push others out of memory
                    asyncio.run(read_below(face, daemon.address, filled, transport))
    session.close()


async def read_below(face: Face, address: str, model: str, transport: str) -> None:
    packed = [number.to_bytes(32, "little") for number in BELOW]
    out = np.zeros((len(BELOW), LARGE), np.uint8)
    namespace = StoreNamespace(model, LARGE)
    async with store_of_client(face, address, namespace, transport=transport) as store:
        looked_up = await store.lookup(packed, max_wait_s=1000.0)
        assert looked_up.num_leading == len(BELOW)
        assert looked_up.num_in_memory < len(BELOW)
        assert (await store.get(packed[:8], out[:8], max_wait_s=1000.0)).all()
        assert [one.tobytes() for one in out[:8]] == [block(number, LARGE) for number in BELOW[:8]]
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


def test_waiting_times_that_are_none(wire: Any, raw: Any) -> None:
    session = raw.RawSession(wire)
    store = RawStore(session)
    kinds: dict[str, Any] = {
        "lookup": store_pb2.LookupRequest,
        "acquire": store_pb2.AcquireRequest,
        "batch_get": store_pb2.BatchGetRequest,
    }
    with each_row() as row:
        for max_wait_s in (-1.0, float("nan"), float("inf")):
            for name, kind in kinds.items():
                with row((name, max_wait_s)):
                    request = kind(namespace_id=store.id, keys=keys(1), max_wait_s=max_wait_s)
                    answer = store.call(name, request)
                    assert (answer.reason, answer.field) == ("INVALID_ARGUMENT", "max_wait_s")
    session.close()


def test_a_disk_that_cannot_be_opened_is_no_fault_of_the_daemon(directory: Path, raw: Any) -> None:
    (directory / "values").write_text("not a directory")
    with Daemon(**options(directory)) as daemon:
        wire = raw.Wire(daemon.address)
        store = RawStore(raw.RawSession(wire))
        assert store.put(1) == b"\x01"
        assert store.get(1, 2) == (b"\x01", block(1, BLOCK_BYTES))
        assert tier(wire).state in ("opening", "failed")
        wire.close()
