"""A daemon with a keeper is killed, and hands over: what raw clients and observers see of it."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_status import rpc_status
from kept_daemon import next_process
from like_systemd import LikeSystemd
from small_pool import SMALL_POOL
from waiting import until

from kvservice.health import check
from kvservice.launch import Daemon
from kvservice.v1 import attention_pb2, blocks_pb2, events_pb2, inspect_pb2, session_pb2

TOKENS = list(range(10))


@pytest.fixture(scope="module")
def kept_daemon() -> Iterator[Daemon]:
    with Daemon(keeper=True, log_level="info", **SMALL_POOL | {"session_grace_s": 60}) as daemon:
        yield daemon


def attach(wire: Any, token: bytes, *, reconnects: bool = False) -> tuple[Any, session_pb2.AttachResponse]:
    stream = wire.stream()
    reply = stream.attach(token, reconnects=reconnects)
    assert reply.HasField("attach"), reply
    return stream, reply.attach


def snapshot(wire: Any) -> inspect_pb2.Snapshot:
    found: Any = wire.unary("get_snapshot", inspect_pb2.GetSnapshotRequest())
    return cast(inspect_pb2.Snapshot, found)


def test_a_killed_process_is_followed_by_one_with_the_same_sessions(kept_daemon: Daemon, raw: Any) -> None:
    wire = raw.Wire(kept_daemon.address)
    session = raw.RawSession(wire, name="engine", tenant="acme", detachable=True)
    again, first = attach(wire, session.token)
    again.cancel()
    session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[raw_prompt(1)]))
    request = blocks_pb2.AppendRequest(request_id=7, sequence_ids=[1], token_ids=[5])
    appended = session.ok("append", request)
    compute(session, raw, 2, 100)
    seen = events(wire, start_number=1)

    next_process(kept_daemon, signal.SIGKILL)

    stream, attached = attach(wire, session.token, reconnects=True)
    assert attached.session_id == first.session_id
    assert attached.daemon_start not in (0, first.daemon_start)
    assert attached.num_lost_sequences == 0
    shown = snapshot(wire)
    assert [(one.session_id, one.name, one.tenant) for one in shown.sessions] == [(first.session_id, "engine", "acme")]
    assert (shown.num_sessions, shown.num_sequences) == (1, 2)
    assert (shown.restart.outcome, shown.restart.ended) == ("taken over", "signal 9")
    assert shown.restart.kept.sequences == 2
    assert session.ok("append", request) == appended
    described = session.describe().sequences
    assert [list(one.token_ids) for one in described] == [[*TOKENS, 5], list(range(100, 104))]
    log = kept_daemon.log.read_text()
    assert re.search(r"INFO .*after signal 9: took over 1 session, 2 sequences.* in \d\.\d\d s, .*lost 1 step", log)
    compute(session, raw, 3, 200)
    later = events(wire, start_number=seen.number + 1, daemon_id=seen.daemon_id)
    assert later.daemon_id not in (0, seen.daemon_id)
    assert later.HasField("gap"), "what the subscriber knows of is not what there is"
    stream.cancel()
    session.close()
    wire.close()


def compute(session: Any, raw: Any, sequence_id: int, first_token: int) -> None:
    """Fill one block."""
    one = blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=range(first_token, first_token + 4))
    session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[one]))
    step = session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[sequence_id]))
    kv = raw.tensor(2, 4, 2, 32)
    session.ok("write", attention_pb2.WriteRequest(step_id=step.step_id, key=kv, value=kv))


def events(wire: Any, **options: int) -> events_pb2.KVEventBatch:
    """Return the first batch that a subscriber gets."""
    stream = wire.methods["subscribe"](events_pb2.SubscribeRequest(**options), timeout=60)
    batch: events_pb2.KVEventBatch = next(stream)
    stream.cancel()
    return batch


def raw_prompt(sequence_id: int) -> blocks_pb2.SequenceAllocation:
    return blocks_pb2.SequenceAllocation(sequence_id=sequence_id, token_ids=TOKENS)


def calls(token: bytes) -> Iterator[session_pb2.Call]:
    """Yield calls without end: to attach, then to add a token to sequence 1 and to remove it, in turns."""
    yield session_pb2.Call(call_id=0, attach=session_pb2.AttachRequest(session_token=token))
    append = blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=[5])
    truncate = blocks_pb2.TruncateRequest(sequence_ids=[1], lengths=[len(TOKENS)])
    for call_id in itertools.count(1, 2):
        yield session_pb2.Call(call_id=call_id, append=append)
        yield session_pb2.Call(call_id=call_id + 1, truncate=truncate)


def test_calls_without_a_reply_were_not_executed(kept_daemon: Daemon, raw: Any) -> None:
    """The process hands over amid calls on a stream. Each was executed and answered, refused, or neither."""
    wire = raw.Wire(kept_daemon.address)
    session = raw.RawSession(wire, detachable=True)
    session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[raw_prompt(1)]))
    stream = wire.sessions.Connect(calls(session.token), timeout=120)
    replies = [next(stream), next(stream)]
    os.kill(kept_daemon.daemon_pid(), signal.SIGUSR1)
    with pytest.raises(grpc.RpcError) as ended:
        replies.extend(stream)

    # A client of gRPC that writes just when the process ends loses what it has not read yet: replies, and the status.
    told = rpc_status.from_call(cast(Any, ended.value))
    if told is None:
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    else:
        status = raw.refusal(told)
        assert (status.code, status.reason) == ("UNAVAILABLE", "RESTARTING")
    assert [reply.call_id for reply in replies] == [*range(len(replies))]
    refused = [raw.refusal(reply.error) for reply in replies if reply.WhichOneof("reply") == "error"]
    assert {(one.code, one.reason) for one in refused} <= {("UNAVAILABLE", "RESTARTING")}
    kinds = [reply.WhichOneof("reply") for reply in replies if reply.WhichOneof("reply") != "error"]
    until(lambda: check(kept_daemon.address, timeout_s=0.5))
    session.stream, attached = attach(wire, session.token, reconnects=True)
    assert attached.num_lost_sequences == 0
    (described,) = session.describe().sequences
    assert described.length == len(TOKENS) + (kinds[-1] == "append") or told is None
    assert described.length - len(TOKENS) in (0, 1)
    session.close()
    wire.close()


@pytest.mark.slow
def test_systemd_keeps_what_the_next_process_takes_over(tmp_path: Path, raw: Any) -> None:
    """`systemctl reload`, `systemctl restart` and a crash, one after the other."""
    systemd = LikeSystemd(tmp_path, **SMALL_POOL | {"session_grace_s": 60})
    try:
        systemd.start()
        wire = raw.Wire(systemd.address)
        session = raw.RawSession(wire)
        session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[raw_prompt(1)]))
        for number, ended, cause in (
            (signal.SIGHUP, "status 0", "upgrade"),
            (signal.SIGTERM, "status 0", "upgrade"),
            (signal.SIGKILL, "signal 9", ""),
        ):
            assert systemd.end(number) == ended
            systemd.start()
            stream, _ = attach(wire, session.token, reconnects=True)
            assert [one.sequence_id for one in session.describe().sequences] == [1]
            restart = snapshot(wire).restart
            assert (restart.outcome, restart.ended, restart.kept.sequences) == ("taken over", cause, 1)
            stream.cancel()
        wire.close()
        systemd.end(signal.SIGTERM)
    finally:
        systemd.close()
