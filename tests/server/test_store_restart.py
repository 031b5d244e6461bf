"""The daemon is killed, and its store goes on: blocks, leases, reservations, and room that a lost writer may change."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kept_daemon import next_process
from raw_store import BLOCK_BYTES, RawStore, block, blocks, fd_socket, keys, present
from raw_wire import Refusal
from store_daemons import SMALL_STORE
from waiting import until

from kvservice.launch import Daemon
from kvservice.v1 import inspect_pb2, store_pb2

LARGE = 512 << 10
# Blocks of this size that more than fill the store.
MANY = range(100, 140)


@pytest.fixture(scope="module")
def kept_daemon() -> Iterator[Daemon]:
    with Daemon(keeper=True, **SMALL_STORE | {"share_store": "write", "session_grace_s": 60}) as daemon:
        yield daemon


@pytest.fixture
def wire(kept_daemon: Daemon, raw: Any) -> Iterator[Any]:
    """A connection to the daemon with a keeper."""
    opened = raw.Wire(kept_daemon.address)
    yield opened
    opened.close()


def resumed(wire: Any, session: Any) -> None:
    session.stream = wire.stream()
    reply = session.stream.attach(session.token, reconnects=True)
    assert reply.HasField("attach"), reply


def test_a_lease_and_a_reservation_go_on(kept_daemon: Daemon, raw: Any, wire: Any) -> None:
    """The client has mapped the memory once, and goes on to read and to write there."""
    session = raw.RawSession(wire)
    store = RawStore(session)
    assert store.put(1, 2) == b"\x01\x01"
    descriptor, num_bytes = store.descriptor(kept_daemon.address, writable=True)
    memory = mmap.mmap(descriptor, num_bytes)
    os.close(descriptor)
    lease = store.acquire(1, 2, ttl_s=30.0)
    reserved = store.reserve(3, 4)
    places = [int(offset) for offset in np.frombuffer(reserved.offsets, "<u8")]
    memory[places[0] : places[0] + BLOCK_BYTES] = block(3)

    next_process(kept_daemon, signal.SIGKILL)

    resumed(wire, session)
    memory[places[1] : places[1] + BLOCK_BYTES] = block(4)
    store.ok("renew", store_pb2.RenewRequest(lease_id=lease.lease_id, ttl_s=20.0))
    for number, offset in zip((1, 2), np.frombuffer(lease.offsets, "<u8"), strict=True):
        assert memory[int(offset) : int(offset) + BLOCK_BYTES] == block(number)
    assert store.acquire(1, 2).versions == lease.versions
    committed = store.ok("commit", store_pb2.StoreCommitRequest(reservation_id=reserved.reservation_id))
    assert committed.num_blocks == 2
    assert store.get(1, 2, 3, 4, verify=True) == (b"\x0f", blocks(1, 2, 3, 4))
    store.clear()
    session.close()


WRITER = """
import mmap, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.send(bytes.fromhex(sys.argv[2]))
    (descriptor,) = socket.recv_fds(connection, 1, 1)[1]
memory = mmap.mmap(descriptor, int(sys.argv[3]))
print("mapped", flush=True)
for line in sys.stdin:
    begin, num_bytes = map(int, line.split())
    memory[begin : begin + num_bytes] = bytes(num_bytes)
    print("written", flush=True)
"""


@pytest.mark.slow
def test_a_writer_from_before_the_kill_changes_no_other_block(kept_daemon: Daemon, raw: Any, wire: Any) -> None:
    """Its session is lost while the daemon starts again, twice. It was frozen, and goes on."""
    session, path = raw.RawSession(wire), fd_socket(kept_daemon.address)
    lost = RawStore(session, "large", block_bytes=LARGE)
    present(kept_daemon.address, session.token)
    mapped = lost.ok("map_store", store_pb2.MapStoreRequest(writable=True))
    command = [sys.executable, "-S", "-c", WRITER, path, mapped.handover_token.hex(), str(mapped.num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == "mapped\n"
        (offset,) = np.frombuffer(lost.reserve(1).offsets, "<u8")
        next_process(kept_daemon, signal.SIGKILL)
        session.close()
        until(lambda: quarantined(wire) == 1)
        next_process(kept_daemon, signal.SIGKILL)
        assert quarantined(wire) == 1
        other = raw.RawSession(wire)
        store = RawStore(other, "large", block_bytes=LARGE)
        for number in MANY:
            data = block(number, LARGE)
            request = store_pb2.BatchPutRequest(namespace_id=store.id, keys=keys(number), data=data)
            assert store.ok("batch_put", request).statuses == b"\x01"
        writer.stdin.write(f"{offset} {LARGE}\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "written\n"
        there = [number for number in MANY if store.get(number, verify=True) == (b"\x01", block(number, LARGE))]
        assert len(there) == store.clear() > 20
        writer.kill()
    until(lambda: quarantined(wire) == 0)
    other.close()


def quarantined(wire: Any) -> int | None:
    """Return the number of blocks in quarantine, or None while the observer starts."""
    answer = wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest())
    return None if isinstance(answer, Refusal) else answer.store.quarantined
