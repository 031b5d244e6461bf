"""The counts of the scanner for a message, against protobuf's own reading of the same bytes."""

from __future__ import annotations

import random
from typing import Any

import pytest
from each_row import each_row
from google.protobuf.internal import wire_format
from google.protobuf.message import DecodeError

from kvservice._ext import WIRE_MALFORMED, WIRE_TOO_MANY_RECORDS, WIRE_WITHIN_LIMITS, WireScanner
from kvservice.errors import InvalidArgumentError
from kvservice.v1 import blocks_pb2

VARINT, FIXED64, FIXED32, LENGTH, MESSAGE = range(5)
NONE = -1
PLENTY = 1 << 40
# The scanner's counters for the message below: its elements, and the bytes of its text.
VARINTS, FIXED64S, FIXED32S, NESTED, NESTED_FIXED32S, TEXT = range(6)
MESSAGES = [
    [
        (1, VARINT, VARINTS, NONE),
        (2, FIXED64, FIXED64S, NONE),
        (3, FIXED32, FIXED32S, NONE),
        (4, MESSAGE, NESTED, 1),
        (5, LENGTH, TEXT, NONE),
        (6, LENGTH, NONE, NONE),
        (2000, VARINT, VARINTS, NONE),
    ],
    [(2, FIXED32, NESTED_FIXED32S, NONE)],
]


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def record(number: int, wire_type: int, value: bytes) -> bytes:
    return varint(wire_format.PackTag(number, wire_type)) + value


def delimited(number: int, value: bytes) -> bytes:
    return record(number, wire_format.WIRETYPE_LENGTH_DELIMITED, varint(len(value)) + value)


def group(number: int, inside: bytes = b"") -> bytes:
    start, end = wire_format.WIRETYPE_START_GROUP, wire_format.WIRETYPE_END_GROUP
    return record(number, start, inside) + record(number, end, b"")


def scan(data: bytes, *, max_records: int = PLENTY, **limits: int) -> int:
    """Limits are by the counters' names; those that are not given allow anything."""
    bounds = [limits.get(name, PLENTY) for name in ("varints", "fixed64s", "fixed32s", "nested", "nested32s", "text")]
    return WireScanner(MESSAGES, bounds, max_records).scan(data)


# Name of a limit, bytes that hold three of what it counts, its counter.
COUNTED = {
    "varints, one by one": ("varints", record(1, 0, varint(300)) * 3, VARINTS),
    "varints, packed": ("varints", delimited(1, varint(1) + varint(1 << 63) + varint(0)), VARINTS),
    "varints of both kinds": ("varints", delimited(1, varint(1)) + record(1, 0, varint(1)) * 2, VARINTS),
    "varints of two fields": ("varints", record(1, 0, varint(7)) * 2 + record(2000, 0, varint(7)), VARINTS),
    "64 bits, one by one": ("fixed64s", record(2, 1, bytes(8)) * 3, FIXED64S),
    "64 bits, packed": ("fixed64s", delimited(2, bytes(24)), FIXED64S),
    "32 bits, one by one": ("fixed32s", record(3, 5, bytes(4)) * 3, FIXED32S),
    "32 bits, packed": ("fixed32s", delimited(3, bytes(8)) + delimited(3, bytes(4)), FIXED32S),
    "messages, empty": ("nested", delimited(4, b"") * 3, NESTED),
    "elements of several messages": ("nested32s", delimited(4, delimited(2, bytes(4))) * 3, NESTED_FIXED32S),
    "elements of one message": ("nested32s", delimited(4, delimited(2, bytes(12))), NESTED_FIXED32S),
    "bytes of a text": ("text", delimited(5, b"abc"), TEXT),
    "bytes of a text that comes twice": ("text", delimited(5, b"ab") + delimited(5, b"c"), TEXT),
}


def test_it_stops_at_the_first_above_the_limit() -> None:
    with each_row() as row:
        for case, (name, data, counter) in COUNTED.items():
            with row(case):
                assert scan(data, **{name: 3}) == WIRE_WITHIN_LIMITS
                assert scan(data, **{name: 2}) == counter


def test_every_record_counts() -> None:
    four_records = {
        "known": record(1, 0, varint(1)) * 4,
        "unknown": record(99, 0, varint(1)) * 4,
        "unknown texts": delimited(99, b"x") * 4,
        "nested": delimited(4, delimited(2, bytes(400)) + record(9, 5, bytes(4)) * 2),
        "in a group": group(99, record(1, 0, varint(1)) * 2),
        "groups": group(99, group(98)),
        "of another type than declared": record(1, 5, bytes(4)) * 4,
    }
    with each_row() as row:
        for name, data in four_records.items():
            with row(name):
                assert scan(data, max_records=4) == WIRE_WITHIN_LIMITS
                assert scan(data, max_records=3) == WIRE_TOO_MANY_RECORDS


def test_malformed_bytes() -> None:
    malformed = (
        b"\x08",
        b"\x08\x80",
        b"\x08" + b"\x80" * 10 + b"\x01",
        b"\x80" * 11,
        b"\x00\x00",
        b"\x0e\x00",
        b"\x0f\x00",
        varint(1 << 32 | 8) + b"\x00",
        record(2, 1, bytes(7)),
        record(3, 5, bytes(3)),
        record(99, 1, bytes(7)),
        delimited(5, b"abc")[:-1],
        record(5, 2, varint((1 << 64) - 1)),
        delimited(2, bytes(12)),
        delimited(3, bytes(6)),
        delimited(1, b"\x80"),
        delimited(4, b"\x10"),
        record(99, 3, b""),
        record(99, 4, b""),
        record(99, 3, record(98, 4, b"")),
        record(99, 3, record(1, 0, varint(1))),
        delimited(4, record(99, 4, b"")),
    )
    assert [data for data in malformed if scan(data) != WIRE_MALFORMED] == []


def test_groups_may_nest_as_deep_as_protobuf_lets_them() -> None:
    nested = b""
    for _ in range(32):
        nested = group(99, nested)
    assert scan(nested) == WIRE_WITHIN_LIMITS
    assert scan(group(99, nested)) == WIRE_MALFORMED
    assert scan(record(99, 3, b"") * 1_000_000) == WIRE_MALFORMED


def test_an_empty_message_is_within_all_limits() -> None:
    assert scan(b"", max_records=0) == WIRE_WITHIN_LIMITS


def test_it_takes_what_protobuf_takes() -> None:
    """Protobuf refuses each mutated request that the scanner refuses, or reads only unknown groups from it."""
    rules = [
        [(1, LENGTH, NONE, NONE), (2, VARINT, NONE, NONE), (3, MESSAGE, 0, 1), (4, VARINT, NONE, NONE)],
        [(1, VARINT, NONE, NONE), (2, FIXED32, 1, NONE), (3, MESSAGE, 2, 2)],
        [(1, VARINT, NONE, NONE), (2, LENGTH, NONE, NONE)],
    ]
    source, parsed = random.Random(7), 0
    keys = [blocks_pb2.ExtraKey(position=3, key=b"k")]
    one = blocks_pb2.SequenceAllocation(sequence_id=1 << 40, token_ids=range(5), extra_keys=keys)
    good = blocks_pb2.AllocateRequest(session_token=b"t" * 16, request_id=9, sequences=[one, one]).SerializeToString()
    for _ in range(5000):
        data = bytearray(good)
        for _ in range(source.randint(0, 3)):
            data[source.randrange(len(data))] = source.randrange(256)
        request = parse(bytes(data))
        if request is None:
            continue
        parsed += 1
        counts = counted(request)
        assert WireScanner(rules, counts, PLENTY).scan(bytes(data)) == WIRE_WITHIN_LIMITS
        for i in (i for i, count in enumerate(counts) if count):
            less = [count - (i == j) for j, count in enumerate(counts)]
            assert WireScanner(rules, less, PLENTY).scan(bytes(data)) == i
    assert parsed > 1000


def parse(data: bytes) -> Any:
    try:
        return blocks_pb2.AllocateRequest.FromString(data)
    except DecodeError:
        return None


def counted(request: Any) -> list[int]:
    sequences = request.sequences
    return [
        len(sequences),
        sum(len(one.token_ids) for one in sequences),
        sum(len(one.extra_keys) for one in sequences),
    ]


def test_rules_that_make_no_sense() -> None:
    without_limits = (
        (1, 5, NONE, NONE),
        (1, VARINT, 0, NONE),
        (1, VARINT, -2, NONE),
        (1, VARINT, NONE, 0),
        (1, MESSAGE, NONE, 1),
        (1, MESSAGE, NONE, NONE),
    )
    with each_row() as row:
        for messages in ([], *([[field]] for field in without_limits)):
            with row(messages), pytest.raises(InvalidArgumentError):
                WireScanner(messages, [], PLENTY)
