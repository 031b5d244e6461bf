"""Random bytes and requests with mutated bytes always get a status, change nothing and never end the daemon."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from each_row import each_row
from good_requests import good_requests, key_of, prepare, shared_object
from google.protobuf.message_factory import GetMessageClass
from http2_requests import PREFACE, request
from raw_wire import SERVICES, is_of_session

from kvservice.launch import Daemon
from kvservice.v1 import (
    blocks_pb2,
    events_pb2,
    session_pb2,
)

RPCS = [(service.full_name, method) for service in SERVICES for method in service.methods]
UNARY = [(name, method) for name, method in RPCS if not (method.client_streaming or method.server_streaming)]
OPENS = "/kvservice.v1.SessionService/Open"
CLOSES = "/kvservice.v1.SessionService/Close"
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
def an_object() -> Iterator[None]:
    with shared_object():
        yield


def send(channel: grpc.Channel, path: str, data: bytes) -> grpc.StatusCode:
    """Send the bytes, and return the status; OK for a response. A session that they open is closed."""
    try:
        call: Any = channel.unary_unary(path)
        answer = call(data, timeout=20)
    except grpc.RpcError as error:
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
