"""gRPC channel options, retry rules and error conversion, shared by the sync and async API."""

from __future__ import annotations

from typing import cast

import grpc
from google.rpc import status_pb2
from grpc_status import rpc_status

from kvservice import plain_json
from kvservice.client.messages import traceparent
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
from kvservice.wire.channels import connection_error, keepalive_options
from kvservice.wire.status import from_status

# The daemon limits the message size and reports its limit. This value only replaces gRPC's smaller default.
_MAX_MESSAGE_BYTES = 1 << 30

# Keepalive timeout: a daemon that does not answer pings for this long, during a call or stream, is considered gone.
DAEMON_TIMEOUT_S = 15.0

# These unary calls are safe to send twice: the daemon closes a session that was opened but never attached. gRPC sends a
# call again if its connection broke, for example because a router dropped an idle connection. GetInfo is not in the
# list: the client repeats it itself while it connects and reports the error of a single attempt.
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
    ("grpc.initial_reconnect_backoff_ms", 20),
    # In gRPC this is also the timeout of a connection attempt, not only a pause between attempts.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.service_config", plain_json.dumps({"methodConfig": [_RETRIES]})),
]

# Longest pause in ms between gRPC's attempts to connect, which go on without calls. It is short, so that a daemon that
# restarts is found soon. An attempt on a unix socket costs only the client something, one over TCP sends packets.
_MAX_BACKOFF_UNIX_MS = 50
_MAX_BACKOFF_TCP_MS = 250

# Part of gRPC's message for a sent or received message above the limit. RESOURCE_EXHAUSTED has other causes, too.
_TOO_LARGE = "message larger than max"

# gRPC's message for a call that the other end has cancelled. The daemon's gRPC cancels calls if too many wait for the
# daemon, see kvservice.server.rpc.slots.
_CANCELLED_THERE = "CANCELLED"

# Time limit of the call that closes a session, and the errors that it ignores: the session is gone or belongs to
# another client, or the daemon cannot be reached and closes the session as one that has lost its stream.
CLOSE_S = 2.0
NO_CLOSING = (UnknownSessionError, SessionTakenError, ConnectionLostError, CallTimeoutError, UnauthenticatedError)

# A call is sent at most this many times: if its stream breaks each time, the call itself is the likely cause.
MAX_SENDS = 4

# Limit on calls in flight. The daemon keeps this many replies for calls that are sent again.
MAX_IN_FLIGHT = 128

# Calls that cannot be repeated if their reply is lost: a layer is written only once, and a session that was saved by
# Detach leaves the daemon's memory with its stream.
_NOT_REPEATABLE = frozenset(("decode", "extend", "write", "detach"))


def channel_options(address: str) -> list[tuple[str, int | str]]:
    """Return the gRPC options of a client's channel."""
    backoff_ms = _MAX_BACKOFF_UNIX_MS if address.startswith("unix:") else _MAX_BACKOFF_TCP_MS
    return [*CHANNEL_OPTIONS, ("grpc.max_reconnect_backoff_ms", backoff_ms)]


def to_error(error: grpc.RpcError) -> KVServiceError:
    """Convert a gRPC error to the error that the caller sees."""
    status = _status_with_details(error)
    if status is not None:
        return from_status(status)
    text = f"{error.code().name}: {error.details()}"
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        too_large = _TOO_LARGE in (error.details() or "")
        return MessageTooLargeError(text) if too_large else ResourceExhaustedError(text)
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallTimeoutError(text)
    if error.code() is grpc.StatusCode.CANCELLED and not cancelled_here(error):
        return ConnectionLostError(f"{text}: the daemon's gRPC ended the call; it may have too many calls waiting")
    return connection_error(text)


def cancelled_here(error: grpc.RpcError) -> bool:
    """Return whether this process has cancelled the call."""
    return error.code() is grpc.StatusCode.CANCELLED and error.details() != _CANCELLED_THERE


def _status_with_details(error: grpc.RpcError) -> status_pb2.Status | None:
    try:
        return rpc_status.from_call(cast(grpc.Call, error))
    except ValueError:
        # The call was cancelled here while the daemon's status arrived: code and details do not belong together.
        return None


def repeatable(name: str) -> bool:
    """Return whether a call may be sent again after its stream broke."""
    return name not in _NOT_REPEATABLE


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the trace headers of a unary call."""
    return (("traceparent", header),) if (header := traceparent()) else ()
