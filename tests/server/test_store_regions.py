"""Blocks between the store and regions, and the memory of the store in a client's own process."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from raw_store import BLOCK_BYTES, RawStore, block, blocks, fd_socket, keys, present, scatter
from waiting import until

from kvservice.launch import Daemon
from kvservice.v1 import inspect_pb2, regions_pb2, session_pb2, store_pb2

OBJECT = f"kvservice-store-{os.getpid()}"
REGION_BYTES = 1 << 20
DONE = bytes([store_pb2.PUT_STATUS_DONE])
UNREGISTER = regions_pb2.UnregisterRegionRequest(name="r")


@pytest.fixture
def store(raw_session: Any) -> RawStore:
    opened = RawStore(raw_session)
    opened.clear()
    return opened


OWNERS = ("the daemon's", "the client's")


@contextmanager
def memory_of_region(owner: str, store: RawStore, daemon: Daemon) -> Iterator[int]:
    """The descriptor of the memory of region "r", made by the daemon or an object of the client."""
    path = Path("/dev/shm", OBJECT)
    if owner == "the daemon's":
        descriptor = store.region(daemon.address, "r", REGION_BYTES)
    else:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, REGION_BYTES)
        register = regions_pb2.RegisterRegionRequest(name="r", key=OBJECT, byte_size=REGION_BYTES)
        store.session.ok("register_region", register)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def put(store: RawStore, numbers: tuple[int, ...], place: store_pb2.Scatter) -> Any:
    return store.call("batch_put", store_pb2.BatchPutRequest(namespace_id=store.id, keys=keys(*numbers), region=place))


def get(store: RawStore, numbers: tuple[int, ...], place: store_pb2.Scatter, **changes: Any) -> Any:
    request = store_pb2.BatchGetRequest(namespace_id=store.id, keys=keys(*numbers), region=place, **changes)
    return store.call("batch_get", request)


def test_whole_blocks(store: RawStore, daemon: Daemon) -> None:
    """They come back byte by byte, out of memory of either owner."""
    for owner in OWNERS:
        store.clear()
        with memory_of_region(owner, store, daemon) as file:
            check_whole_blocks(store, file)
        store.session.ok("unregister_region", UNREGISTER)


def check_whole_blocks(store: RawStore, file: int) -> None:
    os.pwrite(file, blocks(1, 2), 4096)
    assert put(store, (1, 2), scatter("r", [4096, 4096 + BLOCK_BYTES])).statuses == DONE * 2
    assert store.get(1, 2, verify=True) == (b"\x03", blocks(1, 2))
    before = os.pread(file, REGION_BYTES, 0)
    at = REGION_BYTES - BLOCK_BYTES
    answer = get(store, (9, 1, 8, 2), scatter("r", [0, at, 8, 100_000]), verify=True)
    assert (answer.found, answer.data) == (b"\x0a", b"")
    expected = bytearray(before)
    expected[at:] = block(1)
    expected[100_000 : 100_000 + BLOCK_BYTES] = block(2)
    assert os.pread(file, REGION_BYTES, 0) == expected, "the places of missing blocks are unchanged"


def test_blocks_in_pieces(store: RawStore, daemon: Daemon) -> None:
    """The pieces of a block come back in their order."""
    for owner in OWNERS:
        store.clear()
        with memory_of_region(owner, store, daemon) as file:
            check_blocks_in_pieces(store, file)
        store.session.ok("unregister_region", UNREGISTER)


def check_blocks_in_pieces(store: RawStore, file: int) -> None:
    sizes = (1, 4096, 8, BLOCK_BYTES - 4105)
    places = np.array([[70_000, 10_000, 3, 40_000], [75_000, 20_000, 30, 50_000]])
    for number, row in zip((1, 2), places, strict=True):
        begin = 0
        for at, size in zip(row, sizes, strict=True):
            os.pwrite(file, block(number)[begin : begin + size], at)
            begin += size
    assert put(store, (1, 2), scatter("r", places, sizes)).statuses == DONE * 2
    assert store.get(1, 2) == (b"\x03", blocks(1, 2))
    moved = places + 200_000
    assert get(store, (2, 1), scatter("r", moved, sizes)).found == b"\x03"
    parts = [os.pread(file, size, at) for at, size in zip(moved[0], sizes, strict=True)]
    assert b"".join(parts) == block(2)


def test_only_missing_blocks_are_read(store: RawStore, daemon: Daemon) -> None:
    """A block that is there keeps its bytes."""
    for owner in OWNERS:
        store.clear()
        with memory_of_region(owner, store, daemon) as file:
            check_only_missing_blocks_are_read(store, file)
        store.session.ok("unregister_region", UNREGISTER)


def check_only_missing_blocks_are_read(store: RawStore, file: int) -> None:
    store.put(1)
    os.pwrite(file, blocks(8, 2), 0)
    assert put(store, (1, 2), scatter("r", [0, BLOCK_BYTES])).statuses == b"\x02\x01"
    assert store.get(1, 2) == (b"\x03", blocks(1, 2))


HUGE = ((1 << 64) - 1, 1)
OVER = REGION_BYTES - BLOCK_BYTES + 1
WRONG = {
    "no region": (scatter("x", [0]), "UNKNOWN_REGION", "region.region"),
    "too few places": (scatter("r", []), "INVALID_ARGUMENT", "region.offsets"),
    "too many places": (scatter("r", [0, 0]), "INVALID_ARGUMENT", "region.offsets"),
    "half a place": (store_pb2.Scatter(region="r", offsets=bytes(7)), "INVALID_ARGUMENT", "region.offsets"),
    "over the end": (scatter("r", [OVER]), "INVALID_ARGUMENT", "region.offsets"),
    "far away": (scatter("r", [(1 << 64) - 1]), "INVALID_ARGUMENT", "region.offsets"),
    "pieces too small": (scatter("r", [0, 0], (1, 2)), "INVALID_ARGUMENT", "region.piece_bytes"),
    "an empty piece": (scatter("r", [0, 0], (0, BLOCK_BYTES)), "INVALID_ARGUMENT", "region.piece_bytes"),
    "pieces too large": (scatter("r", [0, 0], HUGE), "INVALID_ARGUMENT", "region.piece_bytes"),
    "one piece over the end": (
        scatter("r", [0, REGION_BYTES - 7], (BLOCK_BYTES - 8, 8)),
        "INVALID_ARGUMENT",
        "region.offsets",
    ),
}  # fmt: skip


def test_places_that_are_refused(store: RawStore, daemon: Daemon) -> None:
    """A refused call changes neither the store nor the region."""
    for owner in OWNERS:
        store.clear()
        with memory_of_region(owner, store, daemon) as file:
            check_places_that_are_refused(store, file)
        store.session.ok("unregister_region", UNREGISTER)


def check_places_that_are_refused(store: RawStore, file: int) -> None:
    store.put(1)
    before = os.pread(file, REGION_BYTES, 0)
    with each_row() as row:
        for number, (case, (place, reason, field)) in enumerate(WRONG.items(), 2):
            with row(case):
                for answer in (put(store, (number,), place), get(store, (1,), place)):
                    assert (answer.reason, answer.field) == (reason, field)
                assert store.lookup(number) == (0, b"\0")
                assert os.pread(file, REGION_BYTES, 0) == before
                assert store.put(number) == DONE, "no room stays reserved"
    # The last byte is inside.
    store.clear()
    assert put(store, (1,), scatter("r", [OVER - 1])).statuses == DONE
    assert put(store, (2,), scatter("r", [0, REGION_BYTES - 8], (BLOCK_BYTES - 8, 8))).statuses == DONE
    assert put(store, (), scatter("r", [])).statuses == b""
    request = store_pb2.BatchPutRequest(
        namespace_id=store.id, keys=keys(1), region=scatter("r", [0]), data=bytes(BLOCK_BYTES)
    )
    answer = store.call("batch_put", request)
    assert (answer.reason, answer.field) == ("INVALID_ARGUMENT", "data")


def test_an_object_that_its_client_truncates(store: RawStore) -> None:
    path = Path("/dev/shm", OBJECT)
    path.write_bytes(bytes(REGION_BYTES))
    register = regions_pb2.RegisterRegionRequest(name="r", key=OBJECT, byte_size=REGION_BYTES)
    store.session.ok("register_region", register)
    store.put(1)
    os.truncate(path, BLOCK_BYTES)
    for answer in (put(store, (2, 3), scatter("r", [0, 1])), get(store, (1,), scatter("r", [1]))):
        assert (answer.reason, answer.field) == ("REGION_SHRUNK", "region.region")
    assert store.lookup(2, 3) == (0, b"\0")
    assert store.put(2, 3) == DONE * 2
    path.unlink()


# ---- the mapped memory


@pytest.fixture
def memory(store: RawStore, daemon: Daemon) -> Iterator[mmap.mmap]:
    """The memory of the store, mapped for writing."""
    descriptor, num_bytes = store.descriptor(daemon.address, writable=True)
    with mmap.mmap(descriptor, num_bytes) as mapped:
        os.close(descriptor)
        yield mapped


def words(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def test_leased_blocks_lie_where_the_lease_says(store: RawStore, memory: mmap.mmap) -> None:
    store.put(1, 2)
    lease = store.acquire(1, 2)
    assert len(memory) == (16 << 20) + 4 * 4096
    opened = store.opened
    for number, offset, version in zip((1, 2), words(lease.offsets), words(lease.versions), strict=True):
        assert memory[offset : offset + BLOCK_BYTES] == block(number)
        slab, inside = divmod(offset, opened.slab_bytes)
        record = slab * opened.slab_bytes + 64 * ((inside - opened.first_block) // opened.block_stride)
        assert memory[record : record + 8] == version.to_bytes(8, "little")


def test_blocks_written_in_the_mapped_memory(store: RawStore, memory: mmap.mmap) -> None:
    store.put(1)
    reserved = store.reserve(1, 2, 3, 2)
    assert reserved.statuses == b"\x02\x01\x01\x03"
    for number, offset in zip((2, 3), words(reserved.offsets), strict=True):
        memory[offset : offset + BLOCK_BYTES] = block(number)
    assert store.lookup(2) == (0, b"\0"), "it is not complete"
    assert store.put(2) == b"\x03"
    commit = store_pb2.StoreCommitRequest(request_id=9, reservation_id=reserved.reservation_id)
    assert store.ok("commit", commit).num_blocks == 2
    assert store.ok("commit", commit).num_blocks == 2, "the same request"
    assert store.get(1, 2, 3, verify=True) == (b"\x07", blocks(1, 2, 3))


def test_a_part_of_a_reservation_is_published(store: RawStore, memory: mmap.mmap) -> None:
    reserved = store.reserve(1, 2, 3)
    place = words(reserved.offsets)[1]
    memory[place : place + BLOCK_BYTES] = block(2)
    for wrong in (b"\0\0", bytes(3)):
        request = store_pb2.StoreCommitRequest(reservation_id=reserved.reservation_id, written=wrong)
        assert store.call("commit", request).field == "written"
    request.written = b"\x02"
    assert store.ok("commit", request).num_blocks == 1
    assert store.lookup(1, 2, 3) == (0, b"\x02")
    answer = store.call("commit", request)
    assert (answer.code, answer.reason, answer.field) == ("NOT_FOUND", "UNKNOWN_RESERVATION", "reservation_id")
    assert store.put(1, 3) == DONE * 2


@pytest.mark.usefixtures("memory")
def test_an_aborted_reservation(store: RawStore) -> None:
    reserved = store.reserve(1)
    for _ in range(2):
        store.ok("abort", store_pb2.AbortRequest(reservation_id=reserved.reservation_id))
    assert store.put(1) == DONE


def test_a_block_that_was_overwritten_is_a_miss(store: RawStore, memory: mmap.mmap) -> None:
    store.put(1, 2, 3)
    offset = words(store.acquire(2).offsets)[0]
    memory[offset + 100] ^= 1
    assert store.get(1, 2, 3, verify=True) == (b"\x05", blocks(1, 3))
    assert store.lookup(1, 2, 3) == (1, b"\x05")


def test_only_who_maps_for_writing_reserves(store: RawStore, daemon: Daemon) -> None:
    descriptor, num_bytes = store.descriptor(daemon.address, writable=False)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, num_bytes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(descriptor, b"x", 0)
    mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ).close()
    os.close(descriptor)
    answer = store.call("reserve", store_pb2.ReserveRequest(namespace_id=store.id, keys=keys(1)))
    assert (answer.reason, answer.code) == ("STORE_NOT_SHARED", "FAILED_PRECONDITION")


WRITER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.send(bytes.fromhex(sys.argv[2]))
    fetched = socket.recv_fds(connection, 1, 1)[1]
print(len(fetched), flush=True)
sys.stdin.read()
"""


def test_a_lost_writers_room_waits_for_its_process(raw: Any, wire: Any, daemon: Daemon, store: RawStore) -> None:
    """A frozen process could write there at any time."""
    path = fd_socket(daemon.address)
    session = raw.RawSession(wire)
    lost = RawStore(session)
    present(daemon.address, session.token)
    token = lost.ok("map_store", store_pb2.MapStoreRequest(writable=True)).handover_token
    command = [sys.executable, "-S", "-c", WRITER, path, token.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"1\n"
        lost.reserve(1)
        session.close()
        # The block goes elsewhere.
        assert store.put(1) == b"\x01"
        until(lambda: wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).store.quarantined == 1)
        writer.kill()
    until(lambda: wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest()).store.quarantined == 0)
    assert store.get(1) == (b"\x01", block(1))


def test_a_token_ends_with_the_session(raw: Any, wire: Any, daemon: Daemon) -> None:
    session = raw.RawSession(wire)
    token = RawStore(session).ok("map_store", store_pb2.MapStoreRequest(writable=True)).handover_token
    wire.unary("close", session_pb2.CloseRequest(session_token=session.token))
    assert present(daemon.address, token) == (b"", [])
