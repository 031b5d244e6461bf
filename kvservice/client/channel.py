"""How both faces reach the daemon."""

from __future__ import annotations

import json
from typing import Any, cast

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from kvservice.client.tracing import traceparent
from kvservice.errors import (
    CallTimeoutError,
    ConnectionLostError,
    KVServiceError,
    MessageTooLargeError,
    ResourceExhaustedError,
    SessionTakenError,
    UnauthenticatedError,
    UnknownSessionError,
)
from kvservice.v1 import session_pb2
from kvservice.wire.channels import connection_error
from kvservice.wire.keepalive import keepalive_options
from kvservice.wire.status import from_status

# The daemon bounds messages, and tells its bound; this only keeps gRPC's own smaller default away.
_MAX_MESSAGE_BYTES = 1 << 30

# A daemon that does not answer for so long is gone, or frozen, while there is a call or a session's stream.
DAEMON_TIMEOUT_S = 15.0

# Unary calls may be sent twice without harm: a session that was opened and never attached is closed by the daemon.
# gRPC sends a call again when its connection broke under it, as after an idle time in which a router forgot it. GetInfo
# is not among them: the client asks it again and again while it connects, and its error must be that of one attempt.
_RETRIES = {
    "name": [
        {"service": "kvservice.v1.PoolService", "method": "GetStats"},
        {"service": "kvservice.v1.PoolService", "method": "Ping"},
        {"service": "kvservice.v1.SessionService", "method": "Open"},
        {"service": "kvservice.v1.SessionService", "method": "Close"},
    ],
    "retryPolicy": {
        "maxAttempts": 2,
        "initialBackoff": "0.05s",
        "maxBackoff": "0.05s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    },
}

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    *keepalive_options(DAEMON_TIMEOUT_S),
    ("grpc.initial_reconnect_backoff_ms", 50),
    # Not a pause: what an attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.service_config", json.dumps({"methodConfig": [_RETRIES]})),
]

# What gRPC says of a message above its bound, received or to be sent. It says other things under the same status.
_TOO_LARGE = "message larger than max"

# For how long a daemon is asked to close a session; and what it says of one that is another's or gone. If it cannot be
# asked, the session is closed as one that has lost its stream.
CLOSE_S = 2.0
NO_CLOSING = (UnknownSessionError, SessionTakenError, ConnectionLostError, CallTimeoutError, UnauthenticatedError)

# A call under which so many streams broke breaks them itself.
MAX_SENDS = 4

# Calls that wait for their answers at one time. The daemon keeps the answers of so many for when they are sent again.
MAX_IN_FLIGHT = 128

# Calls whose answer, if it is lost on the way, cannot be had again: a layer is written once.
_NOT_REPEATABLE = frozenset(("decode", "extend", "write"))


def to_error(error: grpc.RpcError) -> KVServiceError:
    """What a failed RPC raises in the caller's hands."""
    status = _status_with_details(error)
    if status is not None:
        return from_status(status)
    text = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        too_large = _TOO_LARGE in (error.details() or "")
        return MessageTooLargeError(text) if too_large else ResourceExhaustedError(text)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallTimeoutError(text)
    return connection_error(text)


def _status_with_details(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:
        # Cancelled here just as the daemon's status came: it has the code of the one and the details of the other.
        return None


def repeatable(name: str) -> bool:
    """Whether a call may be sent again after its stream broke under it."""
    return name not in _NOT_REPEATABLE


def make_call(call_id: int, name: str, request: Any) -> session_pb2.Call:
    return session_pb2.Call(call_id=call_id, traceparent=traceparent(), **{name: request})


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Of a unary call."""
    return (("traceparent", header),) if (header := traceparent()) else ()


def take_reply(reply: session_pb2.Reply) -> Any:
    """The answer, or the error raised that the reply carries."""
    name = reply.WhichOneof("reply")
    if name == "error":
        raise from_status(reply.error)
    return getattr(reply, name)
