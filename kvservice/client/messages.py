"""The messages of calls: a caller's arguments become requests, and requests the messages of a session's stream.

Values that protobuf rejects raise an error that names the field. Operations above the daemon's limits are refused here,
or split into requests that stay within them. Blocks in messages bypass protobuf, which copies bytes several times.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from collections.abc import Sequence as Batch
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
from google.protobuf.message import Message

from kvservice._ext import pack_fixed32
from kvservice.client.values import PoolInfo, Sequence, SequenceInfo, StepInfo
from kvservice.errors import InvalidArgumentError, MessageTooLargeError
from kvservice.v1 import blocks_pb2, session_pb2, session_pb2_grpc, store_pb2
from kvservice.wire.status import from_status
from kvservice.wire.tensors import field_header, fields_of, join_elements, split_elements, with_field

MessageT = TypeVar("MessageT", bound=Message)
T = TypeVar("T")


# Longest finite time in seconds that a caller may name. Longer ones overflow the clocks of gRPC or of the system.
MAX_WAIT_S = 1e9


def build(kind: Callable[..., MessageT], **fields: Any) -> MessageT:
    """Create a protobuf message. Raises InvalidArgumentError naming the field whose value protobuf rejects."""
    try:
        return kind(**fields)
    except (TypeError, ValueError, OverflowError):
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except (TypeError, ValueError, OverflowError) as error:
                raise InvalidArgumentError(str(error), field=name) from None
        raise


def whole(value: Any, field: str) -> int:
    """Convert an integer of any type to int. Raises InvalidArgumentError for other values, such as NaN and 1.5."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{value!r} is not a whole number", field=field) from None


def time_limit(timeout_s: Any) -> float | None:
    """Return a call's time limit in seconds; None and infinity mean no limit and become None. Raises
    InvalidArgumentError naming timeout_s, also above MAX_WAIT_S."""
    if timeout_s is None:
        return None
    if isinstance(timeout_s, (int, float)):
        if 0 < timeout_s <= MAX_WAIT_S:
            return float(timeout_s)
        if timeout_s == math.inf:
            return None
    raise InvalidArgumentError(
        f"{timeout_s!r} is not a number of seconds above 0, at most {MAX_WAIT_S:g} or infinity", field="timeout_s"
    )


def wait_time(wait_s: Any, field: str) -> float:
    """Return a number of seconds from 0 to MAX_WAIT_S. Raises InvalidArgumentError."""
    if isinstance(wait_s, (int, float)) and 0 <= wait_s <= MAX_WAIT_S:
        return float(wait_s)
    raise InvalidArgumentError(f"{wait_s!r} is not a number of seconds from 0 to {MAX_WAIT_S:g}", field=field)


def number(value: Any, field: str) -> float:
    """Convert a number of any type to float. Raises InvalidArgumentError for other values; texts are no numbers."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgumentError(f"{value!r} is not a number", field=field)


def flag(value: Any, field: str) -> bool:
    """Convert to bool. Raises InvalidArgumentError for values that are neither true nor false, such as arrays."""
    try:
        return bool(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"is {type(value).__name__}, neither true nor false", field=field) from None


def choice(value: Any, choices: Iterable[str], field: str) -> str:
    """Return a text that is one of the choices. Raises InvalidArgumentError."""
    names = tuple(choices)
    if not isinstance(value, str) or value not in names:
        raise InvalidArgumentError(f"is {value!r}, not one of {', '.join(names)}", field=field)
    return value


def listed(values: Iterable[T], field: str) -> list[T]:
    """Return the values of an iterable. Raises InvalidArgumentError for anything else."""
    try:
        found = iter(values)
    except TypeError:
        raise InvalidArgumentError(f"is {type(values).__name__}, not a list", field=field) from None
    return list(found)


def size_of(values: Sized, field: str) -> int:
    """Return the number of values. Raises InvalidArgumentError for what has no length."""
    try:
        return len(values)
    except TypeError:
        raise InvalidArgumentError(f"is {type(values).__name__}, not a list", field=field) from None


def int_list(values: Iterable[int], field: str) -> list[int]:
    """Convert integers to a plain list, as `pack_fixed32` and protobuf take it. Raises InvalidArgumentError naming
    `field`."""
    if type(values) is list:
        return values
    array = np.asarray(values if hasattr(values, "__array__") else listed(values, field))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgumentError(f"is {array.dtype} of shape {list(array.shape)}, must be whole numbers", field=field)
    flat: list[int] = array.tolist()
    return flat


# ---- the limits of requests


# Upper bound on the bytes of a message besides its tensors.
OVERHEAD_BYTES = 4096


def fits(num_bytes: int, message_bytes: int) -> bool:
    """Return whether tensors of this many bytes fit into a message."""
    return num_bytes + OVERHEAD_BYTES <= message_bytes


def check_size(num_bytes: int, field: str, info: PoolInfo) -> None:
    """Raise MessageTooLargeError if the daemon would refuse a message of this size."""
    if num_bytes + OVERHEAD_BYTES > info.max_message_bytes:
        raise MessageTooLargeError(f"{num_bytes} bytes, a message may have {info.max_message_bytes}", field=field)


def id_batches(ids: list[int], info: PoolInfo) -> Iterator[list[int]]:
    """Split the ids into batches of at most `max_request_sequences`."""
    for first in range(0, len(ids), info.max_request_sequences):
        yield ids[first : first + info.max_request_sequences]


def token_parts(num_tokens: int, token_bytes: int, message_bytes: int) -> list[tuple[int, int]]:
    """Split tokens into parts (first, stop), each with as many tokens as fit into a message. Returns one part if all
    tokens fit, or if not even one does."""
    most = (message_bytes - OVERHEAD_BYTES) // max(1, token_bytes)
    if most < 1:
        return [(0, num_tokens)]
    return [(first, min(first + most, num_tokens)) for first in range(0, num_tokens, most)] or [(0, 0)]


def describable_batches(infos: list[SequenceInfo], info: PoolInfo) -> Iterator[list[int]]:
    """Yield the ids in batches whose tokens and blocks are within the limits of one request."""
    batch: list[int] = []
    tokens = blocks = 0
    for one in infos:
        tokens, blocks = tokens + one.length, blocks + one.num_blocks
        full = tokens > info.max_request_tokens or blocks > info.max_request_blocks
        if batch and (full or len(batch) == info.max_request_sequences):
            yield batch
            batch, tokens, blocks = [], one.length, one.num_blocks
        batch.append(one.sequence_id)
    if batch:
        yield batch


# ---- sequences, tokens and keys


ExtraKeys = Iterable[tuple[int, bytes]]


_SEQUENCE_ID = operator.attrgetter("sequence_id")


def ids_of(sequences: Iterable[Sequence]) -> list[int]:
    """Return the ids. Raises InvalidArgumentError for what is no list of sequences."""
    try:
        return list(map(_SEQUENCE_ID, sequences))
    except (TypeError, AttributeError):
        raise _no_sequences(sequences, "sequences") from None


def id_of(sequence: Sequence, field: str) -> int:
    """Return the id of a sequence. Raises InvalidArgumentError for anything else."""
    try:
        return sequence.sequence_id
    except AttributeError:
        raise InvalidArgumentError(f"is {type(sequence).__name__}, not a sequence", field=field) from None


def _no_sequences(sequences: Any, field: str) -> InvalidArgumentError:
    """Return the error for what is no list of sequences. It looks for the first value that is none."""
    if not isinstance(sequences, Iterable):
        return InvalidArgumentError(f"is {type(sequences).__name__}, not a list of sequences", field=field)
    for place, sequence in enumerate(sequences):
        if not hasattr(sequence, "sequence_id"):
            return InvalidArgumentError(f"is {type(sequence).__name__}, not a sequence", field=f"{field}[{place}]")
    return InvalidArgumentError("is not a list of sequences", field=field)  # an iterator, which is at its end


def growing_ids_of(sequences: Iterable[Sequence], field: str) -> list[int]:
    """Return the ids for a call that changes, or copies, what is known of the sequences. Raises InvalidArgumentError
    for what cannot be changed, such as SequenceInfo."""
    ids: list[int] = []
    try:
        found = iter(sequences)
    except TypeError:
        raise _no_sequences(sequences, field) from None
    for sequence in found:
        if not isinstance(sequence, Sequence):
            raise InvalidArgumentError(
                f"is a {type(sequence).__name__}; make a Sequence of its sequence_id and length",
                field=f"{field}[{len(ids)}]",
            )
        ids.append(sequence.sequence_id)
    return ids


def token_list(token_ids: Iterable[int], info: PoolInfo) -> list[int]:
    """Convert token ids. Raises MessageTooLargeError if the daemon would refuse so many."""
    flat = int_list(token_ids, "token_ids")
    check_size(4 * len(flat), "token_ids", info)
    return flat


def extra_key_messages(keys: ExtraKeys) -> list[blocks_pb2.ExtraKey]:
    pairs = listed(keys, "extra_keys")
    try:
        parts = [(position, key) for position, key in pairs]
    except (TypeError, ValueError):
        raise InvalidArgumentError("is not a list of (position, bytes) pairs", field="extra_keys") from None
    return [build(blocks_pb2.ExtraKey, position=position, key=key) for position, key in parts]


def allocation_messages(
    prompts: Batch[Iterable[int]], ids: Batch[int], keys: Batch[ExtraKeys] | None, info: PoolInfo
) -> list[blocks_pb2.SequenceAllocation]:
    """Convert a batch of prompts. Raises InvalidArgumentError, and MessageTooLargeError if the daemon would refuse so
    many tokens."""
    for values, field in ((ids, "sequence_ids"), (keys, "extra_keys")):
        if values is not None and (not hasattr(values, "__len__") or len(values) != len(prompts)):
            raise InvalidArgumentError(f"{size_of(values, field)} for {len(prompts)} prompts", field=field)
    tokens, num_bytes = [], 0
    for prompt in prompts:
        tokens.append(int_list(prompt, "token_ids"))
        num_bytes += 4 * len(tokens[-1])
    check_size(num_bytes, "token_ids", info)
    made = []
    for sequence_id, token_ids, extra in zip(ids, tokens, [()] * len(ids) if keys is None else keys, strict=True):
        has_keys = extra is not None and (type(extra) is not tuple or extra)
        name = sequence_id if type(sequence_id) is int else whole(sequence_id, "sequence_ids")
        made.append(sequence_allocation(name, token_ids, extra_key_messages(extra) if has_keys else ()))
    return made


def sequence_allocation(
    sequence_id: int, token_ids: list[int], extra_keys: Iterable[blocks_pb2.ExtraKey] = ()
) -> blocks_pb2.SequenceAllocation:
    """Convert a prompt. Raises InvalidArgumentError. Protobuf takes four times as long for a list of integers as for
    their bytes."""
    kind = blocks_pb2.SequenceAllocation
    tokens = pack_fixed32(token_ids)
    if tokens is None:  # protobuf converts other numbers, or says what is wrong
        return build(kind, sequence_id=sequence_id, token_ids=token_ids, extra_keys=extra_keys)
    message = build(kind, sequence_id=sequence_id, extra_keys=extra_keys)
    message.MergeFromString(field_header(kind.TOKEN_IDS_FIELD_NUMBER, len(tokens)) + tokens)
    return message


def allocation_status(status: blocks_pb2.AllocStatus) -> str:
    """Return "ok", "later" or "never"."""
    return str(blocks_pb2.AllocStatus.Name(status)).removeprefix("ALLOC_STATUS_").lower()


def step_info(
    response: blocks_pb2.StepResponse, num_restarts: int, session_token: bytes = b"", *, ahead: bool = False
) -> StepInfo:
    query_lens, context_lens = response.query_lens[:], response.context_lens[:]
    num_sequences = len(query_lens)
    return StepInfo(
        response.step_id,
        num_sequences,
        sum(query_lens),
        np.fromiter(query_lens, np.int32, num_sequences),
        np.fromiter(context_lens, np.int32, num_sequences),
        response.cow_copies,
        (response.mapped.slot, response.mapped.offset) if response.HasField("mapped") else None,
        num_restarts,
        ahead,
        session_token,
    )


# ---- the stream


def traceparent() -> str:
    """Return the W3C traceparent header of the current span, or "" if there is no span or OpenTelemetry is not
    loaded."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return ""
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


# From this size on, the blocks of a reply are not parsed by protobuf.
LARGE_BYTES = 64 << 10
# The limits on the calls that wait together and go as one message: a larger call goes alone.
MAX_JOINED_CALLS = 128
MAX_JOINED_BYTES = 64 << 10

_CONNECT = "/kvservice.v1.SessionService/Connect"
_NUMBERS = {field.name: field.number for field in session_pb2.Call.DESCRIPTOR.fields}
_CALL_ID = session_pb2.Reply.CALL_ID_FIELD_NUMBER
_REPLIES = session_pb2.Reply.REPLIES_FIELD_NUMBER
_REPLIES_TAG = bytes((_REPLIES << 3 | 2,))
_BATCH_GET = session_pb2.Reply.STORE_BATCH_GET_FIELD_NUMBER
_FOUND, _DATA = store_pb2.BatchGetResponse.FOUND_FIELD_NUMBER, store_pb2.BatchGetResponse.DATA_FIELD_NUMBER


@dataclass(frozen=True, slots=True)
class BlocksReply:
    """A reply with a BatchGetResponse. `data` is a view of the received message."""

    call_id: int
    found: bytes
    data: memoryview


ReceivedReply: TypeAlias = session_pb2.Reply | BlocksReply


def open_stub(channel: Any, parse: Callable[[bytes], Any] | None = None) -> session_pb2_grpc.SessionServiceStub:
    """Return a stub of SessionService whose streams take the bytes of `make_call`, and return what `parse` makes of the
    daemon's messages; None: `parse_reply`, for clients that send no calls together."""
    stub = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
    stub.Connect = channel.stream_stream(_CONNECT, response_deserializer=parse or parse_reply)
    return stub


def make_call(call_id: int, name: str, request: Any) -> bytes:
    """Return a serialized call with a request, which is a message or an Encoded one."""
    header = traceparent() if "opentelemetry.trace" in sys.modules else ""
    head = session_pb2.Call(call_id=call_id, traceparent=header).SerializeToString()
    return with_field(head, _NUMBERS[name], request)


def join_calls(calls: list[bytes]) -> bytes:
    """Return a message of the stream with several calls of `make_call`."""
    return calls[0] if len(calls) == 1 else join_elements(calls, session_pb2.Call.CALLS_FIELD_NUMBER)


def take_reply(reply: ReceivedReply) -> Any:
    """Return the response in a reply, or raise the error in it."""
    if isinstance(reply, BlocksReply):
        return reply
    name = reply.WhichOneof("reply")
    if name == "error":
        raise from_status(reply.error)
    return getattr(reply, name)


def parse_replies(data: bytes) -> list[ReceivedReply]:
    """Parse a message of the daemon, which has one reply, or several."""
    if data[:1] != _REPLIES_TAG:
        return [parse_reply(data)]
    return [parse_reply(one) for one in split_elements(data, _REPLIES, MAX_JOINED_CALLS)]


def parse_reply(data: bytes) -> ReceivedReply:
    """Parse one reply of the daemon."""
    if len(data) >= LARGE_BYTES:
        fields = fields_of(memoryview(data))
        if _BATCH_GET in fields:
            response = fields_of(fields[_BATCH_GET])
            return BlocksReply(fields[_CALL_ID], bytes(response.get(_FOUND, b"")), response.get(_DATA, memoryview(b"")))
    return session_pb2.Reply.FromString(data)
