"""A stream that ends because its token was removed, while a call waits for its answer, in the sync and async API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from both_faces import Face
from grpc_status import rpc_status
from waiting import PATIENCE_S

from kvservice.auth.client import ClientCredentials
from kvservice.client.connection import SessionConnection
from kvservice.client.tasks import TaskStream, TaskWaiting
from kvservice.client.threads import BlockingStream, ThreadWaiting, finish
from kvservice.client.waiting import SessionStream
from kvservice.errors import UnauthenticatedError
from kvservice.v1 import blocks_pb2, session_pb2, session_pb2_grpc
from kvservice.wire.status import to_status

FACES: list[Face] = ["blocking", "asyncio"]


class Replacing(session_pb2_grpc.SessionServiceServicer):
    """A server that replaces the token at the first call of an attached stream, and ends the stream instead of
    answering."""

    def __init__(self, presented: Path) -> None:
        self.presented = presented
        self.known = "first"
        self.calls: list[str] = []
        presented.write_text(self.known)

    def Connect(self, calls: Iterator[session_pb2.Call], context: Any) -> Iterator[session_pb2.Reply]:  # noqa: N802
        self._check(context)
        for call in calls:
            name = call.WhichOneof("call")
            self.calls.append(name)
            if name == "attach":
                yield session_pb2.Reply(call_id=call.call_id, attach=session_pb2.AttachResponse(session_id=7))
                continue
            if self.known == "first":
                self.known = "second"
                self.presented.write_text(self.known)
            self._check(context)
            yield session_pb2.Reply(call_id=call.call_id, describe=blocks_pb2.DescribeResponse())

    def _check(self, context: Any) -> None:
        if dict(context.invocation_metadata())["authorization"] != f"Bearer {self.known}":
            context.abort_with_status(rpc_status.to_status(to_status(UnauthenticatedError("removed"))))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Replacing]:
    servicer = Replacing(tmp_path / "token")
    server = grpc.server(futures.ThreadPoolExecutor(4))
    session_pb2_grpc.add_SessionServiceServicer_to_server(servicer, server)
    assert server.add_insecure_port(f"unix:{tmp_path}/socket")
    server.start()
    yield servicer
    server.stop(None).wait()


def describe_over_threads(address: str, credentials: ClientCredentials) -> None:
    with grpc.insecure_channel(address) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)

        def stream(on_end: Callable[[SessionStream], None], waits: bool) -> SessionStream:
            return BlockingStream(stub, credentials.headers(), on_end, waits)

        connection = SessionConnection(ThreadWaiting(), stream, b"", timeout_s=None, reconnect_wait_s=PATIENCE_S)
        assert finish(connection.connect(PATIENCE_S)) == 7
        finish(connection.call("describe", blocks_pb2.DescribeRequest()))
        finish(connection.close())


async def describe_over_tasks(address: str, credentials: ClientCredentials) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = session_pb2_grpc.SessionServiceStub(channel)

        def stream(on_end: Callable[[SessionStream], None], waits: bool) -> SessionStream:
            return TaskStream(stub, credentials.headers(), on_end, waits)

        connection = SessionConnection(TaskWaiting(), stream, b"", timeout_s=None, reconnect_wait_s=PATIENCE_S)
        assert await connection.connect(PATIENCE_S) == 7
        await connection.call("describe", blocks_pb2.DescribeRequest())
        await connection.close()


@pytest.mark.parametrize("face", FACES)
def test_a_call_under_way_is_sent_again_with_the_next_token(daemon: Replacing, tmp_path: Path, face: Face) -> None:
    address, credentials = f"unix:{tmp_path}/socket", ClientCredentials(token=daemon.presented)
    if face == "blocking":
        describe_over_threads(address, credentials)
    else:
        asyncio.run(describe_over_tasks(address, credentials))
    assert daemon.calls == ["attach", "describe", "attach", "describe"]
