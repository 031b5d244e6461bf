"""The session's stream and token, used as by a client in another language."""

from __future__ import annotations

import time
from typing import Any, cast

import grpc
import numpy as np
import pytest
from each_row import each_row
from grpc_status import rpc_status
from raw_wire import SESSION_CALLS, request_of

from kvservice.launch import Daemon
from kvservice.v1 import (
    attention_pb2,
    blocks_pb2,
    pool_pb2,
    session_pb2,
)

MESSAGE_BYTES = 4 << 20


def test_a_token_that_opens_nothing(raw: Any, wire: Any) -> None:
    closed = raw.RawSession(wire)
    closed.close()
    tokens = (b"", b"x", bytes(16), bytes(4096), closed.token, closed.token[:-1], closed.token + b"\0")
    with each_row() as row:
        for name in (*SESSION_CALLS, "close"):
            with row(name):
                for token in tokens:
                    request = session_pb2.CloseRequest() if name == "close" else request_of(name)
                    request.session_token = token
                    answer = wire.unary(name, request)
                    assert (answer.code, answer.reason, answer.field) == (
                        "NOT_FOUND", "UNKNOWN_SESSION", "session_token",
                    )  # fmt: skip
                    assert answer.details == {"ErrorInfo", "BadRequest"}
    answers = [wire.unary("close", session_pb2.CloseRequest(session_token=t)) for t in (closed.token, bytes(16))]
    assert answers[0] == answers[1], "nothing tells a closed session from one that never was"


def test_the_first_call_must_attach(wire: Any, raw: Any) -> None:
    stream = wire.stream()
    for name in SESSION_CALLS:
        reply = raw.refusal(stream.send(name, request_of(name)).error)
        assert (reply.code, reply.field) == ("FAILED_PRECONDITION", "call")
    assert stream.send("ping", pool_pb2.PingRequest(payload=b"x")).ping.payload == b"x", "it needs no session"
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


def test_a_call_that_is_none(wire: Any, raw: Any) -> None:
    stream = wire.stream()
    for data in (b"", b"\x08\x07", b"\x08\x07\xfa\x3f\x00"):  # empty, an id only, a call of a later version
        stream.put(session_pb2.Call.FromString(data))
        reply = next(stream.replies)
        assert reply.call_id == session_pb2.Call.FromString(data).call_id, data
        assert raw.refusal(reply.error).field == "call", data
        assert stream.send("ping", pool_pb2.PingRequest()).WhichOneof("reply") == "ping", data
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


def test_a_call_that_comes_after_the_lease_is_lost_is_not_done(daemon: Daemon, raw: Any, wire: Any) -> None:
    """A client that goes on to send, and one that leaves at the moment at which it loses its session."""
    log = daemon.log.read_text()
    for turn in range(20):
        session = raw.RawSession(wire, detachable=True)
        prompt = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=[1])
        session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[prompt]))
        append = blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[2])
        for call_id in range(100, 300):
            session.stream.put(session_pb2.Call(call_id=call_id, append=append))
        done = [next(session.stream.replies) for _ in range(turn)]
        second = wire.stream()
        assert second.attach(session.token).WhichOneof("reply") == "attach"
        if turn % 2:
            session.stream.cancel()
        described = blocks_pb2.DescribeRequest(sequence_ids=[1])
        (before,) = second.send("describe", described).describe.sequences
        with pytest.raises(grpc.RpcError) as ended:
            done.extend(session.stream.replies)
        if not turn % 2:
            assert raw.refusal(rpc_status.from_call(cast(Any, ended.value))).reason == "SESSION_TAKEN"
            assert before.length == 1 + len(done), "what was done was answered"
        (after,) = second.send("describe", described).describe.sequences
        assert after.length == before.length >= 1 + len(done)
        session.stream = second
        session.close()
    assert daemon.log.read_text() == log


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


def test_a_message_over_the_limit(wire: Any, raw_session: Any) -> None:
    before = wire.stats()
    for surplus in (0, 1 << 20):
        answer = wire.unary("ping", pool_pb2.PingRequest(payload=bytes(MESSAGE_BYTES + surplus)))
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


def test_sessions_that_are_not_opened(wire: Any) -> None:
    before = wire.stats()
    with each_row() as row:
        for field, value in (
            ("name", "x" * 65),
            ("name", "a\nb"),
            ("name", "\u202e"),
            ("detach_ttl_s", -1.0),
            ("detach_ttl_s", float("nan")),
            ("detach_ttl_s", float("inf")),
            ("detach_ttl_s", 3601.0),
        ):
            with row((field, value)):
                options: dict[str, Any] = {field: value}
                answer = wire.unary("open", session_pb2.OpenRequest(**options))
                assert (answer.code, answer.field) == ("INVALID_ARGUMENT", field)
                assert wire.stats() == before


def pings(*call_ids: int) -> list[session_pb2.Call]:
    return [session_pb2.Call(call_id=call_id, ping=pool_pb2.PingRequest(payload=b"x")) for call_id in call_ids]


def replies_to(stream: Any, *calls: session_pb2.Call) -> list[list[session_pb2.Reply]]:
    """Send calls as one message. Returns the replies of each message that answers them."""
    stream.put(session_pb2.Call(calls=calls))
    messages: list[list[session_pb2.Reply]] = []
    while sum(map(len, messages)) < len(calls):
        reply = next(stream.replies)
        messages.append(list(reply.replies) or [reply])
    return messages


def test_calls_of_one_message_are_answered_each(raw: Any, raw_session: Any) -> None:
    """Each has its own reply, in the order of the calls, and what is wrong with one does not concern the others."""
    stream, first = raw_session.stream, 1000
    calls = []
    for call_id in range(first, first + 32):
        prompt = blocks_pb2.SequenceAllocation(sequence_id=call_id, token_ids=[1])
        request = blocks_pb2.AllocateRequest(request_id=call_id, sequences=[prompt])
        calls.append(session_pb2.Call(call_id=call_id, allocate=request))
    calls[7] = session_pb2.Call(call_id=calls[7].call_id, free=blocks_pb2.FreeRequest(sequence_ids=[9]))
    calls[8] = session_pb2.Call(call_id=calls[8].call_id, calls=pings(1, 2))  # calls in calls
    calls[9] = session_pb2.Call(call_id=calls[9].call_id)
    calls[20] = calls[21]  # a request that is repeated
    replies = [reply for message in replies_to(stream, *calls) for reply in message]
    assert [reply.call_id for reply in replies] == [call.call_id for call in calls]
    wrong = {i: raw.refusal(reply.error) for i, reply in enumerate(replies) if reply.HasField("error")}
    assert {i: (error.reason, error.field) for i, error in wrong.items()} == {
        7: ("UNKNOWN_SEQUENCE", "sequence_ids[0]"),
        8: ("INVALID_ARGUMENT", "calls"),
        9: ("FAILED_PRECONDITION", "call"),
    }
    assert replies[20] == replies[21]
    made = {sequence.sequence_id for sequence in raw_session.describe().sequences}
    assert made == {call.call_id for i, call in enumerate(calls) if i not in wrong}
    # Replies may come in several messages if the daemon is slow, but not always one by one.
    assert any(len(message) > 1 for _ in range(100) for message in replies_to(stream, *pings(*range(128))))
    lone = session_pb2.Call(call_id=3, calls=pings(4))
    stream.put(lone)
    assert raw.refusal(next(stream.replies).error).field == "calls", "a call is one, or has some"
    [[only]] = replies_to(stream, *pings(5))
    assert only.ping.payload == b"x"


def test_a_message_that_has_not_only_calls_is_refused_as_a_whole(wire: Any, raw: Any, raw_session: Any) -> None:
    stream = wire.stream()
    attached = stream.attach(raw_session.token).attach
    assert attached.max_calls == 128
    free = session_pb2.Call(calls=pings(1)).SerializeToString()
    send_bytes = wire.channel.stream_stream("/kvservice.v1.SessionService/Connect")
    with each_row() as row:
        for name, message in {
            "too many": session_pb2.Call(calls=pings(*range(attached.max_calls + 1))).SerializeToString(),
            "another field": free + pings(2)[0].SerializeToString(),
            "cut short": free[:-1],
            "no end of a size": b"\x32" + b"\xff" * 4096,
        }.items():
            with row(name):
                with pytest.raises(grpc.RpcError) as ended:
                    list(send_bytes(iter([message]), timeout=20))
                refused = raw.refusal(rpc_status.from_call(cast(Any, ended.value)))
                assert (refused.code, refused.field) == ("INVALID_ARGUMENT", "calls")
        with row("a call without an id that is no message"):
            damaged = free + b"\x32\x02\xff\xff" + free
            answered = send_bytes(iter([damaged]), timeout=20)
            assert session_pb2.Reply.FromString(next(answered)).call_id == 1, "what came before is answered"
            with pytest.raises(grpc.RpcError) as ended:
                next(answered)
            assert raw.refusal(rpc_status.from_call(cast(Any, ended.value))).code == "INVALID_ARGUMENT"
    stream.cancel()
