"""Requests, counted before they are parsed.

A message of a few MiB can have millions of elements, and parsing them would block the event loop for seconds. So a
scanner first counts the elements of a message, and it is parsed only if they are within limits. The counting rules are
derived from the protobuf descriptors; each new repeated field needs an entry in `_ELEMENTS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kvservice import _ext
from kvservice.blocks.arguments import MAX_EXTRA_KEY_BYTES, MAX_EXTRA_KEYS
from kvservice.config import RequestLimits
from kvservice.errors import InvalidArgumentError, KVServiceError, QuotaExceededError
from kvservice.transfer import MAX_ENGINES
from kvservice.v1 import session_pb2, store_pb2
from kvservice.wire.tensors import split_elements, split_last_field, with_field

MAX_TEXT_BYTES: Final = 4096
MAX_PING_BYTES: Final = 1 << 20
# The limits on the pieces of a block of the store, and on the leases that one request may end.
MAX_PIECES: Final = 16384
MAX_LEASE_IDS: Final = 4096
# The limit on missing keys of which one request asks for the reason.
MAX_MISSING: Final = 256
# The limit on the layers that one request names.
MAX_LAYERS: Final = 4096
# The limit on the calls of one message of a session's stream.
MAX_CALLS: Final = 128
# The limit on batches of a scheduler that are not reported.
MAX_REPORTS: Final = 2
# The limit on records (a tag with its value) of a request, in addition to one per token and a few per sequence.
_MAX_OTHER_RECORDS: Final = 16384
_RECORDS_PER_SEQUENCE: Final = 16

_SEQUENCES: Final = "max_request_sequences"
_TOKENS: Final = "max_request_tokens"
# The limit on the elements of each repeated field, by field name: the name of a field of RequestLimits, or a number.
_ELEMENTS: Final[dict[str, str | int]] = {
    "sequences": _SEQUENCES,
    "sequence_ids": _SEQUENCES,
    "parent_ids": _SEQUENCES,
    "layers": MAX_LAYERS,
    "requests": _SEQUENCES,
    "request_ids": _SEQUENCES,
    "finished_ids": _SEQUENCES,
    "num_proposed": _SEQUENCES,
    "stop_lengths": _SEQUENCES,
    "child_ids": _SEQUENCES,
    "num_tokens": _SEQUENCES,
    "lengths": _SEQUENCES,
    "expected_lengths": _SEQUENCES,
    "ranges": _SEQUENCES,
    "token_ids": _TOKENS,
    "proposals": _TOKENS,
    "reports": MAX_REPORTS,
    "extra_keys": MAX_EXTRA_KEYS,
    "shape": 8,
    "alibi_slopes": 65535,
    "piece_bytes": MAX_PIECES,
    "ports": MAX_ENGINES,
    "lease_ids": MAX_LEASE_IDS,
}
# The limit in bytes on the fields that are not texts. None means that only the message size limits the field.
_BYTES: Final[dict[str, int | None]] = {
    "kvservice.v1.Tensor.inline": None,
    "kvservice.v1.PingRequest.payload": MAX_PING_BYTES,
    "kvservice.v1.ExtraKey.key": MAX_EXTRA_KEYS * MAX_EXTRA_KEY_BYTES,
    "kvservice.v1.Scatter.offsets": None,
    "kvservice.v1.BatchPutRequest.data": None,
    "kvservice.v1.TouchRequest.missing": MAX_MISSING * 32,
}
# Fields with something for each of max_request_blocks blocks, by field name: the bytes for each.
_BYTES_PER_BLOCK: Final = {"keys": 32, "written": 1, "checksums": 8}

# The field kinds of the scanner.
_VARINT, _FIXED64, _FIXED32, _LENGTH, _MESSAGE = range(5)
_FIELD_KINDS: Final = {
    FieldDescriptor.TYPE_FIXED64: _FIXED64,
    FieldDescriptor.TYPE_SFIXED64: _FIXED64,
    FieldDescriptor.TYPE_DOUBLE: _FIXED64,
    FieldDescriptor.TYPE_FIXED32: _FIXED32,
    FieldDescriptor.TYPE_SFIXED32: _FIXED32,
    FieldDescriptor.TYPE_FLOAT: _FIXED32,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _MESSAGE,
}
_NONE: Final = -1
# The field of Call with the calls of one message, and its tag.
_CALLS: Final = session_pb2.Call.CALLS_FIELD_NUMBER
_CALLS_TAG: Final = bytes((_CALLS << 3 | 2,))


# The fields of the blocks in a call, and the size from which on protobuf does not parse them.
_BATCH_PUT: Final = session_pb2.Call.STORE_BATCH_PUT_FIELD_NUMBER
_DATA: Final = store_pb2.BatchPutRequest.DATA_FIELD_NUMBER
LARGE_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Refused:
    """Replaces a request that is malformed or exceeds a limit. An exception raised in the deserializer would make gRPC
    end the call with UNKNOWN. `call_id` is the id of a call on a stream, if it could be parsed."""

    error: KVServiceError
    call_id: int | None = None


@dataclass(frozen=True)
class Calls:
    """Several calls of one message, still serialized: each is counted and parsed when it is its turn."""

    serialized: list[bytes]
    parse: Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class BlocksRequest:
    """A BatchPutRequest without its blocks, which are in `data`, a view of the received message: protobuf would copy
    them twice."""

    message: store_pb2.BatchPutRequest
    data: memoryview

    def __getattr__(self, name: str) -> Any:
        return getattr(self.message, name)


@dataclass(frozen=True, slots=True)
class BlocksCall:
    """A call with a BlocksRequest."""

    call: session_pb2.Call
    request: BlocksRequest


def moves_blocks(call: session_pb2.Call | BlocksCall | Calls | Refused) -> TypeGuard[session_pb2.Call | BlocksCall]:
    """Return whether a call takes blocks of the store in its message, or may return some in its reply."""
    return isinstance(call, BlocksCall) or (isinstance(call, session_pb2.Call) and call.HasField("store_batch_get"))


def check_accepted(request: object) -> None:
    """Raise the error of a request that was refused."""
    if isinstance(request, Refused):
        raise request.error


@functools.cache
def parser(kind: type[Message], limits: RequestLimits) -> Callable[[bytes], Message | Refused | Calls | BlocksCall]:
    """Return a gRPC deserializer for requests of this type, the same one for all ports. Only a message of calls becomes
    `Calls`, and only a call with many bytes of blocks a `BlocksCall`."""
    rules = _Rules(limits)
    rules.add(kind.DESCRIPTOR, "")
    scanner = _ext.WireScanner(rules.messages, [counter.limit for counter in rules.counters], rules.max_records)
    is_call = kind is session_pb2.Call

    def parse(data: bytes, joined: bool = is_call) -> Message | Refused | Calls | BlocksCall:
        if joined and data[:1] == _CALLS_TAG:
            try:
                return Calls(split_elements(data, _CALLS, MAX_CALLS), functools.partial(parse, joined=False))
            except (ValueError, IndexError):
                return Refused(InvalidArgumentError(f"must be up to {MAX_CALLS} calls and nothing else", field="calls"))
        found = scanner.scan(data)
        if found == _ext.WIRE_WITHIN_LIMITS:
            try:
                if is_call and len(data) >= LARGE_BYTES and (call := _blocks_call(memoryview(data))) is not None:
                    return call
                return kind.FromString(data)
            except DecodeError:  # a string that is not UTF-8
                found = _ext.WIRE_MALFORMED
        return Refused(rules.error(found), _call_id(data) if is_call else None)

    return parse


def _blocks_call(data: memoryview) -> BlocksCall | None:
    """Parse a call that was counted without its last field, which are blocks, or return None if it ends otherwise.
    Raises DecodeError."""
    if (of_call := split_last_field(data, _BATCH_PUT)) is None:
        return None
    if (of_request := split_last_field(of_call[1], _DATA)) is None:
        return None
    call = session_pb2.Call.FromString(with_field(bytes(of_call[0]), _BATCH_PUT, bytes(of_request[0])))
    return BlocksCall(call, BlocksRequest(call.store_batch_put, of_request[1]))


@dataclass(frozen=True)
class _Counter:
    """A limit on one field. `field` is its path from the request. `option` is the configuration field that sets the
    limit, or empty for a fixed limit; a field of bytes may have `per_unit` bytes for each of its units."""

    field: str
    limit: int
    unit: str
    option: str = ""
    per_unit: int = 1

    def error(self) -> KVServiceError:
        if not self.option:
            return InvalidArgumentError(f"a request may have {self.limit} {self.unit} here", field=self.field)
        value = self.limit // self.per_unit
        return QuotaExceededError(
            f"a request may have {self.option} = {value} {self.unit} here",
            field=self.field,
            limit=self.option,
            value=value,
        )


@dataclass
class _Rules:
    """The scanner's table for one message type, and the meaning of its counters."""

    limits: RequestLimits
    messages: list[list[tuple[int, int, int, int]]] = field(default_factory=list)
    counters: list[_Counter] = field(default_factory=list)

    @property
    def max_records(self) -> int:
        limits = self.limits
        return limits.max_request_tokens + _RECORDS_PER_SEQUENCE * limits.max_request_sequences + _MAX_OTHER_RECORDS

    def add(self, kind: Any, path: str) -> int:
        """Add the message type with this descriptor, found at this path. Returns its number."""
        number = len(self.messages)
        self.messages.append([])
        self.messages[number] = [self._rule(of, f"{path}{of.name}") for of in kind.fields]
        return number

    def _rule(self, of: FieldDescriptor, path: str) -> tuple[int, int, int, int]:
        kind = _FIELD_KINDS.get(of.type, _VARINT)
        if of.message_type is session_pb2.Call.DESCRIPTOR:
            kind = _LENGTH  # it is empty, so that calls do not nest
        counter = self._counter(of, path)
        if counter is not None:
            self.counters.append(counter)
        number = _NONE if counter is None else len(self.counters) - 1
        if kind != _MESSAGE:
            return of.number, kind, number, _NONE
        # The field of `Call` is not part of the path, so both kinds of transport report the same field names.
        below = "" if of.containing_type is session_pb2.Call.DESCRIPTOR else f"{path}."
        return of.number, kind, number, self.add(of.message_type, below)

    def _counter(self, of: FieldDescriptor, path: str) -> _Counter | None:
        if of.message_type is session_pb2.Call.DESCRIPTOR:
            return _Counter(path, 0, "calls")
        if of.is_repeated:
            limit = _ELEMENTS[of.name]
            if isinstance(limit, str):
                return _Counter(path, getattr(self.limits, limit), "elements", limit)
            return _Counter(path, limit, "elements")
        if _FIELD_KINDS.get(of.type) == _LENGTH:
            if (per_block := _BYTES_PER_BLOCK.get(of.name)) is not None:
                limit = self.limits.max_request_blocks * per_block
                return _Counter(path, limit, "blocks", "max_request_blocks", per_block)
            num_bytes = _BYTES.get(of.full_name, MAX_TEXT_BYTES)
            return None if num_bytes is None else _Counter(path, num_bytes, "bytes")
        return None

    def error(self, found: int) -> KVServiceError:
        """Return the error for a result of the scanner."""
        if found == _ext.WIRE_MALFORMED:
            return InvalidArgumentError("the request's bytes are no message of its type")
        if found == _ext.WIRE_TOO_MANY_RECORDS:
            return InvalidArgumentError(f"the request's message has more than {self.max_records} fields")
        return self.counters[found].error()


def _call_id(data: bytes) -> int | None:
    """Return the first field of a Call if it is the call id, else None. Protobuf libraries serialize the id first."""
    number = 0
    if data[:1] == b"\x08":
        for i, byte in enumerate(data[1:11]):
            number |= (byte & 0x7F) << 7 * i
            if byte < 0x80:
                return number & (1 << 64) - 1
    return None
