"""The messages of a session's stream. Blocks in them bypass protobuf, which copies bytes several times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from kvservice.client.tracing import traceparent
from kvservice.v1 import session_pb2, session_pb2_grpc, store_pb2
from kvservice.wire.encoded import Encoded, fields_of
from kvservice.wire.status import from_status

# Replies of at least so many bytes may have blocks.
LARGE_BYTES = 64 << 10

_CONNECT = "/kvservice.v1.SessionService/Connect"
_NUMBERS = {field.name: field.number for field in session_pb2.Call.DESCRIPTOR.fields}
_CALL_ID = session_pb2.Reply.CALL_ID_FIELD_NUMBER
_BATCH_GET = session_pb2.Reply.STORE_BATCH_GET_FIELD_NUMBER
_FOUND, _DATA = store_pb2.BatchGetResponse.FOUND_FIELD_NUMBER, store_pb2.BatchGetResponse.DATA_FIELD_NUMBER

# A call is serialized already if its request is.
SentCall: TypeAlias = session_pb2.Call | bytes


@dataclass(frozen=True, slots=True)
class BlocksReply:
    """A reply with a BatchGetResponse. `data` is a view of the received message."""

    call_id: int
    found: bytes
    data: memoryview


ReceivedReply: TypeAlias = session_pb2.Reply | BlocksReply


def open_stub(channel: Any) -> session_pb2_grpc.SessionServiceStub:
    """Return a stub of SessionService whose streams take any SentCall, and may return a BlocksReply."""
    stub = session_pb2_grpc.SessionServiceStub(channel)  # type: ignore[no-untyped-call]
    stub.Connect = channel.stream_stream(_CONNECT, request_serializer=_serialize, response_deserializer=parse_reply)
    return stub


def make_call(call_id: int, name: str, request: Any) -> SentCall:
    """Return a call with a request, which is a message or an Encoded one."""
    if not isinstance(request, Encoded):
        return session_pb2.Call(call_id=call_id, traceparent=traceparent(), **{name: request})
    head = session_pb2.Call(call_id=call_id, traceparent=traceparent()).SerializeToString()
    return (Encoded((head,)) + request.inside(_NUMBERS[name])).to_bytes()


def take_reply(reply: ReceivedReply) -> Any:
    """Return the response in a reply, or raise the error in it."""
    if isinstance(reply, BlocksReply):
        return reply
    name = reply.WhichOneof("reply")
    if name == "error":
        raise from_status(reply.error)
    return getattr(reply, name)


def parse_reply(data: bytes) -> ReceivedReply:
    """Parse a reply of the daemon."""
    if len(data) >= LARGE_BYTES:
        fields = fields_of(memoryview(data))
        if _BATCH_GET in fields:
            response = fields_of(fields[_BATCH_GET])
            return BlocksReply(fields[_CALL_ID], bytes(response.get(_FOUND, b"")), response.get(_DATA, memoryview(b"")))
    return session_pb2.Reply.FromString(data)


def _serialize(call: SentCall) -> bytes:
    return call if isinstance(call, bytes) else call.SerializeToString()
