"""Serialization and parsing of messages with tensors or blocks, without protobuf.

Protobuf copies the elements five times and aborts the process if a copy runs out of memory. This code copies them once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvservice.v1 import tensor_pb2
from kvservice.wire.tensors import Array, put_type

_VARINT: Final = 0
_LENGTH_DELIMITED: Final = 2


@dataclass(frozen=True, slots=True)
class Encoded:
    """Serialized fields of a message, in pieces. Arrays among them must not change before `to_bytes`."""

    pieces: tuple[Any, ...] = ()

    def __add__(self, other: Encoded) -> Encoded:
        """Return the fields of both messages."""
        return Encoded(self.pieces + other.pieces)

    def inside(self, number: int) -> Encoded:
        """Return this message as field `number` of an outer message."""
        return Encoded((_header(number, sum(map(len, self.pieces))), *self.pieces))

    def to_bytes(self) -> bytes:
        """Join the pieces. Raises MemoryError."""
        return b"".join(self.pieces)


def encode_tensor(array: Array) -> Encoded:
    """Encode an array of one of the tensor dtypes as a Tensor message with inline elements. It does not copy them."""
    message = tensor_pb2.Tensor()
    put_type(array, message)
    elements = Encoded((np.ascontiguousarray(array).reshape(-1).view(np.uint8).data,))
    return Encoded((message.SerializeToString(), *elements.inside(tensor_pb2.Tensor.INLINE_FIELD_NUMBER).pieces))


def _header(number: int, num_bytes: int) -> bytes:
    """Return the tag of a field, and its size."""
    encoded = bytearray()
    for value in (number << 3 | _LENGTH_DELIMITED, num_bytes):
        while value > 0x7F:
            encoded.append(value & 0x7F | 0x80)
            value >>= 7
        encoded.append(value)
    return bytes(encoded)


def fields_of(data: memoryview) -> dict[int, Any]:
    """Parse a message without copying its fields: numbers, and views of texts, bytes and messages. Of a field that is
    there several times, the last one counts. Raises ValueError for other kinds of fields, or IndexError, for data that
    is no such message."""
    fields: dict[int, Any] = {}
    at = 0
    while at < len(data):
        tag, at = _parse_varint(data, at)
        value, at = _parse_varint(data, at)
        if tag & 7 == _LENGTH_DELIMITED:
            fields[tag >> 3] = data[at : at + value]
            at += value
        elif tag & 7 == _VARINT:
            fields[tag >> 3] = value
        else:
            raise ValueError(f"a field of kind {tag & 7}")
    if at > len(data):
        raise IndexError("a field ends after the message")
    return fields


def _parse_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number, and where the next one begins."""
    value = shift = 0
    while data[at] > 0x7F:
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | data[at] << shift, at + 1
