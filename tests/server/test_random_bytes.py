"""Random bytes and requests with mutated bytes always get a status, change nothing and never end the daemon."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from each_row import each_row
from google.protobuf.message_factory import GetMessageClass
from http2_requests import PREFACE, request
from raw_wire import SERVICES, call_name, is_of_session

from kvservice.errors import RegionNotOpenedError
from kvservice.launch import Daemon
from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    events_pb2,
    host_pb2,
    inspect_pb2,
    pool_pb2,
    scheduler_pb2,
    session_pb2,
    shared_memory_pb2,
    store_pb2,
    tensor_pb2,
    transfer_pb2,
)

RPCS = [(service.full_name, method) for service in SERVICES for method in service.methods]
UNARY = [(name, method) for name, method in RPCS if not (method.client_streaming or method.server_streaming)]
OPENS = "/kvservice.v1.SessionService/Open"
CLOSES = "/kvservice.v1.SessionService/Close"
OBJECT = f"kvservice-random-bytes-{os.getpid()}"
NUM_RANDOM = 40
NUM_MUTATED = 60
# A mutated request can happen to be valid; these are the errors that a valid request can get.
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@pytest.fixture(scope="module")
def channel(daemon: Daemon) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(daemon.address) as opened:
        yield opened


@pytest.fixture(scope="module", autouse=True)
def shared_object() -> Iterator[None]:
    path = Path("/dev/shm", OBJECT)
    path.write_bytes(bytes(4096))
    yield
    path.unlink()


def send(channel: grpc.Channel, path: str, data: bytes) -> grpc.StatusCode:
    """Send the bytes, and return the status; OK for a response. A session that they open is closed."""
    try:
        call: Any = channel.unary_unary(path)
        answer = call(data, timeout=20)
    except grpc.RpcError as error:
        # Its status, INTERNAL, would mean a fault of the daemon in all other cases.
        if RegionNotOpenedError.reason.encode() in dict(cast(Any, error.trailing_metadata())).get(
            "grpc-status-details-bin", b""
        ):
            return grpc.StatusCode.NOT_FOUND
        return error.code()
    if path == OPENS:
        token = session_pb2.OpenResponse.FromString(answer).session_token
        send(channel, CLOSES, session_pb2.CloseRequest(session_token=token).SerializeToString())
    return grpc.StatusCode.OK


def blobs(seed: str) -> Iterator[bytes]:
    source = random.Random(seed)
    yield from (b"", b"\x0a", b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", b"\x08" + b"\x80" * 9 + b"\x01")
    for _ in range(NUM_RANDOM):
        yield source.randbytes(source.choice((1, 3, 17, 200, 5000)))


def test_random_bytes(channel: grpc.Channel, wire: Any, raw_session: Any) -> None:
    before = wire.stats(), raw_session.describe()
    with each_row() as row:
        for service, method in UNARY:
            path = f"/{service}/{method.name}"
            with row(path):
                for data in blobs(path):
                    status = send(channel, path, data)
                    assert status in {grpc.StatusCode.OK} | REFUSALS, data[:50]
                assert (wire.stats(), raw_session.describe()) == before


def in_region(tensor: tensor_pb2.Tensor, place: tensor_pb2.SharedMemoryPlace) -> tensor_pb2.Tensor:
    tensor.shared_memory.CopyFrom(place)
    return tensor


def key_of(method: Any) -> str:
    """Return the name of a method. Those of the store have the names of their calls, because some names are others'."""
    return call_name(method) if method.containing_service.name == "StoreService" else method.name


def good_requests(token: bytes, tensor: Any) -> dict[str, Any]:
    """Return one valid request per method that has an effect, by `key_of`."""
    name: dict[str, Any] = {"session_token": token}
    kv: dict[str, Any] = {"key": tensor(1, 2, 32), "value": tensor(1, 2, 32)}
    one = blocks_pb2.SequenceAllocation(sequence_id=9, token_ids=[1, 2, 3], extra_keys=[blocks_pb2.ExtraKey(key=b"k")])
    place = tensor_pb2.SharedMemoryPlace(region="r", offset=0, byte_size=4 * 128)
    store = name | {"namespace_id": 1, "keys": bytes(64)}
    scatter = store_pb2.Scatter(region="r", piece_bytes=[60, 4], offsets=bytes(32))
    part = attention_pb2.SequenceRange(sequence_id=1, start=0, stop=4)
    request = scheduler_pb2.ScheduledRequest(
        request_id=30, token_ids=[1, 2, 3], max_tokens=2, width=1, extra_keys=[blocks_pb2.ExtraKey(key=b"k")]
    )
    report = scheduler_pb2.StepReport(batch=1, token_ids=[5], finished_ids=[21])
    return {
        "Allocate": blocks_pb2.AllocateRequest(**name, request_id=3, sequences=[one], lookahead=2),
        "CanAllocate": blocks_pb2.CanAllocateRequest(**name, sequences=[one], lookahead=2),
        "Append": blocks_pb2.AppendRequest(
            **name, sequence_ids=[1], token_ids=[5], num_tokens=[1], expected_lengths=[5]
        ),
        "CanAppend": blocks_pb2.CanAppendRequest(**name, sequence_ids=[1], num_tokens=[1], lookahead=2),
        "OpenAhead": blocks_pb2.OpenAheadRequest(**name, sequence_ids=[1], num_steps=2),
        "CommitAhead": blocks_pb2.CommitAheadRequest(**name, step_id=1, token_ids=[5, 6], num_tokens=[2], num_steps=1),
        "OpenStep": blocks_pb2.OpenStepRequest(**name, sequence_ids=[1], num_tokens=[1]),
        "Truncate": blocks_pb2.TruncateRequest(**name, sequence_ids=[1], lengths=[4]),
        "Fork": blocks_pb2.ForkRequest(**name, parent_ids=[1], child_ids=[8]),
        "SwapOut": blocks_pb2.SwapOutRequest(**name, sequence_ids=[1]),
        "CanSwapOut": blocks_pb2.CanSwapOutRequest(**name, sequence_ids=[1]),
        "SwapIn": blocks_pb2.SwapInRequest(**name, sequence_ids=[1]),
        "CanSwapIn": blocks_pb2.CanSwapInRequest(**name, sequence_ids=[1]),
        "Free": blocks_pb2.FreeRequest(**name, sequence_ids=[1]),
        "Describe": blocks_pb2.DescribeRequest(**name, sequence_ids=[1], return_token_ids=True),
        "MatchPrefix": blocks_pb2.MatchPrefixRequest(**name, token_ids=[1, 2, 3, 4]),
        "Pin": blocks_pb2.PinRequest(**name, token_ids=[1, 2, 3, 4], ttl_s=0.1),
        "Unpin": blocks_pb2.UnpinRequest(**name, pin_id=1),
        "ResetPrefixCache": blocks_pb2.ResetPrefixCacheRequest(**name),
        "CommonPrefix": blocks_pb2.CommonPrefixRequest(**name, sequence_ids=[1]),
        "Decode": attention_pb2.AttendRequest(**name, step_id=1, layer=1, query=tensor(1, 4, 32), **kv),
        "Extend": attention_pb2.AttendRequest(
            **name, step_id=1, layer=1, query=in_region(tensor(1, 4, 32), place), output_place=place, **kv
        ),
        "Write": attention_pb2.WriteRequest(**name, step_id=1, layer=1, **kv),
        "Read": attention_pb2.ReadRequest(**name, ranges=[part]),
        "SystemSharedMemoryStatus": shared_memory_pb2.SystemSharedMemoryStatusRequest(**name, name="r"),
        "SystemSharedMemoryRegister": shared_memory_pb2.SystemSharedMemoryRegisterRequest(
            **name, name="n", key=OBJECT, offset=16, byte_size=64
        ),
        "SystemSharedMemoryUnregister": shared_memory_pb2.SystemSharedMemoryUnregisterRequest(**name, name="r"),
        "CudaSharedMemoryStatus": shared_memory_pb2.CudaSharedMemoryStatusRequest(**name),
        "CudaSharedMemoryRegister": shared_memory_pb2.CudaSharedMemoryRegisterRequest(
            **name, name="g", raw_handle=bytes(64), byte_size=64
        ),
        "CudaSharedMemoryUnregister": shared_memory_pb2.CudaSharedMemoryUnregisterRequest(**name, name="g"),
        "CreateRegion": shared_memory_pb2.CreateRegionRequest(**name, name="m", byte_size=4096),
        "CreateRemoteRegion": transfer_pb2.CreateRemoteRegionRequest(
            **name, name="m", byte_size=4096, remote_bytes=4096, ports=[9], address=4096
        ),
        "RemoveRemoteRegion": transfer_pb2.RemoveRemoteRegionRequest(**name, name="m"),
        "OpenLane": host_pb2.OpenLaneRequest(**name),
        "CloseLane": host_pb2.CloseLaneRequest(**name),
        "MapPool": host_pb2.MapPoolRequest(**name, writable=True),
        "UnmapPool": host_pb2.UnmapPoolRequest(**name),
        "Commit": host_pb2.CommitRequest(**name, step_id=1),
        "store_open_namespace": store_pb2.OpenNamespaceRequest(
            **name, request_id=4, namespace=store_pb2.StoreNamespace(model="m", block_bytes=64, tp_size=1)
        ),
        "store_lookup": store_pb2.LookupRequest(**store),
        "store_acquire": store_pb2.AcquireRequest(**store, request_id=5, ttl_s=1.0, leading_only=True),
        "store_renew": store_pb2.RenewRequest(**name, lease_id=1, ttl_s=1.0),
        "store_release": store_pb2.ReleaseRequest(**name, lease_ids=[1, 2]),
        "store_reserve": store_pb2.ReserveRequest(**store, request_id=6),
        "store_commit": store_pb2.StoreCommitRequest(**name, request_id=7, reservation_id=1, written=b"\1"),
        "store_abort": store_pb2.AbortRequest(**name, reservation_id=1),
        "store_batch_get": store_pb2.BatchGetRequest(**store, region=scatter, verify=True),
        "store_batch_put": store_pb2.BatchPutRequest(**store, data=bytes(128)),
        "store_touch": store_pb2.TouchRequest(**store),
        "store_remove": store_pb2.RemoveRequest(**store, request_id=8),
        "store_clear": store_pb2.ClearRequest(**name, request_id=9, namespace_id=1),
        "store_map_store": store_pb2.MapStoreRequest(**name, request_id=10, writable=True),
        "OpenScheduler": scheduler_pb2.OpenSchedulerRequest(**name, request_id=11, max_step_tokens=16, weight=2.0),
        "AddRequests": scheduler_pb2.AddRequestsRequest(**name, request_id=12, requests=[request]),
        "AbortRequests": scheduler_pb2.AbortRequestsRequest(**name, request_ids=[21]),
        "Schedule": scheduler_pb2.ScheduleRequest(**name, reports=[report], max_step_tokens=9, max_running=3),
        "DescribeRequests": scheduler_pb2.DescribeRequestsRequest(**name, request_ids=[21], return_token_ids=True),
        "GetSnapshot": inspect_pb2.GetSnapshotRequest(max_sessions=3, max_sequences=4, search="x"),
        "Ping": pool_pb2.PingRequest(payload=b"x"),
        "Open": session_pb2.OpenRequest(name="x", detachable=False, detach_ttl_s=1.0),
        "Close": session_pb2.CloseRequest(session_token=token),
        "Detach": session_pb2.DetachRequest(session_token=token),
    }


def schedule(victim: Any, tensor: Any) -> None:
    """Open the scheduler of a session, and compute its first batch."""
    victim.ok("open_scheduler", scheduler_pb2.OpenSchedulerRequest())
    request = scheduler_pb2.ScheduledRequest(request_id=21, token_ids=[7, 8], max_tokens=3, width=1)
    victim.ok("add_requests", scheduler_pb2.AddRequestsRequest(requests=[request]))
    step_id = victim.ok("schedule", scheduler_pb2.ScheduleRequest()).step.step_id
    for layer in range(2):
        key, value = tensor(2, 2, 32), tensor(2, 2, 32)
        victim.ok("write", attention_pb2.WriteRequest(step_id=step_id, layer=layer, key=key, value=value))


def mutate(data: bytes, source: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(changed)) if changed else 0
        kind = source.randrange(4)
        if kind == 0 and changed:
            changed[at] = source.randrange(256)
        elif kind == 1:
            changed[at:at] = source.randbytes(source.randint(1, 8))
        elif kind == 2:
            del changed[at : at + source.randint(1, 4)]
        elif changed:
            changed[at] ^= 1 << source.randrange(8)
    return bytes(changed)


def test_mutated_requests(channel: grpc.Channel, wire: Any, raw: Any, raw_session: Any) -> None:
    """Mutated requests use a separate session, whose state is unknown afterwards. The other session must not change."""
    bystander = raw_session
    allocation = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[50, 51, 52, 53, 54])
    bystander.ok("allocate", blocks_pb2.AllocateRequest(sequences=[allocation]))
    before = bystander.describe()
    with each_row() as row:
        for service, method in UNARY:
            path = f"/{service}/{method.name}"
            with row(path):
                victim = raw.RawSession(wire)
                prepare(victim, raw.tensor, service, method)
                request = good_requests(victim.token, raw.tensor).get(key_of(method))
                data = b"" if request is None else request.SerializeToString()
                source = random.Random(path)
                for _ in range(NUM_MUTATED):
                    changed = mutate(data, source)
                    status = send(channel, path, changed)
                    parses = _parses(method, changed)
                    allowed = {grpc.StatusCode.OK} | REFUSALS if parses else {grpc.StatusCode.INVALID_ARGUMENT}
                    assert status in allowed, (status, changed)
                victim.close()
                assert bystander.describe() == before
                stats = wire.stats()
                parts = (
                    stats.free_blocks, stats.active_blocks, stats.shared_blocks, stats.cached_blocks,
                    stats.pinned_blocks,
                )  # fmt: skip
                assert sum(parts) == stats.num_blocks
                assert min(parts) >= 0
                assert stats.sequences == 1


def prepare(victim: Any, tensor: Any, service: str, method: Any) -> None:
    """Give a session what the good requests need."""
    allocation = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[50, 51, 52, 53, 54])
    victim.ok("allocate", blocks_pb2.AllocateRequest(sequences=[allocation]))
    victim.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1], num_tokens=[1]))
    register = shared_memory_pb2.SystemSharedMemoryRegisterRequest(name="r", key=OBJECT, byte_size=4096)
    victim.ok("system_shared_memory_register", register)
    victim.ok("map_pool", host_pb2.MapPoolRequest(writable=True))
    if service.endswith("SchedulerService") and method.name != "OpenScheduler":
        schedule(victim, tensor)
    if method.name == "CloseLane":
        victim.ok("open_lane", host_pb2.OpenLaneRequest())


def _parses(method: Any, data: bytes) -> bool:
    try:
        GetMessageClass(method.input_type).FromString(data)
    except Exception:  # protobuf's error, whose class depends on the implementation
        return False
    return True


def test_random_bytes_on_the_stream(channel: grpc.Channel, wire: Any, raw_session: Any) -> None:
    before = wire.stats(), raw_session.describe()
    for data in blobs("stream"):
        connect: Any = channel.stream_stream("/kvservice.v1.SessionService/Connect")
        call = connect(iter([data]), timeout=20)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        assert call.code() in {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}, data[:50]
    assert (wire.stats(), raw_session.describe()) == before


def test_random_bytes_to_the_events(channel: grpc.Channel, wire: Any) -> None:
    before = wire.stats()
    for data in blobs("events"):
        subscribe: Any = channel.unary_stream("/kvservice.v1.EventService/Subscribe")
        call = subscribe(data, timeout=0.2)
        with contextlib.suppress(grpc.RpcError):
            list(call)
        good = _parses(events_pb2.DESCRIPTOR.services_by_name["EventService"].methods[0], data)
        expected = REFUSALS | {grpc.StatusCode.DEADLINE_EXCEEDED} if good else {grpc.StatusCode.INVALID_ARGUMENT}
        assert call.code() in expected, data[:50]
    assert wire.stats() == before


def test_methods_that_do_not_exist(channel: grpc.Channel, daemon: Daemon) -> None:
    paths = ("/kvservice.v1.BlockService/Nothing", "/kvservice.v1.Nothing/Allocate", "/x", "//")
    answers = {path: send(channel, path, b"") for path in paths}
    assert answers == dict.fromkeys(paths, grpc.StatusCode.UNIMPLEMENTED)
    # gRPC's server does not accept anything any more after an error in the decoding of a path.
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(20)
        client.connect(daemon.address.removeprefix("unix://"))
        client.sendall(PREFACE + b"\0\0\0\4\0\0\0\0\0" + request("/not UTF-8: \udcc1", 1))
        answer = client.recv(4096)
        while b"grpc-status" not in answer:  # the names of its headers are not compressed
            answer += client.recv(4096)
    with grpc.insecure_channel(daemon.address, [("grpc.use_local_subchannel_pool", 1)]) as another:
        assert send(another, "/kvservice.v1.PoolService/Ping", b"") is grpc.StatusCode.OK


def test_the_good_requests_are_understood(channel: grpc.Channel, raw: Any) -> None:
    requests = good_requests(b"", raw.tensor)
    assert {key_of(method) for _, method in UNARY} - set(requests) == {"GetInfo", "GetStats"}
    for service, method in UNARY:
        if key_of(method) in requests and is_of_session(method):
            data = requests[key_of(method)].SerializeToString()
            assert send(channel, f"/{service}/{method.name}", data) is grpc.StatusCode.NOT_FOUND
