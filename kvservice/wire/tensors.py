"""Tensor messages and token ids as NumPy arrays; messages with tensors or blocks, and the fields around every call,
without protobuf."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message

from kvservice import _ext
from kvservice.errors import InvalidArgumentError
from kvservice.pool.layout import TENSOR_DTYPES
from kvservice.v1 import tensor_pb2

Array = np.ndarray[Any, Any]

_TYPE_OF_NAME: dict[str, Any] = {name: tensor_pb2.DataType.Value("DATA_TYPE_" + name.upper()) for name in TENSOR_DTYPES}
_DTYPE_OF_TYPE = {_TYPE_OF_NAME[name]: dtype for name, dtype in TENSOR_DTYPES.items()}
_TYPE_OF_DTYPE = {dtype: data_type for data_type, dtype in _DTYPE_OF_TYPE.items()}


# Reads a place in shared memory as uint8. The string is the field's name, for errors.
ReadPlace = Callable[[tensor_pb2.SharedMemoryPlace, str], Array]


def to_array(tensor: tensor_pb2.Tensor, field: str, read_place: ReadPlace | None = None) -> Array:
    """Return the tensor as an array: read-only, over the bytes of the field, or a view of the result of `read_place`.

    Raises InvalidArgumentError naming the wrong part of `field`: data_type, shape, or the number of bytes.
    """
    dtype = _DTYPE_OF_TYPE.get(tensor.data_type)
    if dtype is None:
        raise InvalidArgumentError(f"unknown type {tensor.data_type}", field=f"{field}.data_type")
    shape = tuple(tensor.shape[:9])
    if len(shape) > 8:
        raise _no_shape(shape, field)
    num_bytes = math.prod(shape) * dtype.itemsize
    data: bytes | Array
    if read_place is not None and tensor.HasField("shared_memory"):
        place = tensor.shared_memory
        if place.byte_size != num_bytes:
            raise _wrong_size(place.byte_size, num_bytes, shape, field, "shared_memory.byte_size")
        data = read_place(place, f"{field}.shared_memory")
    else:
        data = tensor.inline
        if len(data) != num_bytes:
            raise _wrong_size(len(data), num_bytes, shape, field, "inline")
    try:
        return np.ndarray(shape, dtype, data)
    except ValueError:  # a dimension is negative, or one is 0 and the product of the others overflows
        raise _no_shape(shape, field) from None


def _no_shape(shape: tuple[int, ...], field: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"not the shape of a tensor: {list(shape)}", field=f"{field}.shape")


def _wrong_size(found: int, expected: int, shape: tuple[int, ...], field: str, part: str) -> InvalidArgumentError:
    if min(shape, default=0) < 0:
        return _no_shape(shape, field)
    return InvalidArgumentError(
        f"{found} bytes, a tensor of shape {list(shape)} takes {expected}", field=f"{field}.{part}"
    )


def put_tensor(array: Array, message: tensor_pb2.Tensor) -> None:
    """Store an array of one of the tensor dtypes in a message. It fills `message` in place, because assigning a message
    field copies it."""
    message.data_type = _TYPE_OF_DTYPE[array.dtype]
    message.shape.extend(array.shape)
    message.inline = array.tobytes()


def put_type(array: Array, message: tensor_pb2.Tensor) -> None:
    """Store the dtype and the shape of an array, without its elements."""
    message.data_type = _TYPE_OF_DTYPE[array.dtype]
    message.shape.extend(array.shape)


def token_array(message: Any) -> Array:
    """Return the field `token_ids` (packed sfixed32) of a message as int32[n].

    Protobuf makes a Python object of each element. It is faster to serialize the message, and to copy the packed field
    from there."""
    tokens: Array = _ext.packed_fixed32(message.SerializeToString(), message.TOKEN_IDS_FIELD_NUMBER)
    return tokens


# ---- serialization and parsing without protobuf, which copies the elements five times and aborts the process if a copy
# runs out of memory. This code copies them once.

_VARINT: Final = 0
_FIXED_BYTES: Final = {1: 8, 5: 4}
_LENGTH_DELIMITED: Final = 2
# The most fields of a message of which the last one is split off.
_MAX_FIELDS: Final = 32


@dataclass(slots=True)
class Encoded:
    """Serialized fields of a message, in pieces. Arrays among them must not change before they are joined
    (`to_bytes`, `with_field`). In a response of the daemon they may be views of its memory, so they are joined before
    anything else runs on the event loop."""

    pieces: tuple[Any, ...] = ()

    def __add__(self, other: Encoded) -> Encoded:
        """Return the fields of both messages."""
        return Encoded(self.pieces + other.pieces)

    def inside(self, number: int) -> Encoded:
        """Return this message as field `number` of an outer message."""
        return Encoded((field_header(number, sum(map(len, self.pieces))), *self.pieces))

    def to_bytes(self) -> bytes:
        """Join the pieces. Raises MemoryError."""
        return b"".join(self.pieces)


def encode_tensor(array: Array) -> Encoded:
    """Encode an array of one of the tensor dtypes as a Tensor message with inline elements. It copies them only if they
    are not contiguous."""
    elements = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return Encoded((_tensor_head(array.dtype, array.shape), elements))


@functools.lru_cache(maxsize=1024)
def _tensor_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return what precedes the elements of a Tensor message. Most tensors have the shape of one before."""
    message = tensor_pb2.Tensor(data_type=_TYPE_OF_DTYPE[dtype], shape=shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    return message.SerializeToString() + field_header(tensor_pb2.Tensor.INLINE_FIELD_NUMBER, num_bytes)


@functools.lru_cache(maxsize=1024)
def field_header(number: int, num_bytes: int) -> bytes:
    """Return what precedes the bytes of a field: its tag, and its size. Most calls have the sizes of calls before."""
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


def split_last_field(message: memoryview, number: int) -> tuple[memoryview, memoryview] | None:
    """Return what precedes the last field of a valid message, and the bytes of that field; None unless the message ends
    with a field of this number, which is a message or bytes. None, too, if there are groups in it, or more fields than
    clients send: as many as a request may have, 160,000, would take 70 ms here."""
    tag = begin = start = at = num_fields = 0
    while at < len(message):
        num_fields += 1
        if num_fields > _MAX_FIELDS:
            return None
        begin = at
        tag, at = _parse_varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _parse_varint(message, at)
        elif kind == _LENGTH_DELIMITED:
            size, start = _parse_varint(message, at)
            at = start + size
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            return None
    return (message[:begin], message[start:]) if tag == number << 3 | _LENGTH_DELIMITED else None


def join_elements(messages: Iterable[bytes], number: int) -> bytes:
    """Return a message with a repeated message field of this number, which has these serialized messages."""
    pieces: list[bytes] = []
    for one in messages:
        pieces += field_header(number, len(one)), one
    return b"".join(pieces)


def with_field(message: bytes, number: int, field: Message | Encoded | bytes) -> bytes:
    """Return a serialized message with one more field, which is a message. A message that is set as a field of another
    one is copied, which takes longer than serializing both."""
    if isinstance(field, Encoded):
        return b"".join((message, *field.inside(number).pieces))
    data = field if isinstance(field, bytes) else field.SerializeToString()
    return b"".join((message, field_header(number, len(data)), data))


def split_elements(data: bytes, number: int, limit: int) -> list[bytes]:
    """Return the serialized messages of a repeated message field. The outer message has no other field. Raises
    ValueError, also for more than `limit` of them, or IndexError."""
    elements: list[bytes] = []
    tag, at = number << 3 | _LENGTH_DELIMITED, 0
    while at < len(data):
        if data[at] != tag or len(elements) == limit:
            raise ValueError(f"not up to {limit} messages of field {number}")
        size, at = _parse_varint(data, at + 1)
        elements.append(data[at : at + size])
        at += size
    if at > len(data):
        raise IndexError("a field ends after the message")
    return elements


def _parse_varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """Return a number, and where the next one begins. Raises ValueError for one of more than 64 bits, and
    IndexError."""
    value = shift = 0
    while data[at] > 0x7F:
        if shift > 56:
            raise ValueError("a number of more than 64 bits")
        value |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | data[at] << shift, at + 1
