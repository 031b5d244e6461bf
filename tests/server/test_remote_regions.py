"""Regions of clients on other hosts: their calls, their limits, their end, and checksums of what arrived there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from raw_store import BLOCK_BYTES, RawStore, block, blocks, keys, scatter
from raw_wire import RawSession, Refusal, Wire
from transfer_rig import LOOPBACK, TRANSFERS, Side, engines_of, is_gone, listening
from waiting import until

pytest.importorskip("mooncake.engine")

from kvservice import _ext
from kvservice.config import ServeConfig
from kvservice.launch import Daemon
from kvservice.server.listening import ConfigError, check_addresses
from kvservice.server.remote_memory import peer_address
from kvservice.transfer import READ, WRITE, Range
from kvservice.v1 import session_pb2, shared_memory_pb2, store_pb2, transfer_pb2

MIB = 1 << 20
DONE, DAMAGED = bytes([store_pb2.PUT_STATUS_DONE]), bytes([store_pb2.PUT_STATUS_DAMAGED])


@pytest.fixture(scope="module")
def daemon(free_ports: Any) -> Iterator[tuple[Daemon, str]]:
    (port,) = free_ports(1)
    address = f"{LOOPBACK}:{port}"
    options = TRANSFERS | {"tcp_address": address, "max_transfers": 3, "max_regions": 4, "max_region_mib": 2}
    with Daemon(**options) as running:
        yield running, address


@pytest.fixture(scope="module")
def free_ports() -> Any:
    import ports

    return ports.free_ports


@pytest.fixture
def session(daemon: tuple[Daemon, str]) -> Iterator[RawSession]:
    wire = Wire(daemon[1])
    opened = RawSession(wire)
    yield opened
    opened.close()
    until(lambda: not engines_of(daemon[0].process.pid))
    wire.close()


def create(session: RawSession, name: str = "r", byte_size: int = MIB) -> Any:
    request = transfer_pb2.CreateRemoteRegionRequest(name=name, byte_size=byte_size)
    return session.call("create_remote_region", request)


def remove(session: RawSession, name: str) -> None:
    session.ok("remove_remote_region", transfer_pb2.RemoveRemoteRegionRequest(name=name))


def checksums(*data: bytes) -> bytes:
    packed = np.frombuffer(b"".join(data), np.uint8)
    offsets = np.arange(len(data), dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    return _ext.store_checksums(packed.ctypes.data, offsets.tobytes(), BLOCK_BYTES, 1)


class Client:
    """The engine of a client, for a region of its session."""

    def __init__(self, region: Any) -> None:
        self.side, self._region = Side(MIB, shared=False), region

    def move(self, operation: Any, offset: int, num_bytes: int) -> None:
        region, process = self._region, self.side.process
        ticket = process.start(operation, region.segment, region.address, [Range(offset, offset, num_bytes)])
        process.wait(ticket, 60.0)


@pytest.fixture
def store(session: RawSession) -> RawStore:
    return RawStore(session, "remote")


@pytest.fixture
def client(session: RawSession) -> Iterator[Client]:
    made = Client(create(session))
    yield made
    made.side.process.kill()


def put(store: RawStore, sums: bytes, *numbers: int, offsets: tuple[int, ...]) -> Any:
    request = store_pb2.BatchPutRequest(
        namespace_id=store.id, keys=keys(*numbers), region=scatter("r", list(offsets)), checksums=sums
    )
    return store.call("batch_put", request)


def test_blocks_arrive_byte_by_byte(store: RawStore, client: Client) -> None:
    for i, number in enumerate((1, 2, 3)):
        client.side.bytes[i * BLOCK_BYTES :][:BLOCK_BYTES] = np.frombuffer(block(number), np.uint8)
    client.move(WRITE, 0, 3 * BLOCK_BYTES)
    sums = checksums(block(1), block(2), block(3))
    assert put(store, sums, 1, 2, 3, offsets=(0, BLOCK_BYTES, 2 * BLOCK_BYTES)).statuses == DONE * 3
    assert store.get(1, 2, 3) == (b"\7", blocks(1, 2, 3))
    client.side.bytes[:] = 0
    request = store_pb2.BatchGetRequest(
        namespace_id=store.id, keys=keys(3, 9, 1), region=scatter("r", [0, 8192, 65536]), return_checksums=True
    )
    answer = store.ok("batch_get", request)
    assert (answer.found, answer.checksums) == (b"\5", checksums(block(3), block(1)))
    client.move(READ, 0, MIB)
    assert client.side.bytes[:BLOCK_BYTES].tobytes() == block(3)
    assert client.side.bytes[65536:][:BLOCK_BYTES].tobytes() == block(1)
    store.clear()


def test_bytes_with_another_checksum_are_not_stored(store: RawStore, client: Client) -> None:
    client.side.bytes[:BLOCK_BYTES] = np.frombuffer(block(1), np.uint8)
    client.side.bytes[BLOCK_BYTES:][:BLOCK_BYTES] = np.frombuffer(block(2), np.uint8)
    client.side.bytes[BLOCK_BYTES + 100] ^= 1
    client.move(WRITE, 0, 2 * BLOCK_BYTES)
    sums = checksums(block(1), block(2))
    assert put(store, sums, 1, 2, offsets=(0, BLOCK_BYTES)).statuses == DONE + DAMAGED
    assert store.get(1, 2) == (b"\1", block(1))
    assert store.lookup(2) == (0, b"\0")
    # The room of the damaged block is free again, and its key can be stored.
    assert store.put(2) == DONE
    assert store.get(2) == (b"\1", block(2))
    store.clear()


def test_blocks_in_messages_are_compared_too(store: RawStore) -> None:
    request = store_pb2.BatchPutRequest(
        namespace_id=store.id, keys=keys(1, 2), data=blocks(1, 2), checksums=checksums(block(2), block(2))
    )
    assert store.ok("batch_put", request).statuses == DAMAGED + DONE
    assert store.lookup(1, 2) == (0, b"\2")
    answer = store.ok(
        "batch_get", store_pb2.BatchGetRequest(namespace_id=store.id, keys=keys(1, 2), return_checksums=True)
    )
    assert (answer.found, answer.data, answer.checksums) == (b"\2", block(2), checksums(block(2)))
    store.clear()


@pytest.mark.parametrize(("sums", "field"), [(b"", "checksums"), (bytes(7), "checksums"), (bytes(16), "checksums")])
def test_checksums_are_needed_one_for_each_block(store: RawStore, client: Client, sums: bytes, field: str) -> None:
    assert client.side.process.is_running
    answer = put(store, sums, 1, offsets=(0,))
    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", field)
    assert store.lookup(1) == (0, b"\0")


def test_limits_of_remote_regions(daemon: tuple[Daemon, str], session: RawSession) -> None:
    assert create(session, "a", MIB).byte_size == MIB
    assert create(session, "b", MIB - 4095).byte_size == MIB, "whole pages"
    answer = create(session, "c", 1)
    assert (answer.reason, answer.field, answer.metadata["limit"]) == ("QUOTA_EXCEEDED", "byte_size", "max_region_mib")
    other = RawSession(session.wire)
    assert create(other, "a", 4096).byte_size == 4096, "names are each session's own"
    answer = create(other, "b", 4096)
    assert (answer.reason, answer.metadata["limit"]) == ("QUOTA_EXCEEDED", "max_transfers")
    assert len(engines_of(daemon[0].process.pid)) == 3
    remove(session, "a")
    until(lambda: len(engines_of(daemon[0].process.pid)) == 2)
    assert create(other, "b", 4096).byte_size == 4096
    remove(session, "no such region")
    other.close()


@pytest.mark.parametrize(
    ("name", "byte_size", "field"), [("", 1, "name"), ("x" * 257, 1, "name"), ("r", 0, "byte_size")]
)
def test_arguments_that_are_refused(session: RawSession, name: str, byte_size: int, field: str) -> None:
    answer = create(session, name, byte_size)
    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", field)


def test_a_repeated_call_returns_the_same_region(daemon: tuple[Daemon, str], session: RawSession) -> None:
    assert create(session) == create(session)
    assert len(engines_of(daemon[0].process.pid)) == 1


def test_the_region_of_another_session_is_unknown(session: RawSession, store: RawStore) -> None:
    other = RawSession(session.wire)
    create(other)
    answer = put(store, bytes(8), 1, offsets=(0,))
    assert (answer.code, answer.reason) == ("NOT_FOUND", "UNKNOWN_REGION")
    other.close()


def test_regions_of_this_host_are_not_for_clients_over_tcp(daemon: tuple[Daemon, str], session: RawSession) -> None:
    near = Wire(daemon[0].address)
    local = RawStore(RawSession(near), "remote")
    local.session.ok("create_region", shared_memory_pb2.CreateRegionRequest(name="local", byte_size=MIB))
    request = store_pb2.BatchGetRequest(
        namespace_id=local.id, keys=keys(1), region=scatter("local", [0]), session_token=local.session.token
    )
    assert session.wire.unary("store_batch_get", request).reason == "REGIONS_NOT_ALLOWED"
    local.session.close()
    near.close()


def test_the_engine_ends_with_its_session(daemon: tuple[Daemon, str]) -> None:
    wire = Wire(daemon[1])
    opened = RawSession(wire)
    create(opened)
    (engine,) = engines_of(daemon[0].process.pid)
    assert {host for host, _ in listening(engine)} == {LOOPBACK}
    wire.unary("close", session_pb2.CloseRequest(session_token=opened.token))
    until(lambda: is_gone(engine))
    wire.close()


def test_a_session_without_a_stream_loses_its_engine(daemon: tuple[Daemon, str]) -> None:
    """The engine of a killed or frozen client does not outlive the grace time."""
    wire = Wire(daemon[1])
    opened = RawSession(wire)
    create(opened)
    (engine,) = engines_of(daemon[0].process.pid)
    opened.stream.cancel()
    until(lambda: is_gone(engine))
    wire.close()


def test_a_daemon_without_engines_says_so(free_ports: Any) -> None:
    (port,) = free_ports(1)
    with Daemon(**TRANSFERS | {"tcp_address": f"{LOOPBACK}:{port}", "transfer_address": ""}):
        wire = Wire(f"{LOOPBACK}:{port}")
        opened = RawSession(wire)
        answer = create(opened)
        assert isinstance(answer, Refusal)
        assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "TRANSFER_OFF")
        opened.close()
        wire.close()


def test_addresses_that_other_hosts_reach_need_trust() -> None:
    for host, insecure, refused in (("127.0.0.1", False, False), ("10.0.0.1", False, True), ("10.0.0.1", True, False)):
        config = ServeConfig(tcp_address="", transfer_address=f"{host}:0", transfer_insecure=insecure)
        if refused:
            with pytest.raises(ConfigError, match="transfer_insecure"):
                check_addresses(config)
        else:
            check_addresses(config)


@pytest.mark.parametrize("address", ["localhost:1", "0.0.0.0:1", "10.0.0.1", "10.0.0.1:65536", "[::1]:1", ":1"])
def test_transfer_addresses_that_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="IPv4"):
        ServeConfig(transfer_address=address)


def test_the_last_port() -> None:
    assert ServeConfig(transfer_address="127.0.0.1:65280", transfer_ports=256)
    with pytest.raises(ValueError, match="above 65535"):
        ServeConfig(transfer_address="127.0.0.1:65281", transfer_ports=256)


def test_names_of_peers() -> None:
    assert peer_address("ipv4:10.0.0.1:4711") == "10.0.0.1"
    assert peer_address("ipv6:%5B::1%5D:4711") == "::1"
    assert peer_address("ipv6:[::ffff:10.0.0.1]:4711") == "10.0.0.1"
    assert peer_address("unix:/run/x.sock") == ""
