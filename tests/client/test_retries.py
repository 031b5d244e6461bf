"""gRPC sends a unary call a second time if its connection breaks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvservice.client.channel import CHANNEL_OPTIONS

POOL, SESSION = "kvservice.v1.PoolService", "kvservice.v1.SessionService"


class Breaking(grpc.GenericRpcHandler):
    """A server that fails the first attempts of each method in the way a broken connection does."""

    def __init__(self, num_failures: int) -> None:
        self.num_failures = num_failures
        self.attempts: Counter[str] = Counter()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.attempts[details.method] += 1
            if self.attempts[details.method] <= self.num_failures:
                context.abort(grpc.StatusCode.UNAVAILABLE, "Stream removed")
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


@pytest.fixture(params=[1, 2])
def breaking(request: pytest.FixtureRequest) -> Breaking:
    return Breaking(request.param)


@pytest.fixture
def channel(tmp_path: Path, breaking: Breaking) -> Iterator[grpc.Channel]:
    server = grpc.server(futures.ThreadPoolExecutor(2), handlers=[breaking])
    server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    with grpc.insecure_channel(f"unix:{tmp_path}/socket", CHANNEL_OPTIONS) as channel:
        yield channel
    server.stop(None).wait()


@pytest.mark.parametrize("method", [f"/{POOL}/Ping", f"/{POOL}/GetStats", f"/{SESSION}/Open", f"/{SESSION}/Close"])
def test_a_call_is_sent_twice_at_most(channel: grpc.Channel, breaking: Breaking, method: str) -> None:
    call: Any = channel.unary_unary(method)
    if breaking.num_failures == 1:
        assert call(b"request") == b"request"
    else:
        with pytest.raises(grpc.RpcError, match="Stream removed"):
            call(b"request")
    assert breaking.attempts == {method: 2}


@pytest.mark.parametrize("method", [f"/{POOL}/GetInfo", "/kvservice.v1.AttentionService/Decode"])
def test_other_calls_are_sent_once(channel: grpc.Channel, breaking: Breaking, method: str) -> None:
    call: Any = channel.unary_unary(method)
    with pytest.raises(grpc.RpcError, match="Stream removed"):
        call(b"")
    assert sum(breaking.attempts.values()) == 1
