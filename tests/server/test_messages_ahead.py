"""Streams whose clients send the next blocks before they have a reply: what is read, executed and sent meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from each_row import each_row

from kvservice.config import ServeConfig
from kvservice.errors import RestartingError
from kvservice.server.rpc.requests import LARGE_BYTES, BlocksCall, Calls, moves_blocks, parser
from kvservice.server.rpc.slots import RPC, UNREAD_BYTES, Rpc, Slots
from kvservice.server.rpc.stream import Services, Stream
from kvservice.v1 import pool_pb2, session_pb2, store_pb2
from kvservice.wire import Encoded

CONFIG = ServeConfig()
# The largest messages are so large that no stream may have two.
NO_ROOM = ServeConfig(max_message_mib=128)


class Line:
    """gRPC's end of a stream. It counts the messages that were read, and writes replies when it may."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[Any] = asyncio.Queue()
        self.num_read = 0
        self.may_write = asyncio.Event()
        self.replies: list[int] = []
        self.status: Any = None

    def bring(self, *calls: session_pb2.Call | Calls) -> None:
        for call in calls:
            self._calls.put_nowait(call)

    def end(self) -> None:
        self._calls.put_nowait(grpc.aio.EOF)

    def peer(self) -> str:
        return "unix:"

    async def read(self) -> Any:
        call = await self._calls.get()
        self.num_read += 1
        return call

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()
        self.replies.append(session_pb2.Reply.FromString(data).call_id)

    async def abort_with_status(self, status: Any) -> None:
        self.status = status


def rpc_of(slots: Slots, session: str) -> Rpc:
    nothing: Any = None
    return Rpc(nothing, None, slots, "other call", session=session.encode())


class Rig:
    """A stream of an attached session. A get waits for `may_get`; `begun` are the names of the calls."""

    def __init__(self, config: ServeConfig) -> None:
        self.slots, self.line = Slots(config), Line()
        self.may_get = asyncio.Event()
        self.begun: list[str] = []
        self.num_cancelled = 0
        nothing: Any = SimpleNamespace(called_again=None, local=True, call=self._call, detach=lambda *_: None)
        line: Any = self.line
        self.stream = Stream(nothing, nothing, line, nothing, self.slots, rpc_of(self.slots, "stream"))
        self.stream._session = nothing

    async def _call(self, name: str, *_: Any) -> Any:
        self.begun.append(name)
        if name == "store_batch_get":
            try:
                await self.may_get.wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
            return Encoded()
        return pool_pb2.PingResponse()

    @property
    def num_ahead(self) -> int:
        return self.slots._num_ahead


@contextlib.asynccontextmanager
async def serving(config: ServeConfig = CONFIG) -> AsyncIterator[Rig]:
    rig = Rig(config)
    task = asyncio.create_task(rig.stream.serve())
    try:
        yield rig
        rig.line.end()
        await task
    finally:
        task.cancel()
    assert rig.num_ahead == 0


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def get(call_id: int) -> session_pb2.Call:
    return session_pb2.Call(call_id=call_id, store_batch_get=store_pb2.BatchGetRequest())


def ping(call_id: int) -> session_pb2.Call:
    return session_pb2.Call(call_id=call_id, ping=pool_pb2.PingRequest())


def test_replies_come_in_the_order_of_the_calls() -> None:
    """The next call is there when a get is answered, and is answered at once."""

    async def scenario() -> None:
        async with serving() as rig:
            rig.line.may_write.set()
            rig.line.bring(get(1), ping(2), get(3), get(4), ping(5))
            await turns()
            rig.may_get.set()
            await turns()
            assert rig.line.replies == [1, 2, 3, 4, 5]

    asyncio.run(scenario())


@pytest.mark.parametrize(("config", "num_read"), [(CONFIG, 2), (NO_ROOM, 1)])
def test_one_message_is_read_while_a_get_is_executed(config: ServeConfig, num_read: int) -> None:
    async def scenario() -> None:
        async with serving(config) as rig:
            rig.line.may_write.set()
            rig.line.bring(get(1), ping(2), ping(3))
            await turns()
            assert (rig.line.num_read, rig.begun) == (num_read, ["store_batch_get"])
            rig.may_get.set()
            await turns()
            assert rig.line.replies == [1, 2, 3]

    asyncio.run(scenario())


@pytest.mark.parametrize(("config", "num_begun"), [(CONFIG, 2), (NO_ROOM, 1)])
def test_one_call_is_executed_while_a_reply_is_sent(config: ServeConfig, num_begun: int) -> None:
    async def scenario() -> None:
        async with serving(config) as rig:
            rig.may_get.set()
            rig.line.bring(get(1), get(2), get(3))
            await turns()
            assert len(rig.begun) == num_begun
            rig.line.may_write.set()
            await turns()
            assert rig.line.replies == [1, 2, 3]

    asyncio.run(scenario())


def test_a_stream_that_ends_has_sent_the_reply_before() -> None:
    """The process that is replaced executes no more calls, and the status comes after the replies."""

    async def scenario(*, at_once: bool) -> None:
        async with serving() as rig:
            rig.line.bring(get(1), ping(2))
            await turns()
            rig.may_get.set()
            if not at_once:
                await turns()
            rig.stream.end(RestartingError("the next process takes over"))
            await turns()
            assert rig.line.status is None
            rig.line.may_write.set()
            await turns()
            assert rig.line.status is not None
        assert rig.line.replies == [1, 2][: 1 if at_once else 2]

    with each_row() as row:
        for at_once in (True, False):
            with row(at_once):
                asyncio.run(scenario(at_once=at_once))


def test_a_stream_that_is_cancelled_leaves_nothing_behind() -> None:
    async def scenario(*, sends: bool) -> None:
        rig = Rig(CONFIG)
        task = asyncio.create_task(rig.stream.serve())
        rig.line.bring(get(1), get(2))
        if sends:
            rig.may_get.set()
        await turns()
        assert rig.num_ahead == (2 if sends else 1)
        task.cancel()
        await turns()
        assert rig.num_ahead == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert not rig.line.replies

    with each_row() as row:
        for sends in (True, False):
            with row(sends):
                asyncio.run(scenario(sends=sends))


def test_a_call_is_cancelled_while_the_replies_before_it_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cancels a put may use its region again, so the put must notice the cancellation."""

    # On a busy machine the first reply would be sent before the next call begins.
    monkeypatch.setattr("kvservice.server.rpc.stream.JOINED_S", math.inf)

    async def scenario() -> None:
        rig = Rig(CONFIG)
        task = asyncio.create_task(rig.stream.serve())
        joined = [call.SerializeToString() for call in (ping(1), get(2), ping(3))]
        rig.line.bring(Calls(joined, session_pb2.Call.FromString))
        await turns()
        assert (rig.begun, rig.line.replies) == (["ping", "store_batch_get"], [])
        task.cancel()
        await turns()
        assert (rig.num_cancelled, rig.begun) == (1, ["ping", "store_batch_get"])
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_get_of_a_stream_begins_when_there_is_room_for_its_answer() -> None:
    """Answers that others do not read take the room."""

    async def scenario() -> None:
        async with serving() as rig:
            rig.line.may_write.set()
            rig.may_get.set()
            other = rpc_of(rig.slots, "other")
            rig.slots.room.sends(other, UNREAD_BYTES)
            rig.line.bring(get(1))
            await turns()
            assert rig.begun == []
            rig.slots.room.sent(other, UNREAD_BYTES)
            await turns()
            assert (rig.begun, rig.line.replies) == (["store_batch_get"], [1])
            assert rig.slots.room.num_bytes == 0

    asyncio.run(scenario())


def test_unary_calls_for_large_answers_begin_when_there_is_room() -> None:
    """Other calls do not wait, and their answers take no room, however large."""

    async def scenario(name: str, bulky: bool) -> None:
        slots, begun = Slots(CONFIG), []

        async def call(name: str, *_: Any) -> bytes:
            begun.append(name)
            return bytes(LARGE_BYTES)

        rpc = rpc_of(slots, "")
        RPC.set(rpc)
        given: Any = SimpleNamespace(tracer=None, call=call, local=True, admit=lambda _: None)
        answer = Services(given, given, given, given, given, slots)._unary(name, lambda request: request)
        request: Any = SimpleNamespace(session_token=b"mine")
        context: Any = SimpleNamespace(peer=lambda: "ipv4:10.0.0.1:4711")
        other = rpc_of(slots, "other")
        slots.room.sends(other, UNREAD_BYTES)
        task = asyncio.create_task(answer(request, context))
        await turns()
        assert begun == ([] if bulky else [name])
        slots.room.sent(other, UNREAD_BYTES)
        assert len(await task) == LARGE_BYTES
        assert begun == [name]
        assert slots.room.num_bytes == rpc.num_unread == (LARGE_BYTES if bulky else 0)
        assert (rpc.session, rpc.address) == ((b"mine", "10.0.0.1") if bulky else (b"", ""))

    with each_row() as row:
        for name, bulky in (("store_batch_get", True), ("read", True), ("ping", False)):
            with row(name):
                asyncio.run(scenario(name, bulky))


def test_all_streams_together_have_a_limit() -> None:
    slots = Slots(CONFIG)
    assert [slots.begin_ahead() for _ in range(10)] == [True] * 8 + [False] * 2
    slots.end_ahead()
    assert [slots.begin_ahead() for _ in range(2)] == [True, False]


# ---- blocks that protobuf does not parse


def test_blocks_are_those_that_protobuf_finds() -> None:
    """Fields that are there twice, in any order, and fields of a later version are what they are for protobuf."""
    parse = parser(session_pb2.Call, CONFIG.request_limits)
    data, other = np.random.default_rng(0).bytes(2 * LARGE_BYTES), bytes(100)
    put = store_pb2.BatchPutRequest(namespace_id=7, keys=bytes(64)).SerializeToString()
    blocks, earlier = (Encoded((one,)).inside(5).to_bytes() for one in (data, other))
    head = session_pb2.Call(call_id=300, traceparent="00-a-b-01").SerializeToString()
    first = session_pb2.Call(store_batch_put=store_pb2.BatchPutRequest(checksums=bytes(8))).SerializeToString()

    def call(request: bytes, before: bytes = head, after: bytes = b"") -> bytes:
        number = session_pb2.Call.STORE_BATCH_PUT_FIELD_NUMBER
        return before + Encoded((request,)).inside(number).to_bytes() + after

    messages = {
        "as a client writes it": (call(put + blocks), True),
        "blocks before": (call(put + earlier + blocks), True),
        "a call of the same kind before": (call(put + blocks, head + first), True),
        "a call of another kind before": (call(put + blocks, head + ping(1).SerializeToString()), True),
        "the id behind": (call(put + blocks, b"", head), False),
        "keys behind the blocks": (call(blocks + put), False),
        "a group of a later version": (call(put + b"\xfb\x3f\xfc\x3f" + blocks), False),
    }
    with each_row() as row:
        for name, (message, is_view) in messages.items():
            with row(name):
                expected = session_pb2.Call.FromString(message)
                found: Any = parse(message)
                assert isinstance(found, BlocksCall) is is_view
                assert moves_blocks(found) is is_view
                if is_view:
                    assert found.request.data == expected.store_batch_put.data == data
                    expected.store_batch_put.data = found.request.message.data  # of the blocks before, if any
                    assert found.call == expected
                    assert found.request.HasField("region") is False
                    assert (found.request.namespace_id, found.request.keys) == (7, bytes(64))
                else:
                    assert found == expected


def test_few_blocks_are_parsed_by_protobuf() -> None:
    parse = parser(session_pb2.Call, CONFIG.request_limits)
    call = session_pb2.Call(call_id=1, store_batch_put=store_pb2.BatchPutRequest(data=bytes(100)))
    assert parse(call.SerializeToString()) == call
