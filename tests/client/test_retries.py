"""gRPC sends a unary call a second time if its connection breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from each_row import each_row
from scripted_daemon import ScriptedDaemon, serving

from kvservice.client import KVClient
from kvservice.errors import ConnectionLostError


class Breaking(grpc.ServerInterceptor):
    """Fails the first attempts of each unary method in the way a broken connection does."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.attempts: Counter[str] = Counter()

    def intercept_service(self, continuation: Callable[..., Any], details: grpc.HandlerCallDetails) -> Any:
        handler, name = continuation(details), details.method.rpartition("/")[2]
        if handler is None or handler.unary_unary is None:
            return handler
        self.attempts[name] += 1
        return self.refusal() if self.attempts[name] <= self.num_failures else handler

    def refusal(self) -> Any:
        def abort(_: bytes, context: grpc.ServicerContext) -> bytes:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed")

        return grpc.unary_unary_rpc_method_handler(abort)


CALLS: dict[str, Callable[[KVClient], object]] = {
    "Ping": lambda client: client.ping(),
    "GetStats": lambda client: client.stats(),
    "Open": lambda client: client.session(),
}


def test_a_call_is_sent_twice_at_most(tmp_path: Path) -> None:
    """A client that waits for a daemon that is away makes its calls again itself: this one does not wait."""
    with each_row() as row:
        for number, (name, call) in enumerate(CALLS.items()):
            breaking = Breaking(2)
            with (
                row(name),
                serving(ScriptedDaemon(), f"unix:{tmp_path}/{number}", [breaking]) as address,
                KVClient(address, connect_timeout_s=None, reconnect_wait_s=0) as client,
            ):
                with pytest.raises(ConnectionLostError, match="Stream removed"):
                    call(client)
                assert breaking.attempts[name] == 2


def test_the_second_attempt_is_answered(tmp_path: Path) -> None:
    breaking = Breaking(1)
    with (
        serving(ScriptedDaemon(), f"unix:{tmp_path}/socket", [breaking]) as address,
        KVClient(address, connect_timeout_s=None, reconnect_wait_s=0, transport="inline") as client,
    ):
        with pytest.raises(ConnectionLostError, match="Stream removed"):
            client.info  # noqa: B018
        assert breaking.attempts == {"GetInfo": 1}, "this call is sent once"
        assert client.ping(b"request") == b"request"
        client.stats()
        client.session().close()
        assert breaking.attempts == {"GetInfo": 2} | dict.fromkeys(("Ping", "GetStats", "Open", "Close"), 2)
