"""The session's stream and token, used as by a client in another language."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import grpc
import numpy as np
import pytest
from grpc_status import rpc_status

from kvservice.config import ServeConfig
from kvservice.errors import SessionTakenError
from kvservice.server.callers import LocalCallers
from kvservice.server.contract import SERVICES, SESSION_SERVICES, call_name
from kvservice.server.services import Stream
from kvservice.server.slots import Rpc, Slots
from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    host_pb2,
    pool_pb2,
    scheduler_pb2,
    session_pb2,
    shared_memory_pb2,
)

SESSION_CALLS = sorted(
    call_name(method) for service in SERVICES for method in service.methods if service.name in SESSION_SERVICES
)
MESSAGE_BYTES = 4 << 20
OBJECT = f"kvservice-stream-{os.getpid()}"
ALL_REGIONS = shared_memory_pb2.SystemSharedMemoryStatusRequest()


def request_of(name: str) -> Any:
    message: Any = session_pb2.Call.DESCRIPTOR.fields_by_name[name].message_type
    return message._concrete_class()


@pytest.mark.parametrize("name", [*SESSION_CALLS, "close"])
def test_a_token_that_opens_nothing(raw: Any, wire: Any, name: str) -> None:
    closed = raw.RawSession(wire)
    closed.close()
    make: Callable[[], Any] = session_pb2.CloseRequest if name == "close" else lambda: request_of(name)
    for token in (b"", b"x", bytes(16), bytes(4096), closed.token, closed.token[:-1], closed.token + b"\0"):
        request = make()
        request.session_token = token
        answer = wire.unary(name, request)
        assert (answer.code, answer.reason, answer.field) == ("NOT_FOUND", "UNKNOWN_SESSION", "session_token")
        assert answer.details == {"ErrorInfo", "BadRequest"}


def test_unknown_and_closed_tokens_get_the_same_error(raw: Any, wire: Any) -> None:
    closed = raw.RawSession(wire)
    closed.close()
    answers = [wire.unary("close", session_pb2.CloseRequest(session_token=t)) for t in (closed.token, bytes(16))]
    assert answers[0] == answers[1]


def test_the_first_call_must_attach(wire: Any, raw: Any) -> None:
    stream = wire.stream()
    for name in SESSION_CALLS:
        reply = raw.refusal(stream.send(name, request_of(name)).error)
        assert (reply.code, reply.field) == ("FAILED_PRECONDITION", "call")
    stream.cancel()


def test_ping_needs_no_session(wire: Any) -> None:
    stream = wire.stream()
    assert stream.send("ping", pool_pb2.PingRequest(payload=b"x")).ping.payload == b"x"
    stream.cancel()


def test_attaching_twice_is_refused_and_does_not_detach(raw_session: Any, raw: Any) -> None:
    reply = raw.refusal(raw_session.stream.attach(raw_session.token).error)
    assert (reply.code, reply.field) == ("FAILED_PRECONDITION", "call")
    assert not isinstance(raw_session.call("describe", blocks_pb2.DescribeRequest(), "stream"), raw.Refusal)


def test_attaching_to_nothing_leaves_the_stream_usable(wire: Any, raw: Any, raw_session: Any) -> None:
    stream = wire.stream()
    for token in (b"", bytes(16)):
        reply = raw.refusal(stream.attach(token).error)
        assert (reply.code, reply.reason) == ("NOT_FOUND", "UNKNOWN_SESSION")
    assert stream.attach(raw_session.token).WhichOneof("reply") == "attach"
    stream.cancel()


@pytest.mark.parametrize("data", [b"", b"\x08\x07", b"\x08\x07\xfa\x3f\x00"], ids=["empty", "id only", "later call"])
def test_a_call_that_is_none(wire: Any, raw: Any, data: bytes) -> None:
    stream = wire.stream()
    stream.put(session_pb2.Call.FromString(data))
    reply = next(stream.replies)
    assert reply.call_id == session_pb2.Call.FromString(data).call_id
    assert raw.refusal(reply.error).field == "call"
    assert stream.send("ping", pool_pb2.PingRequest()).WhichOneof("reply") == "ping"
    stream.cancel()


def test_the_token_in_a_streams_request_is_ignored(raw_session: Any) -> None:
    reply = raw_session.stream.send("describe", blocks_pb2.DescribeRequest(session_token=b"wrong"))
    assert reply.WhichOneof("reply") == "describe"


def test_replies_come_in_the_order_of_the_calls(raw_session: Any) -> None:
    for call_id in range(100, 200):
        request = blocks_pb2.AllocateRequest(
            sequences=[blocks_pb2.SequenceAllocation(sequence_id=call_id // 2, token_ids=[1])]
        )
        free = blocks_pb2.FreeRequest(sequence_ids=[call_id // 2])
        call = {"allocate": request} if call_id % 2 == 0 else {"free": free}
        raw_session.stream.put(session_pb2.Call(call_id=call_id, **call))
    for call_id in range(100, 200):
        reply = next(raw_session.stream.replies)
        assert (reply.call_id, reply.WhichOneof("reply")) == (call_id, "free" if call_id % 2 else "allocate")


def test_a_second_stream_takes_the_session_over(wire: Any, raw: Any, raw_session: Any) -> None:
    second = wire.stream()
    assert second.attach(raw_session.token).WhichOneof("reply") == "attach"
    with pytest.raises(grpc.RpcError) as ended:
        next(raw_session.stream.replies)
    told = raw.refusal(rpc_status.from_call(cast(Any, ended.value)))
    assert (told.code, told.reason) == ("ABORTED", "SESSION_TAKEN")
    time.sleep(0.7)  # longer than the grace time, which the end of the first stream must not have started
    assert second.send("describe", blocks_pb2.DescribeRequest()).WhichOneof("reply") == "describe"
    second.cancel()


def test_who_reconnects_is_let_in_only_as_the_last_who_attached(wire: Any, raw: Any, raw_session: Any) -> None:
    def attach(holder: int, reconnects: bool) -> Any:
        stream = wire.stream()
        request = session_pb2.AttachRequest(session_token=raw_session.token, holder=holder, reconnects=reconnects)
        return stream, stream.send("attach", request)

    for holder, let_in in ((7, False), (0, True)):  # its first stream named no holder
        stream, reply = attach(holder, reconnects=True)
        assert reply.HasField("attach") is let_in
        stream.cancel()
    for holder in (1, 2**64 - 1):
        held, reply = attach(holder, reconnects=False)
        assert reply.WhichOneof("reply") == "attach"
        for other in (0, 2, 2**64 - 2):
            refused, reply = attach(other, reconnects=True)
            answer = raw.refusal(reply.error)
            assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "SESSION_TAKEN")
            assert refused.send("describe", blocks_pb2.DescribeRequest()).WhichOneof("reply") == "error"
            refused.cancel()
        assert held.send("describe", blocks_pb2.DescribeRequest()).WhichOneof("reply") == "describe"
        held, reply = attach(holder, reconnects=True)
        assert reply.WhichOneof("reply") == "attach"
    held.cancel()


def test_who_lost_the_session_cannot_close_it(wire: Any, raw: Any) -> None:
    session = raw.RawSession(wire, detachable=True)
    owner = wire.stream()
    owner.send("attach", session_pb2.AttachRequest(session_token=session.token, holder=5))
    for detached in (False, True):
        if detached:
            owner.cancel()  # the session waits for its last holder, or for a client with its token
        answer = wire.unary("close", session_pb2.CloseRequest(session_token=session.token, holder=6))
        assert (answer.code, answer.reason) == ("FAILED_PRECONDITION", "SESSION_TAKEN")
        assert wire.stats().sessions == 1
    answer = wire.unary("close", session_pb2.CloseRequest(session_token=session.token, holder=5))
    assert answer == session_pb2.CloseResponse()
    session.stream.cancel()


class LosingContext:
    """A stream that loses its lease after its next call has arrived."""

    def __init__(self, outcome: type[Exception]) -> None:
        self.stream: Stream
        self._outcome = outcome
        self.written: list[str] = []
        self.aborted = ""
        self._calls = iter(("attach", "describe", "describe"))

    def peer(self) -> str:
        return "unix:"

    async def read(self) -> session_pb2.Call:
        name = next(self._calls)
        if self.written == ["attach", "describe"]:
            self.stream.end(SessionTakenError("taken over"))
        return session_pb2.Call(**{name: request_of(name)})

    async def write(self, reply: session_pb2.Reply) -> None:
        self.written.append(str(reply.WhichOneof("reply")))

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.aborted = status.details
        raise self._outcome


@pytest.mark.parametrize(
    "outcome",
    [grpc.aio.AbortError, grpc.aio.UsageError, grpc.aio.InternalError],
    ids=["told", "the client had ended the stream", "the client ends it meanwhile"],
)
def test_a_call_that_comes_after_the_lease_is_lost_is_not_done(outcome: type[Exception]) -> None:
    context, dispatcher, sessions = LosingContext(outcome), Mock(), Mock()
    dispatcher.call = AsyncMock(return_value=blocks_pb2.DescribeResponse())
    sessions.attach.return_value.session_id = 1
    slots, rpc = Slots(ServeConfig()), Rpc(Mock(), None, Mock(), "session stream")
    context.stream = Stream(dispatcher, sessions, cast(Any, context), LocalCallers(), slots, rpc)
    asyncio.run(context.stream.serve())
    assert (slots.num_unattached, rpc.stalled_since) == (0, None)
    assert (context.written, context.aborted) == (["attach", "describe"], "taken over")
    assert dispatcher.call.await_count == 1


def test_closing_the_session_ends_its_stream(wire: Any, raw: Any, raw_session: Any) -> None:
    assert wire.unary("close", session_pb2.CloseRequest(session_token=raw_session.token)) == session_pb2.CloseResponse()
    with pytest.raises(grpc.RpcError) as ended:
        next(raw_session.stream.replies)
    told = raw.refusal(rpc_status.from_call(cast(Any, ended.value)))
    assert (told.code, told.reason, told.message) == ("ABORTED", "FAILED_PRECONDITION", "the session was closed")


def test_half_closing_ends_the_stream_in_peace(raw_session: Any) -> None:
    raw_session.stream.end()
    assert list(raw_session.stream.replies) == []
    assert raw_session.stream.replies.code() is grpc.StatusCode.OK


def allocate(sequence_id: int, request_id: int = 0, num_tokens: int = 5) -> blocks_pb2.AllocateRequest:
    one = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=range(num_tokens))
    return blocks_pb2.AllocateRequest(request_id=request_id, sequences=[one])


def scheduled(scheduled_id: int, request_id: int = 0) -> scheduler_pb2.AddRequestsRequest:
    one = scheduler_pb2.ScheduledRequest(request_id=scheduled_id, token_ids=range(3), max_tokens=2, width=1)
    return scheduler_pb2.AddRequestsRequest(request_id=request_id, requests=[one])


def register(name: str, request_id: int = 0) -> shared_memory_pb2.SystemSharedMemoryRegisterRequest:
    return shared_memory_pb2.SystemSharedMemoryRegisterRequest(
        request_id=request_id, name=name, key=OBJECT, byte_size=64
    )


REPEATABLE: dict[str, Callable[[int], Any]] = {
    "allocate": lambda n: allocate(11, n),
    "append": lambda n: blocks_pb2.AppendRequest(
        request_id=n, sequence_ids=[1], token_ids=[9], return_slot_mapping=True
    ),
    "open_step": lambda n: blocks_pb2.OpenStepRequest(request_id=n, sequence_ids=[2]),
    "truncate": lambda n: blocks_pb2.TruncateRequest(request_id=n, sequence_ids=[1], lengths=[2]),
    "fork": lambda n: blocks_pb2.ForkRequest(request_id=n, parent_ids=[1], child_ids=[11]),
    "swap_out": lambda n: blocks_pb2.SwapOutRequest(request_id=n, sequence_ids=[1]),
    "swap_in": lambda n: blocks_pb2.SwapInRequest(request_id=n, sequence_ids=[3]),
    "free": lambda n: blocks_pb2.FreeRequest(request_id=n, sequence_ids=[1]),
    "pin": lambda n: blocks_pb2.PinRequest(request_id=n, token_ids=range(4), ttl_s=60),
    "unpin": lambda n: blocks_pb2.UnpinRequest(request_id=n, pin_id=1),
    "reset_prefix_cache": lambda n: blocks_pb2.ResetPrefixCacheRequest(request_id=n),
    "system_shared_memory_register": lambda n: register("new", n),
    "system_shared_memory_unregister": lambda n: shared_memory_pb2.SystemSharedMemoryUnregisterRequest(
        request_id=n, name="old"
    ),
    "create_region": lambda n: shared_memory_pb2.CreateRegionRequest(request_id=n, name="new", byte_size=1),
    "open_lane": lambda n: host_pb2.OpenLaneRequest(request_id=n),
    "close_lane": lambda n: host_pb2.CloseLaneRequest(request_id=n),
    "map_pool": lambda n: host_pb2.MapPoolRequest(request_id=n),
    "unmap_pool": lambda n: host_pb2.UnmapPoolRequest(request_id=n),
    "commit": lambda n: host_pb2.CommitRequest(request_id=n, step_id=3),
    "open_scheduler": lambda n: scheduler_pb2.OpenSchedulerRequest(request_id=n),
    "add_requests": lambda n: scheduled(12, n),
    "abort_requests": lambda n: scheduler_pb2.AbortRequestsRequest(request_id=n, request_ids=[13]),
    "schedule": lambda n: scheduler_pb2.ScheduleRequest(request_id=n),
    "cuda_shared_memory_unregister": lambda n: shared_memory_pb2.CudaSharedMemoryUnregisterRequest(request_id=n),
}
# A daemon without a GPU refuses the first. test_store_calls.py and test_store_regions.py repeat those of the store.
REFUSED = {
    "cuda_shared_memory_register",
    *(
        name
        for name in SESSION_CALLS
        if "request_id" in request_of(name).DESCRIPTOR.fields_by_name and "store_" in name
    ),
}


@pytest.fixture
def prepared(raw_session: Any, raw: Any) -> Any:
    """A session with sequences 1 (computed), 2 (pending, in step 3), 3 (swapped out), pin 1, region "old", the pool
    mapped, and a scheduler with request 13."""
    path = Path("/dev/shm", OBJECT)
    path.write_bytes(bytes(64))
    raw_session.ok("system_shared_memory_register", register("old"))
    shape = (2, 5, 2, 32)
    for sequence_id in (1, 3):
        raw_session.ok("allocate", allocate(sequence_id))
        step = raw_session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
        if step.query_lens[0] == 5:
            request = attention_pb2.WriteRequest(step_id=step.step_id, key=raw.tensor(*shape), value=raw.tensor(*shape))
            raw_session.ok("write", request)
    raw_session.ok("map_pool", host_pb2.MapPoolRequest(writable=True))
    raw_session.ok("allocate", allocate(2))
    assert raw_session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[2])).step_id == 3
    raw_session.ok("swap_out", blocks_pb2.SwapOutRequest(sequence_ids=[3]))
    raw_session.ok("pin", blocks_pb2.PinRequest(token_ids=range(4), ttl_s=60))
    raw_session.ok("open_scheduler", scheduler_pb2.OpenSchedulerRequest())
    raw_session.ok("add_requests", scheduled(13))
    yield raw_session
    raw_session.ok("reset_prefix_cache", blocks_pb2.ResetPrefixCacheRequest())
    path.unlink()


@pytest.mark.parametrize("name", REPEATABLE)
@pytest.mark.parametrize("ways", [("unary", "unary"), ("stream", "stream"), ("unary", "stream"), ("stream", "unary")])
def test_a_repeated_request_is_answered_again_and_not_executed_again(
    prepared: Any, wire: Any, raw: Any, name: str, ways: tuple[str, str]
) -> None:
    first = prepared.call(name, REPEATABLE[name](77), ways[0])
    assert not isinstance(first, raw.Refusal)
    after = wire.stats(), prepared.describe(), prepared.ok("system_shared_memory_status", ALL_REGIONS)
    assert prepared.call(name, REPEATABLE[name](77), ways[1]) == first
    assert (wire.stats(), prepared.describe(), prepared.ok("system_shared_memory_status", ALL_REGIONS)) == after


def test_every_repeatable_call_is_tried() -> None:
    fields = {name: request_of(name).DESCRIPTOR.fields_by_name for name in SESSION_CALLS}
    assert set(REPEATABLE) | REFUSED == {name for name, known in fields.items() if "request_id" in known}


def test_a_request_id_belongs_to_its_call(prepared: Any) -> None:
    prepared.ok("free", blocks_pb2.FreeRequest(request_id=5, sequence_ids=[1]))
    answer = prepared.call("swap_out", blocks_pb2.SwapOutRequest(request_id=5, sequence_ids=[2]))
    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", "request_id")


def test_a_request_id_belongs_to_its_session(prepared: Any, raw: Any, wire: Any) -> None:
    prepared.ok("allocate", allocate(20, 6))
    other = raw.RawSession(wire)
    other.ok("allocate", allocate(21, 6))
    assert [info.sequence_id for info in other.describe().sequences] == [21]
    other.close()


def test_a_refused_request_may_be_sent_again(prepared: Any, raw: Any) -> None:
    request = blocks_pb2.FreeRequest(request_id=8, sequence_ids=[50])
    assert isinstance(prepared.call("free", request), raw.Refusal)
    prepared.ok("allocate", allocate(50))
    prepared.ok("free", request)


def test_without_a_request_id_a_request_is_executed_again(prepared: Any) -> None:
    request = blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[9])
    first, second = prepared.ok("append", request), prepared.ok("append", request)
    assert second.step_id > first.step_id


@pytest.mark.parametrize("surplus", [0, 1 << 20])
def test_a_message_over_the_limit(wire: Any, raw_session: Any, surplus: int) -> None:
    before = wire.stats()
    request = pool_pb2.PingRequest(payload=bytes(MESSAGE_BYTES + surplus))
    answer = wire.unary("ping", request)
    assert answer.code == "RESOURCE_EXHAUSTED"
    assert wire.stats() == before
    assert raw_session.stream.send("ping", pool_pb2.PingRequest()).WhichOneof("reply") == "ping"


def test_a_message_over_the_limit_ends_its_stream_alone(wire: Any, raw: Any, raw_session: Any) -> None:
    # The session is detachable, because on a busy machine the grace time can end before the client gets the error.
    other = raw.RawSession(wire, detachable=True)
    other.stream.put(session_pb2.Call(call_id=1, ping=pool_pb2.PingRequest(payload=bytes(MESSAGE_BYTES))))
    with pytest.raises(grpc.RpcError) as ended:
        next(other.stream.replies)
    assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert raw_session.stream.send("ping", pool_pb2.PingRequest()).WhichOneof("reply") == "ping"
    again = wire.stream()
    assert again.attach(other.token).WhichOneof("reply") == "attach"
    again.cancel()
    other.close()


def test_the_largest_tensors_go_through(raw: Any, raw_session: Any) -> None:
    """The request and the response are almost as large as a message, because the output is as large as the query."""
    num_tokens, num_heads = 200, (MESSAGE_BYTES * 7 // 8 // 200 // 128) & ~1
    prompt = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=range(70_000, 70_000 + num_tokens))
    raw_session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[prompt]))
    step = raw_session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1]))
    query, key = raw.tensor(num_tokens, num_heads, 32), raw.tensor(num_tokens, 2, 32)
    request = attention_pb2.AttendRequest(step_id=step.step_id, query=query, key=key, value=key)
    for way in ("unary", "stream"):
        request.layer = int(way == "stream")
        answer = raw_session.call("extend", request, way)
        assert not isinstance(answer, raw.Refusal), answer
        assert np.allclose(np.frombuffer(answer.output.inline, np.float32), 1)


def test_out_of_blocks_says_how_many_and_when(raw_session: Any) -> None:
    long = [blocks_pb2.SequenceAllocation(sequence_id=n, token_ids=range(n, n + 200)) for n in range(2)]
    later = raw_session.call("allocate", blocks_pb2.AllocateRequest(sequences=long[:1]))
    assert later.num_blocks == [50]
    refused = raw_session.call("allocate", blocks_pb2.AllocateRequest(sequences=long[1:]))
    assert (refused.code, refused.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_BLOCKS")
    assert refused.details == {"ErrorInfo", "RetryInfo"}
    wanted = {"tier": "device", "required": "50", "free": "14", "total": "64", "never": "false"}
    assert refused.metadata == wanted
    third = [blocks_pb2.SequenceAllocation(sequence_id=n, token_ids=range(n, n + 200)) for n in range(2, 4)]
    never = raw_session.call("allocate", blocks_pb2.AllocateRequest(sequences=third))
    assert (never.details, never.metadata["never"]) == ({"ErrorInfo"}, "true")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("name", {"name": "x" * 65}),
        ("name", {"name": "a\nb"}),
        ("name", {"name": "\u202e"}),
        ("detach_ttl_s", {"detach_ttl_s": -1.0}),
        ("detach_ttl_s", {"detach_ttl_s": float("nan")}),
        ("detach_ttl_s", {"detach_ttl_s": float("inf")}),
        ("detach_ttl_s", {"detach_ttl_s": 3601.0}),
    ],
)
def test_sessions_that_are_not_opened(wire: Any, field: str, options: dict[str, Any]) -> None:
    before = wire.stats()
    answer = wire.unary("open", session_pb2.OpenRequest(**options))
    assert (answer.code, answer.field) == ("INVALID_ARGUMENT", field)
    assert wire.stats() == before
