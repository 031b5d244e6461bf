"""A gRPC server in place of the daemon. It answers the calls of sessions as a test says."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any

import grpc

from kvservice.v1 import pool_pb2, pool_pb2_grpc, session_pb2, session_pb2_grpc

INFO = pool_pb2.GetInfoResponse(
    num_layers=2,
    num_kv_heads=2,
    head_size=32,
    dtype="float32",
    block_size=4,
    num_blocks=64,
    max_sequences=64,
    max_sequence_tokens=512,
    max_message_bytes=4 << 20,
    max_request_sequences=64,
    max_request_tokens=4096,
    max_request_blocks=64,
    session_grace_s=5.0,
)


class ScriptedDaemon(session_pb2_grpc.SessionServiceServicer, pool_pb2_grpc.PoolServiceServicer):
    """Attaches every session. `calls` are the names of the calls on all streams, as they come; `num_closed` counts the
    streams that their clients have closed, not cancelled."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.num_closed = 0

    def answer(  # for tests that look at the call, or at its credentials
        self,
        name: str,
        call: session_pb2.Call,  # noqa: ARG002
        reply: session_pb2.Reply,
        context: Any,  # noqa: ARG002
    ) -> bool:
        """Fill in the reply to a call. Returns False if the stream ends instead."""
        getattr(reply, name).SetInParent()
        return True

    def GetInfo(self, *_: Any) -> pool_pb2.GetInfoResponse:  # noqa: N802
        return INFO

    def GetStats(self, *_: Any) -> pool_pb2.GetStatsResponse:  # noqa: N802
        return pool_pb2.GetStatsResponse()

    def Ping(self, request: pool_pb2.PingRequest, _: Any) -> pool_pb2.PingResponse:  # noqa: N802
        return pool_pb2.PingResponse(payload=request.payload)

    def Open(self, *_: Any) -> session_pb2.OpenResponse:  # noqa: N802
        return session_pb2.OpenResponse(session_token=b"token")

    def Close(self, *_: Any) -> session_pb2.CloseResponse:  # noqa: N802
        return session_pb2.CloseResponse()

    def Connect(self, calls: Iterator[session_pb2.Call], context: Any) -> Iterator[session_pb2.Reply]:  # noqa: N802
        for call in calls:
            name = call.WhichOneof("call")
            assert name is not None
            self.calls.append(name)
            reply = session_pb2.Reply(call_id=call.call_id)
            if name == "attach":
                reply.attach.session_id = 7
            elif not self.answer(name, call, reply, context):
                return
            yield reply
        self.num_closed += 1


@contextlib.contextmanager
def serving(
    servicer: ScriptedDaemon, address: str, interceptors: Iterable[grpc.ServerInterceptor] = ()
) -> Iterator[str]:
    """Serve at this address, of which a port may be 0. Yields the address for clients."""
    server = grpc.server(futures.ThreadPoolExecutor(4), interceptors=list(interceptors))
    session_pb2_grpc.add_SessionServiceServicer_to_server(servicer, server)
    pool_pb2_grpc.add_PoolServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(address)
    server.start()
    try:
        yield address if address.startswith("unix:") else f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
