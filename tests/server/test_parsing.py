"""Requests that are refused for their contents before they are parsed."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from kvservice.config import RequestLimits, ServeConfig
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.server.contract import SERVICES
from kvservice.server.parsing import Refused, check_accepted, parser
from kvservice.v1 import attention_pb2, blocks_pb2, pool_pb2, session_pb2, shared_memory_pb2, store_pb2, tensor_pb2

LIMITS = RequestLimits(max_request_sequences=4, max_request_tokens=10, max_request_blocks=8)
Allocation, Key = blocks_pb2.SequenceAllocation, blocks_pb2.ExtraKey
RPCS = [method for service in SERVICES for method in service.methods]


def parse(request: Any) -> Any:
    return parser(type(request), LIMITS)(request.SerializeToString())


def allocate(*sequences: Any) -> Any:
    return blocks_pb2.AllocateRequest(sequences=sequences)


WITHIN: list[Any] = [
    allocate(*[Allocation()] * 4),
    allocate(Allocation(token_ids=range(6)), Allocation(token_ids=range(4))),
    allocate(Allocation(extra_keys=[Key(key=bytes(256))] * 1024)),
    blocks_pb2.AppendRequest(sequence_ids=range(4), token_ids=range(10), num_tokens=[1] * 4, expected_lengths=[1] * 4),
    attention_pb2.WriteRequest(key=tensor_pb2.Tensor(shape=[1] * 8, inline=bytes(1 << 20))),
    pool_pb2.PingRequest(payload=bytes(1 << 20)),
    store_pb2.LookupRequest(keys=bytes(8 * 32)),
    store_pb2.BatchPutRequest(keys=bytes(8 * 32), data=bytes(1 << 20)),
    store_pb2.BatchGetRequest(region=store_pb2.Scatter(piece_bytes=[1] * 16384, offsets=bytes(8 * 16384))),
    store_pb2.StoreCommitRequest(written=bytes(8), checksums=bytes(64)),
    store_pb2.ReleaseRequest(lease_ids=range(4096)),
    health_pb2.HealthCheckRequest(service="x" * 4096),
]


@pytest.mark.parametrize("request_", WITHIN, ids=lambda request: type(request).__name__)
def test_what_is_within_the_limits_is_parsed(request_: Any) -> None:
    assert parse(request_) == request_


def ids(count: int) -> Any:
    return blocks_pb2.FreeRequest(sequence_ids=range(count))


ABOVE = {
    "sequences": ("sequences", "max_request_sequences", allocate(*[Allocation()] * 5)),
    "tokens of all": (
        "sequences.token_ids",
        "max_request_tokens",
        allocate(Allocation(token_ids=range(6)), Allocation(token_ids=range(5))),
    ),
    "ids": ("sequence_ids", "max_request_sequences", ids(5)),
    "ids of parents": ("parent_ids", "max_request_sequences", blocks_pb2.ForkRequest(parent_ids=[1] * 5)),
    "counts": ("num_tokens", "max_request_sequences", blocks_pb2.OpenStepRequest(num_tokens=[1] * 5)),
    "tokens": ("token_ids", "max_request_tokens", blocks_pb2.MatchPrefixRequest(token_ids=range(11))),
    "ranges": (
        "ranges",
        "max_request_sequences",
        attention_pb2.ReadRequest(ranges=[attention_pb2.SequenceRange()] * 5),
    ),
    "extra keys of all": (
        "sequences.extra_keys",
        "",
        allocate(Allocation(extra_keys=[Key()] * 4000), Allocation(extra_keys=[Key()] * 97)),
    ),
    "shape": ("key.shape", "", attention_pb2.WriteRequest(key=tensor_pb2.Tensor(shape=[1] * 9))),
    "slopes": (
        "options.alibi_slopes",
        "",
        attention_pb2.AttendRequest(options=attention_pb2.AttentionOptions(alibi_slopes=[1.0] * 65536)),
    ),
    "text": ("name", "", session_pb2.OpenRequest(name="x" * 4097)),
    "region": (
        "query.shared_memory.region",
        "",
        attention_pb2.AttendRequest(
            query=tensor_pb2.Tensor(shared_memory=tensor_pb2.SharedMemoryPlace(region="x" * 5000))
        ),
    ),
    "key of an object": ("key", "", shared_memory_pb2.SystemSharedMemoryRegisterRequest(key="x" * 5000)),
    "keys of a store": ("keys", "max_request_blocks", store_pb2.AcquireRequest(keys=bytes(8 * 32 + 1))),
    "bits": ("written", "max_request_blocks", store_pb2.StoreCommitRequest(written=bytes(9))),
    "checksums": ("checksums", "max_request_blocks", store_pb2.StoreCommitRequest(checksums=bytes(72))),
    "pieces": (
        "region.piece_bytes",
        "",
        store_pb2.BatchGetRequest(region=store_pb2.Scatter(piece_bytes=[1] * 16385)),
    ),
    "leases": ("lease_ids", "", store_pb2.ReleaseRequest(lease_ids=range(4097))),
    "payload": ("payload", "", pool_pb2.PingRequest(payload=bytes((1 << 20) + 1))),
}


def check_refused(refused: Any, field: str, option: str) -> None:
    assert isinstance(refused, Refused)
    assert type(refused.error) is (QuotaExceededError if option else InvalidArgumentError)
    assert refused.error.field == field
    if option:
        value = str(getattr(LIMITS, option))
        assert refused.error.metadata == {"limit": option, "value": value}
        assert f"{option} = {value}" in refused.error.message
    with pytest.raises(type(refused.error)):
        check_accepted(refused)


@pytest.mark.parametrize("case", ABOVE)
def test_what_is_above_a_limit_is_refused_by_name(case: str) -> None:
    field, option, request = ABOVE[case]
    refused = parse(request)
    check_refused(refused, field, option)
    assert refused.call_id is None


@pytest.mark.parametrize("call_id", [0, 1, 300, 2**64 - 1])
def test_a_refused_call_of_a_stream_keeps_its_id(call_id: int) -> None:
    refused = parse(session_pb2.Call(call_id=call_id, free=ids(5)))
    check_refused(refused, "sequence_ids", "max_request_sequences")
    assert refused.call_id == (call_id or None), "0 is not written"


def test_bytes_that_are_no_message() -> None:
    for data in (b"\x08", b"\xff" * 20, b"\x0a\x01\xff"):  # the last is a string that is not UTF-8
        refused = parser(session_pb2.OpenRequest, LIMITS)(data)
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, InvalidArgumentError)
        assert not refused.error.field


@pytest.mark.parametrize("record", [b"\x98\x06\x01", b"\x08\x01"], ids=["unknown", "repeats one"])
def test_many_records_of_any_kind_are_refused(record: bytes) -> None:
    parse = parser(blocks_pb2.UnpinRequest, LIMITS)
    assert not isinstance(parse(record * 16000), Refused)
    refused = parse(record * 17000)
    assert isinstance(refused, Refused)
    assert "fields" in refused.error.message


@pytest.mark.parametrize("method", RPCS, ids=lambda method: method.full_name)
def test_every_request_of_the_contract_has_limits(method: Any) -> None:
    """A repeated field without a limit raises KeyError."""
    parser(GetMessageClass(method.input_type), LIMITS)


def test_the_limits_let_the_longest_sequence_through() -> None:
    assert ServeConfig().request_limits == RequestLimits(1024, 131072, 32768)
    long = ServeConfig(max_sequence_tokens=1 << 20, block_size=16)
    assert long.request_limits == RequestLimits(1024, 1 << 20, 1 << 16)
    given = ServeConfig(max_request_sequences=7, max_request_tokens=8, max_request_blocks=9)
    assert given.request_limits == RequestLimits(7, 8, 9)
