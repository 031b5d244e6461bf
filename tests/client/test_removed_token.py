"""A stream that ends because its token was removed, while a call waits for its answer, in the sync and async API."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from both_faces import Face, session_of
from grpc_status import rpc_status
from scripted_daemon import ScriptedDaemon, serving
from waiting import PATIENCE_S

from kvservice.errors import UnauthenticatedError
from kvservice.v1 import session_pb2
from kvservice.wire import to_status


class Replacing(ScriptedDaemon):
    """A server that replaces the token at the first call of an attached stream, and ends the stream instead of
    answering."""

    def __init__(self, presented: Path) -> None:
        super().__init__()
        self.presented = presented
        self.known = "first"
        presented.write_text(self.known)

    def Connect(self, calls: Any, context: Any) -> Any:  # noqa: N802
        self.check(context)
        yield from super().Connect(calls, context)

    def answer(self, name: str, call: session_pb2.Call, reply: session_pb2.Reply, context: Any) -> bool:
        if self.known == "first":
            self.known = "second"
            self.presented.write_text(self.known)
        self.check(context)
        return super().answer(name, call, reply, context)

    def check(self, context: Any) -> None:
        if dict(context.invocation_metadata())["authorization"] != f"Bearer {self.known}":
            context.abort_with_status(rpc_status.to_status(to_status(UnauthenticatedError("removed"))))


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_a_call_under_way_is_sent_again_with_the_next_token(tmp_path: Path, face: Face) -> None:
    daemon = Replacing(tmp_path / "token")

    async def scenario(address: str) -> None:
        options = {"token": daemon.presented, "reconnect_wait_s": PATIENCE_S}
        async with session_of(face, address, "inline", **options) as kv:
            assert await kv.describe() == []
            assert daemon.calls == ["attach", "describe", "attach", "describe"]

    with serving(daemon, "127.0.0.1:0") as address:
        asyncio.run(scenario(address))
