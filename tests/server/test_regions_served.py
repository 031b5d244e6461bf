"""Regions over a daemon: who may have them, and how long they live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from footprint import shared_files
from shm_objects import OBJECT_BYTES, ShmFile, shm_objects
from small_pool import SMALL_POOL
from waiting import until

from kvservice.client import KVClient
from kvservice.errors import KVServiceError, RegionsNotAllowedError
from kvservice.launch import Daemon
from kvservice.v1 import attention_pb2, blocks_pb2, regions_pb2, session_pb2, store_pb2, tensor_pb2

Register = regions_pb2.RegisterRegionRequest
List = regions_pb2.ListRegionsRequest
Unregister = regions_pb2.UnregisterRegionRequest
REGION = "/memfd:kvservice-region"


def names(response: regions_pb2.ListRegionsResponse) -> list[str]:
    return [region.name for region in response.regions]


@pytest.fixture
def shm() -> Iterator[ShmFile]:
    made = ShmFile()
    yield made
    made.path.unlink(missing_ok=True)


def test_a_daemon_outlives_a_client_that_truncates_all_the_time(daemon: Daemon, raw_session: Any, shm: ShmFile) -> None:
    refused, done, stop = 0, 0, threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            os.truncate(shm.path, 0)
            os.truncate(shm.path, OBJECT_BYTES)

    raw_session.ok("register_region", Register(name="r", key=shm.key, byte_size=OBJECT_BYTES))
    prompt = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=range(48))
    raw_session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[prompt]))
    opening = blocks_pb2.OpenStepRequest(sequence_ids=[1])
    step_id = raw_session.ok("open_step", opening).step_id
    place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=48 * 2 * 32 * 4)
    tensor = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=(48, 2, 32), shared_memory=place)
    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for _ in range(300):
            request = attention_pb2.WriteRequest(step_id=step_id, layer=0, key=tensor, value=tensor)
            answer = raw_session.call("write", request)
            if answer == attention_pb2.WriteResponse():
                done += 1
                step_id = raw_session.ok("open_step", opening).step_id
            else:
                assert answer.reason == "REGION_SHRUNK"
                refused += 1
    finally:
        stop.set()
        disturber.join()
    assert raw_session.describe().sequences[0].length == 48
    assert refused > 0
    assert done + refused == 300
    assert daemon.process.poll() is None


# ---- how long a region lives


def test_a_session_that_is_closed_closes_its_regions(daemon: Daemon, client: KVClient, wire: Any, raw: Any) -> None:
    raw.await_no_sessions(wire)
    pid = daemon.process.pid
    before = shared_files(pid, REGION)  # a client of another test may keep its regions mapped
    with client.session() as kv:
        for _ in range(4):
            kv.create_region(4096)
        assert len(shared_files(pid, REGION) - before) == 4
    until(lambda: shared_files(pid, REGION) <= before)


def test_a_killed_clients_regions_are_closed(daemon: Daemon, client: KVClient, wire: Any, raw: Any) -> None:
    """The regions of a session that a client may resume are closed, too."""
    for detachable in (False, True):
        raw.await_no_sessions(wire)
        kill_a_client(daemon, client, detachable)


def kill_a_client(daemon: Daemon, client: KVClient, detachable: bool) -> None:
    pid = daemon.process.pid
    before = shared_files(pid, REGION)
    script = (
        "import sys, time\n"
        "from kvservice.client import KVClient\n"
        f"kv = KVClient(sys.argv[1]).session(detachable={detachable})\n"
        "memories = [kv.create_region(1 << 20) for _ in range(4)]\n"
        "print(kv.token.hex(), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-P", "-c", script, daemon.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            token = process.stdout.readline().strip()
            assert token, process.communicate()
            assert len(shared_files(pid, REGION) - before) == 4
        finally:
            process.send_signal(signal.SIGKILL)
    until(lambda: shared_files(pid, REGION) <= before)
    assert shm_objects(process.pid) == set()
    assert client.stats().sessions == detachable
    if detachable:
        with client.resume(bytes.fromhex(token)) as kv:
            assert kv.regions() == []


def test_regions_outlive_a_broken_stream(client: KVClient, wire: Any, raw: Any, shm: ShmFile) -> None:
    session = raw.RawSession(wire)
    session.ok("register_region", Register(name="r", key=shm.key, byte_size=64))
    session.stream.cancel()
    time.sleep(client.info.session_grace_s / 5)
    session.stream = wire.stream()
    session.stream.attach(session.token, reconnects=True)
    time.sleep(2 * client.info.session_grace_s)  # the timers that the broken stream started must be cancelled
    assert names(session.ok("list_regions", List())) == ["r"]
    session.close()


def test_what_a_resumed_session_had_shared_is_closed(daemon: Daemon) -> None:
    """Each client that takes the session over makes its own regions, within the limit of one session."""
    with KVClient(daemon.address, transport="lane") as client, client.session(detachable=True) as kv:
        for _ in range(SMALL_POOL["max_regions"] + 1):
            kv.detach()
            kv = client.resume(kv.token)
            kv.create_region(4096)
            kv.map_pool()
            assert len(kv.regions()) == 1
        kv.close()


def test_a_session_shares_before_its_first_stream(wire: Any, shm: ShmFile) -> None:
    token = wire.unary("open", session_pb2.OpenRequest()).session_token
    wire.unary("register_region", Register(session_token=token, name="r", key=shm.key, byte_size=64))
    stream = wire.stream()
    stream.attach(token)
    reply = stream.send("list_regions", List())
    assert names(reply.list_regions) == ["r"]
    stream.cancel()
    wire.unary("close", session_pb2.CloseRequest(session_token=token))


# ---- who may


def test_a_registration_that_is_sent_again_is_answered_again(raw_session: Any, shm: ShmFile) -> None:
    request = Register(name="r", key=shm.key, byte_size=64, request_id=77)
    for transport in ("unary", "stream", "stream"):
        assert raw_session.call("register_region", request, transport) == (regions_pb2.RegisterRegionResponse())
    request.request_id = 78
    assert raw_session.call("register_region", request).code == "ALREADY_EXISTS"


def test_names_are_each_sessions_own(wire: Any, raw: Any, shm: ShmFile) -> None:
    one, two = raw.RawSession(wire), raw.RawSession(wire)
    one.ok("register_region", Register(name="r", key=shm.key, byte_size=64))
    two.ok("register_region", Register(name="r", key=shm.key, byte_size=32))
    two.ok("unregister_region", Unregister())
    assert [region.byte_size for region in one.ok("list_regions", List()).regions] == [64]
    one.close()
    two.close()


def test_a_client_over_tcp_is_refused(shm: ShmFile, raw: Any, free_port: int) -> None:
    with Daemon(**SMALL_POOL, tcp_address=f"127.0.0.1:{free_port}") as daemon:
        near, far = raw.Wire(daemon.address), raw.Wire(f"127.0.0.1:{free_port}")
        local = raw.RawSession(near)
        local.ok("register_region", Register(name="r", key=shm.key, byte_size=64))
        remote = raw.RawSession(far)
        remote.token = local.token
        place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=64)
        tensor = tensor_pb2.Tensor(shared_memory=place)
        requests: list[tuple[str, Any]] = [
            ("register_region", Register(name="s", key=shm.key, byte_size=64)),
            ("list_regions", List()),
            ("unregister_region", Unregister()),
            ("write", attention_pb2.WriteRequest(key=tensor)),
            ("extend", attention_pb2.AttendRequest(query=tensor)),
            ("extend", attention_pb2.AttendRequest(output_place=place)),
            ("decode", attention_pb2.AttendRequest(lse_place=place)),
            ("store_batch_get", store_pb2.BatchGetRequest(region=store_pb2.Scatter(region="r"))),
            ("store_batch_put", store_pb2.BatchPutRequest(region=store_pb2.Scatter(region="r"))),
            ("store_map_store", store_pb2.MapStoreRequest()),
        ]
        for name, request in requests:
            for transport in ("unary", "stream"):
                refused = remote.call(name, request, transport)
                assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "REGIONS_NOT_ALLOWED"), name
        assert names(local.ok("list_regions", List())) == ["r"]
        for wire in (near, far):
            wire.close()


def test_a_daemon_says_whether_it_takes_regions(client: KVClient) -> None:
    assert client.info.allow_client_shm
    with Daemon(**SMALL_POOL | {"allow_client_shm": "off"}) as daemon, KVClient(daemon.address) as other:
        assert not other.info.allow_client_shm
        with other.session() as kv:
            with pytest.raises(RegionsNotAllowedError):
                kv.create_region(4096)
            with pytest.raises(KVServiceError):
                kv.regions()
        assert shm_objects(os.getpid()) == set()


def test_tensors_in_regions_are_bounded_as_messages_are(raw_session: Any, daemon: Daemon) -> None:
    path = Path("/dev/shm", f"kvservice-test-{os.getpid()}-large")
    with path.open("wb") as file:
        file.truncate(1 << 28)  # a hole, which uses no memory
    try:
        raw_session.ok("register_region", Register(name="r", key=path.name, byte_size=1 << 28))
        shape = (1, 2, 1 << 24)
        place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=4 << 25)
        tensor = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, shared_memory=place)
        refused = raw_session.call("write", attention_pb2.WriteRequest(step_id=1, layer=0, key=tensor, value=tensor))
        assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "key.shared_memory.byte_size")
    finally:
        path.unlink()
    assert daemon.process.poll() is None
