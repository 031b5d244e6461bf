"""Regions of clients on other hosts: their calls, their limits, their end, and checksums of what arrived there."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from raw_store import BLOCK_BYTES, RawStore, block, blocks, keys, scatter
from raw_wire import RawSession, Refusal, Wire
from transfer_rig import LOOPBACK, TRANSFERS, Side, engines_of, is_gone, listening
from waiting import until

from kvservice import _ext
from kvservice.config import ServeConfig
from kvservice.launch import Daemon, StartError
from kvservice.v1 import regions_pb2, session_pb2, store_pb2, transfer_pb2

pytestmark = pytest.mark.usefixtures("transfer_engine")

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


def create(session: RawSession, name: str = "r", byte_size: int = MIB, **changes: Any) -> Any:
    where: dict[str, Any] = {"remote_bytes": MIB, "ports": [9], "address": 1 << 40}
    request = transfer_pb2.CreateRemoteRegionRequest(name=name, byte_size=byte_size, **where | changes)
    return session.call("create_remote_region", request)


def remove(session: RawSession, name: str) -> None:
    session.ok("remove_remote_region", transfer_pb2.RemoveRemoteRegionRequest(name=name))


def checksums(*data: bytes) -> bytes:
    packed = np.frombuffer(b"".join(data), np.uint8)
    offsets = np.arange(len(data), dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    return _ext.store_checksums(packed.ctypes.data, offsets.tobytes(), BLOCK_BYTES, 1)


@pytest.fixture
def store(session: RawSession) -> RawStore:
    return RawStore(session, "remote")


@pytest.fixture
def client(session: RawSession) -> Iterator[Side]:
    """The client's engine, for a region of its session. Three blocks fit into the daemon's memory for it."""
    made = Side(MIB, shared=True, num_engines=2)
    answer = create(session, byte_size=3 * BLOCK_BYTES, ports=made.ports, address=made.process.address)
    assert not isinstance(answer, Refusal), answer
    yield made
    made.process.kill()


def put(store: RawStore, sums: bytes, *numbers: int, offsets: tuple[int, ...]) -> Any:
    request = store_pb2.BatchPutRequest(
        namespace_id=store.id, keys=keys(*numbers), region=scatter("r", list(offsets)), checksums=sums
    )
    return store.call("batch_put", request)


def fill(client: Side, offset: int, data: bytes) -> None:
    client.bytes[offset : offset + len(data)] = np.frombuffer(data, np.uint8)


def get(store: RawStore, *numbers: int, offsets: tuple[int, ...], pieces: tuple[int, ...] = ()) -> Any:
    request = store_pb2.BatchGetRequest(
        namespace_id=store.id, keys=keys(*numbers), region=scatter("r", list(offsets), pieces), return_checksums=True
    )
    return store.call("batch_get", request)


def test_blocks_arrive_byte_by_byte(store: RawStore, client: Side) -> None:
    """Eleven blocks take four rounds of the daemon's slots."""
    numbers = tuple(range(1, 12))
    places = tuple(BLOCK_BYTES * (2 * i + i // 5) for i in range(len(numbers)))
    for number, place in zip(numbers, places, strict=True):
        fill(client, place, block(number))
    sums = checksums(*(block(number) for number in numbers))
    before = client.bytes.copy()
    assert put(store, sums, *numbers, offsets=places).statuses == DONE * 11
    np.testing.assert_array_equal(client.bytes, before)
    assert store.get(*numbers)[1] == blocks(*numbers)
    client.bytes[:] = 0
    answer = get(store, *numbers, 99, offsets=(*places[::-1], 0))
    assert answer.found == b"\xff\x07"
    assert answer.checksums == sums
    for number, place in zip(numbers, places[::-1], strict=True):
        assert client.bytes[place : place + BLOCK_BYTES].tobytes() == block(number)
        client.bytes[place : place + BLOCK_BYTES] = 0
    assert not client.bytes.any(), "nothing else was written"
    store.clear()


@pytest.mark.slow
def test_blocks_in_pieces(store: RawStore, client: Side) -> None:
    pieces = (1, BLOCK_BYTES - 4097, 4096)
    offsets = (500, 600, 100_000, 0, 200_000, 300_000)
    for number, (a, b, c) in ((1, offsets[:3]), (2, offsets[3:])):
        data = block(number)
        for place, begin, end in ((a, 0, 1), (b, 1, BLOCK_BYTES - 4096), (c, BLOCK_BYTES - 4096, BLOCK_BYTES)):
            fill(client, place, data[begin:end])
    request = store_pb2.BatchPutRequest(
        namespace_id=store.id,
        keys=keys(1, 2),
        region=scatter("r", list(offsets), pieces),
        checksums=checksums(block(1), block(2)),
    )
    before = client.bytes.copy()
    assert store.ok("batch_put", request).statuses == DONE * 2
    assert store.get(1, 2)[1] == blocks(1, 2)
    client.bytes[:] = 0
    assert get(store, 1, 2, offsets=offsets, pieces=pieces).found == b"\3"
    np.testing.assert_array_equal(client.bytes, before)
    store.clear()


def test_bytes_with_another_checksum_are_not_stored(store: RawStore, client: Side) -> None:
    fill(client, 0, blocks(1, 2))
    client.bytes[BLOCK_BYTES + 100] ^= 1
    sums = checksums(block(1), block(2))
    assert put(store, sums, 1, 2, offsets=(0, BLOCK_BYTES)).statuses == DONE + DAMAGED
    assert store.get(1, 2) == (b"\1", block(1))
    assert store.lookup(2) == (0, b"\0")
    # The room of the damaged block is free again, and its key can be stored.
    assert store.put(2) == DONE
    assert store.get(2) == (b"\1", block(2))
    store.clear()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "way"), [("killed", "put"), ("not registered", "get")])
def test_an_engine_that_is_gone_stores_nothing_and_is_not_used_again(
    daemon: tuple[Daemon, str], store: RawStore, client: Side, way: str, how: str
) -> None:
    store.put(1)
    if how == "killed":
        client.process.kill()
        until(lambda: is_gone(client.process.pid))
        offset = 0
    else:
        remove(store.session, "r")
        address = client.process.address
        create(store.session, byte_size=3 * BLOCK_BYTES, ports=client.ports, address=address, remote_bytes=4 * MIB)
        offset = 2 * MIB
    for _ in range(2):
        if way == "put":
            answer = put(store, checksums(block(7)), 7, offsets=(offset,))
        else:
            answer = get(store, 1, offsets=(offset,))
        assert (answer.code, answer.reason) == ("UNAVAILABLE", "TRANSFER_FAILED")
    assert store.lookup(7) == (0, b"\0")
    assert store.get(1) == (b"\1", block(1))
    assert store.put(7) == DONE, "its room is free again"
    until(lambda: not engines_of(daemon[0].process.pid))
    store.clear()


@pytest.mark.slow
def test_the_daemons_engine_does_not_listen(daemon: tuple[Daemon, str], session: RawSession) -> None:
    create(session)
    (engine,) = engines_of(daemon[0].process.pid)
    assert listening(engine) == set()


@pytest.mark.slow
def test_blocks_that_do_not_fit_into_a_slot_are_refused(session: RawSession, client: Side) -> None:
    large = RawStore(session, "large", block_bytes=BLOCK_BYTES + 1)
    assert client.process.is_running
    sums = np.zeros(1, np.uint64).tobytes()
    answer = put(large, sums, 1, offsets=(0,))
    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "region.region")
    assert large.lookup(1) == (0, b"\0")


@pytest.mark.slow
def test_places_outside_the_clients_memory_are_refused(store: RawStore, client: Side) -> None:
    assert client.process.is_running
    fits, over = (MIB - BLOCK_BYTES,), (MIB - BLOCK_BYTES + 1,)
    fill(client, *fits, block(1))
    assert put(store, checksums(block(1)), 1, offsets=fits).statuses == DONE
    answer = put(store, checksums(block(2)), 2, offsets=over)
    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "region.offsets")
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


@pytest.mark.slow
def test_checksums_are_needed_one_for_each_block(store: RawStore, client: Side) -> None:
    assert client.process.is_running
    for sums in (b"", bytes(7), bytes(16)):
        answer = put(store, sums, 1, offsets=(0,))
        assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "checksums"), sums
        assert store.lookup(1) == (0, b"\0")


def test_limits_of_remote_regions(daemon: tuple[Daemon, str], session: RawSession) -> None:
    made = transfer_pb2.CreateRemoteRegionResponse()
    assert create(session, "a", MIB) == made
    assert create(session, "b", MIB - 4095) == made, "it takes whole pages"
    answer = create(session, "c", 1)
    assert (answer.reason, answer.field, answer.metadata["limit"]) == ("QUOTA_EXCEEDED", "byte_size", "max_region_mib")
    other = RawSession(session.wire)
    assert create(other, "a", 4096) == made, "names are each session's own"
    answer = create(other, "b", 4096)
    assert (answer.reason, answer.metadata["limit"]) == ("QUOTA_EXCEEDED", "max_transfers")
    assert len(engines_of(daemon[0].process.pid)) == 3
    remove(session, "a")
    until(lambda: len(engines_of(daemon[0].process.pid)) == 2)
    assert create(other, "b", 4096) == made
    remove(session, "no such region")
    other.close()


def test_arguments_that_are_refused(session: RawSession) -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"name": ""}, "name"),
        ({"name": "x" * 257}, "name"),
        ({"byte_size": 0}, "byte_size"),
        ({"ports": [0]}, "ports"),
        ({"ports": [9, 65536]}, "ports"),
        ({"ports": []}, "ports"),
        ({"ports": [9] * 9}, "ports"),
        ({"remote_bytes": 0}, "remote_bytes"),
        ({"address": 0}, "remote_bytes"),
        ({"remote_bytes": 1 << 63, "address": 1 << 63}, "remote_bytes"),
    ]
    with each_row() as row:
        for changes, field in rows:
            with row(changes):
                answer = create(session, **changes)
                assert (answer.code, answer.field) == ("INVALID_ARGUMENT", field)


def test_repeated_and_simultaneous_calls_create_one_region(daemon: tuple[Daemon, str], session: RawSession) -> None:
    request = transfer_pb2.CreateRemoteRegionRequest(
        name="r", byte_size=MIB, remote_bytes=MIB, ports=[9], address=1 << 40, session_token=session.token
    )
    with ThreadPoolExecutor(4) as threads:
        answers = [threads.submit(session.wire.unary, "create_remote_region", request) for _ in range(4)]
    assert [answer.result() for answer in answers] == [transfer_pb2.CreateRemoteRegionResponse()] * 4
    assert create(session) == transfer_pb2.CreateRemoteRegionResponse()
    assert len(engines_of(daemon[0].process.pid)) == 1


def test_who_may_use_which_regions(daemon: tuple[Daemon, str], session: RawSession, store: RawStore) -> None:
    near = Wire(daemon[0].address)
    with each_row() as row:
        with row("clients on the unix socket have no remote regions"):
            local = RawSession(near)
            answer = create(local)
            assert (answer.code, answer.reason, answer.field) == ("FAILED_PRECONDITION", "FAILED_PRECONDITION", "ports")
            local.close()
        with row("the region of another session is unknown"):
            other = RawSession(session.wire)
            create(other)
            answer = put(store, bytes(8), 1, offsets=(0,))
            assert (answer.code, answer.reason) == ("NOT_FOUND", "UNKNOWN_REGION")
            other.close()
        with row("blocks in regions need a session"):
            put_nowhere = store_pb2.BatchPutRequest(keys=keys(1), region=scatter("r", [0]), session_token=bytes(16))
            answer = session.wire.unary("store_batch_put", put_nowhere)
            assert (answer.code, answer.reason) == ("NOT_FOUND", "UNKNOWN_SESSION")
        with row("regions of this host are not for clients over TCP"):
            of_host = RawStore(RawSession(near), "remote")
            making = regions_pb2.CreateRegionRequest(name="local", byte_size=MIB)
            of_host.session.ok("create_region", making)
            request = store_pb2.BatchGetRequest(
                namespace_id=of_host.id, keys=keys(1), region=scatter("local", [0]), session_token=of_host.session.token
            )
            assert session.wire.unary("store_batch_get", request).reason == "REGIONS_NOT_ALLOWED"
            of_host.session.close()
        with row("calls for regions of this host leave remote ones alone, and the other way round"):
            create(session, "far")
            token = session.token
            local = near.unary(
                "create_region", regions_pb2.CreateRegionRequest(session_token=token, name="n", byte_size=1)
            )
            assert len(local.handover_token) == 16
            taken = near.unary("create_region", regions_pb2.CreateRegionRequest(session_token=token, name="far"))
            assert taken.reason == create(session, "n").reason == "DUPLICATE_REGION"
            remove(session, "n")
            near.unary("unregister_region", regions_pb2.UnregisterRegionRequest(session_token=token, name="far"))
            listed = near.unary("list_regions", regions_pb2.ListRegionsRequest(session_token=token))
            assert [region.name for region in listed.regions] == ["n"]
            near.unary("unregister_region", regions_pb2.UnregisterRegionRequest(session_token=token))
            assert not near.unary("list_regions", regions_pb2.ListRegionsRequest(session_token=token)).regions
            assert len(engines_of(daemon[0].process.pid)) == 1
    near.close()


def test_the_engine_ends_with_its_session_or_with_the_grace_time(daemon: tuple[Daemon, str]) -> None:
    """The engine of a killed or frozen client does not outlive the grace time. `until` fails if the process goes on."""
    wire = Wire(daemon[1])
    for is_closed in (True, False):
        opened = RawSession(wire)
        create(opened)
        (engine,) = engines_of(daemon[0].process.pid)
        if is_closed:
            wire.unary("close", session_pb2.CloseRequest(session_token=opened.token))
        else:
            opened.stream.cancel()
        until(functools.partial(is_gone, engine))
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


@pytest.mark.slow
def test_transfer_addresses_of_no_use_are_refused_at_the_start() -> None:
    rows: list[tuple[dict[str, Any], str]] = [
        ({"transfer_address": "192.0.2.1"}, "set transfer_insecure"),
        (
            {"transfer_address": "192.0.2.1", "transfer_insecure": True},
            "no interface of this host has 192.0.2.1",
        ),
        ({"transfer_address": LOOPBACK, "tcp_address": ""}, "set tcp_address"),
    ]
    small = {name: TRANSFERS[name] for name in ("num_layers", "num_kv_heads", "head_size", "num_blocks")}
    with each_row() as row:
        for options, said in rows:
            with row(options), pytest.raises(StartError, match=f"transfer_address.*{said}"):
                Daemon(**small | {"tcp_address": f"{LOOPBACK}:0"} | options).__enter__()


@pytest.mark.slow
def test_a_client_on_this_host_may_connect_over_ipv6(free_ports: Any) -> None:
    """The daemon has no store, and its engines have another address of the loopback interface."""
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("there is no IPv6 here")
    address = f"[::1]:{free_ports(1)[0]}"
    with Daemon(**TRANSFERS | {"tcp_address": address, "transfer_address": "127.0.0.2", "store_gib": 0}):
        wire = Wire(address)
        opened = RawSession(wire)
        assert create(opened) == transfer_pb2.CreateRemoteRegionResponse()
        opened.close()
        wire.close()


def test_transfer_addresses_that_are_refused() -> None:
    with each_row() as row:
        for address in ("localhost", "0.0.0.0", "10.0.0.1:1", "::1", "10.0.0.256"):
            with row(address), pytest.raises(ValueError, match="IPv4"):
                ServeConfig(transfer_address=address)
