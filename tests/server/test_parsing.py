"""Requests that are refused for their contents before they are parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from each_row import each_row
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from raw_wire import RawSession, Refusal, Wire, refusal
from small_pool import SMALL_POOL

from kvservice.config import RequestLimits, ServeConfig
from kvservice.launch import Daemon
from kvservice.v1 import attention_pb2, blocks_pb2, pool_pb2, regions_pb2, session_pb2, store_pb2, tensor_pb2

LIMITS = {"max_request_sequences": 4, "max_request_tokens": 10, "max_request_blocks": 8}
Allocation, Key = blocks_pb2.SequenceAllocation, blocks_pb2.ExtraKey


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    """A connection to a daemon with small limits."""
    with Daemon(**SMALL_POOL | LIMITS) as daemon:
        connected = Wire(daemon.address)
        yield connected
        connected.close()


@pytest.fixture(scope="module")
def session(wire: Wire) -> RawSession:
    return RawSession(wire)


def allocate(*sequences: Any) -> Any:
    return blocks_pb2.AllocateRequest(sequences=sequences)


def ids(count: int) -> Any:
    return blocks_pb2.FreeRequest(sequence_ids=range(count))


WITHIN: list[tuple[str, Any]] = [
    ("allocate", allocate(*[Allocation()] * 4)),
    ("allocate", allocate(Allocation(token_ids=range(6)), Allocation(token_ids=range(4)))),
    ("allocate", allocate(Allocation(extra_keys=[Key(key=bytes(256))] * 1024))),
    (
        "append",
        blocks_pb2.AppendRequest(
            sequence_ids=range(4), token_ids=range(10), num_tokens=[1] * 4, expected_lengths=[1] * 4
        ),
    ),
    ("write", attention_pb2.WriteRequest(key=tensor_pb2.Tensor(shape=[1] * 8, inline=bytes(1 << 20)))),
    ("store_lookup", store_pb2.LookupRequest(keys=bytes(8 * 32))),
    ("store_batch_put", store_pb2.BatchPutRequest(keys=bytes(8 * 32), data=bytes(1 << 20))),
    (
        "store_batch_get",
        store_pb2.BatchGetRequest(region=store_pb2.Scatter(piece_bytes=[1] * 16384, offsets=bytes(8 * 16384))),
    ),
    ("store_commit", store_pb2.StoreCommitRequest(written=bytes(8), checksums=bytes(64))),
    ("store_release", store_pb2.ReleaseRequest(lease_ids=range(4096))),
]


def test_what_is_within_the_limits_is_parsed(wire: Wire) -> None:
    """The daemon then looks for the session."""
    with each_row() as row:
        for name, request in WITHIN:
            with row(name):
                assert wire.unary(name, request).reason == "UNKNOWN_SESSION"
    payload = bytes(1 << 20)
    assert wire.unary("ping", pool_pb2.PingRequest(payload=payload)).payload == payload
    health: Any = health_pb2_grpc.HealthStub(wire.channel)
    with pytest.raises(grpc.RpcError) as unknown:
        health.Check(health_pb2.HealthCheckRequest(service="x" * 4096))
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as refused:
        health.Check(health_pb2.HealthCheckRequest(service="x" * 4097))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# What has too much: the call, the field that is named, the option that is named, and the request.
ABOVE: dict[str, tuple[str, str, str, Any]] = {
    "sequences": ("allocate", "sequences", "max_request_sequences", allocate(*[Allocation()] * 5)),
    "tokens of all": (
        "allocate",
        "sequences.token_ids",
        "max_request_tokens",
        allocate(Allocation(token_ids=range(6)), Allocation(token_ids=range(5))),
    ),
    "ids": ("free", "sequence_ids", "max_request_sequences", ids(5)),
    "ids of parents": ("fork", "parent_ids", "max_request_sequences", blocks_pb2.ForkRequest(parent_ids=[1] * 5)),
    "counts": ("open_step", "num_tokens", "max_request_sequences", blocks_pb2.OpenStepRequest(num_tokens=[1] * 5)),
    "tokens": ("match_prefix", "token_ids", "max_request_tokens", blocks_pb2.MatchPrefixRequest(token_ids=range(11))),
    "ranges": (
        "read",
        "ranges",
        "max_request_sequences",
        attention_pb2.ReadRequest(ranges=[attention_pb2.SequenceRange()] * 5),
    ),
    "extra keys of all": (
        "allocate",
        "sequences.extra_keys",
        "",
        allocate(Allocation(extra_keys=[Key()] * 4000), Allocation(extra_keys=[Key()] * 97)),
    ),
    "shape": ("write", "key.shape", "", attention_pb2.WriteRequest(key=tensor_pb2.Tensor(shape=[1] * 9))),
    "slopes": (
        "extend",
        "options.alibi_slopes",
        "",
        attention_pb2.AttendRequest(options=attention_pb2.AttentionOptions(alibi_slopes=[1.0] * 65536)),
    ),
    "text": ("open", "name", "", session_pb2.OpenRequest(name="x" * 4097)),
    "region": (
        "decode",
        "query.shared_memory.region",
        "",
        attention_pb2.AttendRequest(
            query=tensor_pb2.Tensor(shared_memory=tensor_pb2.SharedMemoryPlace(region="x" * 5000))
        ),
    ),
    "key of an object": (
        "register_region",
        "key",
        "",
        regions_pb2.RegisterRegionRequest(key="x" * 5000),
    ),
    "keys of a store": (
        "store_acquire",
        "keys",
        "max_request_blocks",
        store_pb2.AcquireRequest(keys=bytes(8 * 32 + 1)),
    ),
    "bits": ("store_commit", "written", "max_request_blocks", store_pb2.StoreCommitRequest(written=bytes(9))),
    "checksums": ("store_commit", "checksums", "max_request_blocks", store_pb2.StoreCommitRequest(checksums=bytes(72))),
    "pieces": (
        "store_batch_get",
        "region.piece_bytes",
        "",
        store_pb2.BatchGetRequest(region=store_pb2.Scatter(piece_bytes=[1] * 16385)),
    ),
    "leases": ("store_release", "lease_ids", "", store_pb2.ReleaseRequest(lease_ids=range(4097))),
    "payload": ("ping", "payload", "", pool_pb2.PingRequest(payload=bytes((1 << 20) + 1))),
}


def check_refused(answer: Any, field: str, option: str) -> None:
    assert isinstance(answer, Refusal), answer
    assert (answer.reason, answer.field) == ("QUOTA_EXCEEDED" if option else "INVALID_ARGUMENT", field)
    if option:
        value = str(LIMITS[option])
        assert answer.metadata == {"limit": option, "value": value}
        assert f"{option} = {value}" in answer.message


def test_what_is_above_a_limit_is_refused_by_name(wire: Wire, session: RawSession) -> None:
    """In a call of its own, and over a stream, where the field of the call is no part of the name."""
    with each_row() as row:
        for case, (name, field, option, request) in ABOVE.items():
            with row(case):
                check_refused(wire.unary(name, request), field, option)
                if name != "open":
                    answer = session.stream.send(name, request)
                    assert answer.WhichOneof("reply") == "error"
                    check_refused(refusal(answer.error), field, option)


def test_a_refused_call_of_a_stream_keeps_its_id(session: RawSession) -> None:
    for call_id in (1, 300, 2**64 - 1):
        session.stream.put(session_pb2.Call(call_id=call_id, free=ids(5)))
        reply = next(session.stream.replies)
        check_refused(refusal(reply.error), "sequence_ids", "max_request_sequences")
        assert reply.call_id == call_id


def test_bytes_that_are_no_message(wire: Wire) -> None:
    """The last is a string that is not UTF-8."""
    with each_row() as row:
        for data in (b"\x08", b"\xff" * 20, b"\x0a\x01\xff"):
            with row(data):
                answer = sent(wire, "/kvservice.v1.SessionService/Open", data)
                assert (answer.reason, answer.field) == ("INVALID_ARGUMENT", "")


def sent(wire: Wire, path: str, data: bytes) -> Refusal:
    """Return the refusal of these bytes."""
    call: Any = wire.channel.unary_unary(path)
    with pytest.raises(grpc.RpcError) as error:
        call(data, timeout=20)
    status = rpc_status.from_call(error.value)  # type: ignore[arg-type]
    assert status is not None
    return refusal(status)


def test_many_records_of_any_kind_are_refused(wire: Wire) -> None:
    with each_row() as row:
        for kind, record in {"unknown": b"\x98\x06\x01", "repeats one": b"\x08\x01"}.items():
            with row(kind):
                path = "/kvservice.v1.BlockService/Unpin"
                assert sent(wire, path, record * 16000).reason == "UNKNOWN_SESSION"
                refused = sent(wire, path, record * 17000)
                assert refused.reason == "INVALID_ARGUMENT"
                assert "fields" in refused.message


def test_the_limits_let_the_longest_sequence_through() -> None:
    assert ServeConfig().request_limits == RequestLimits(1024, 131072, 32768)
    long = ServeConfig(max_sequence_tokens=1 << 20, block_size=16)
    assert long.request_limits == RequestLimits(1024, 1 << 20, 1 << 16)
    given = ServeConfig(max_request_sequences=7, max_request_tokens=8, max_request_blocks=9)
    assert given.request_limits == RequestLimits(7, 8, 9)
