"""Conversion of gRPC statuses to errors."""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest
from google.rpc import code_pb2
from grpc_status import rpc_status

from kvservice.client.channel import channel_options, to_error
from kvservice.errors import (
    ConnectionLostError,
    KVServiceError,
    MessageTooLargeError,
    ResourceExhaustedError,
    SessionTakenError,
)
from kvservice.wire.status import to_status


class Ended:
    """A gRPC call that has ended."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing_metadata: Any = ()) -> None:
        self._code, self._details, self._trailing_metadata = code, details, trailing_metadata

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailing_metadata


def taken() -> Any:
    status = to_status(SessionTakenError("taken"))
    status.code = code_pb2.ABORTED
    return rpc_status.to_status(status)


@pytest.mark.parametrize(
    ("ended", "kind"),
    [
        (Ended(*taken()), SessionTakenError),
        # gRPC mixes both statuses if a call is cancelled here while the daemon's status arrives.
        (Ended(grpc.StatusCode.CANCELLED, "Locally cancelled", taken().trailing_metadata), ConnectionLostError),
        (Ended(grpc.StatusCode.ABORTED, "Locally cancelled", taken().trailing_metadata), ConnectionLostError),
        # grpc.aio reports this if the stream ends during a send; the reason is lost.
        (Ended(grpc.StatusCode.INTERNAL, "Internal error from Core", None), ConnectionLostError),
        (Ended(grpc.StatusCode.UNAVAILABLE, "Socket closed"), ConnectionLostError),
        (Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max"), MessageTooLargeError),
        (Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (9 vs. 4)"), MessageTooLargeError),
        (Ended(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"), ResourceExhaustedError),
    ],
    ids=["taken", "taken and cancelled", "cancelled and taken", "hidden", "cut", "received", "sent", "too many"],
)
def test_the_error_of_an_ended_call(ended: Ended, kind: type[KVServiceError]) -> None:
    assert type(to_error(cast(grpc.RpcError, ended))) is kind


@pytest.mark.parametrize(("details", "named"), [("CANCELLED", True), ("Locally cancelled by application!", False)])
def test_a_call_that_grpc_cancelled_may_be_one_of_too_many(details: str, named: bool) -> None:
    error = to_error(cast(grpc.RpcError, Ended(grpc.StatusCode.CANCELLED, details)))
    assert isinstance(error, ConnectionLostError)
    assert ("too many calls waiting" in str(error)) is named


def test_a_restarted_daemon_is_found_soon() -> None:
    """gRPC connects again without a call. A pause of its back-off is up to a fifth longer than its limit."""
    limits_ms = [dict(channel_options(address)) for address in ("unix:///run/kv.sock", "127.0.0.1:50051")]
    assert [options["grpc.max_reconnect_backoff_ms"] for options in limits_ms] == [50, 250]
