"""Meaningless messages of the highest possible cost, up to the maximum message size."""

from __future__ import annotations

from collections.abc import Iterator

# Field numbers that no message of the contract has.
_NUMBER = 1000
_VARINT, _LENGTH, _GROUP, _END_GROUP = 0, 2, 3, 4


def messages(num_bytes: int) -> Iterator[bytes]:
    """Return messages of different kinds."""
    yield bytes(num_bytes)
    yield unknown_bytes(num_bytes)
    yield unknown_bytes(num_bytes - 1) + b"\0"
    number = _tag(_VARINT) + b"\1"
    yield number * (num_bytes // len(number))
    # The default limits on the number and the size of fields in a request.
    count = 131_072
    yield unknown_bytes(num_bytes // count) * count
    groups = _tag(_GROUP) * 32 + _tag(_END_GROUP) * 32
    yield groups * (num_bytes // len(groups))
    group = _tag(_GROUP) * 2 + unknown_bytes(500) + _tag(_END_GROUP) * 2
    yield group * (num_bytes // len(group))


def unknown_bytes(num_bytes: int) -> bytes:
    """Return an unknown field of this size in bytes, at least 16."""
    size = num_bytes - 6
    length = bytes((0x80 | size & 0x7F, 0x80 | size >> 7 & 0x7F, 0x80 | size >> 14 & 0x7F, size >> 21))
    return _tag(_LENGTH) + length + bytes(size)


def _tag(wire_type: int) -> bytes:
    tag = _NUMBER << 3 | wire_type
    return bytes((0x80 | tag & 0x7F, tag >> 7))
