"""Blocks of the pool that a process may still write, after its session was lost, are nobody's until it has ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from daemon_lives import Life, end_stream, finish
from kept_daemon import next_process
from manual_clock import ManualClock
from open_files import num_open_files
from raw_store import fd_socket, present
from raw_wire import Refusal
from small_pool import SMALL_POOL
from waiting import until

from kvservice.client import KVClient, Sequence, Session
from kvservice.errors import ResourceExhaustedError
from kvservice.launch import Daemon
from kvservice.server.memory.fd_passing import FdServer, Writers
from kvservice.store import Records, WriterRecord
from kvservice.v1 import blocks_pb2, host_pb2, pool_pb2, scheduler_pb2, session_pb2

GRACE_S = 20.0
WRITER = 77
PROMPT = list(range(6))
BLOCK_SIZE = SMALL_POOL["block_size"]
# A step over so many tokens, of which the first lie in the last block of the prompt.
NUM_WRITTEN = 9
BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK_SIZE


# ---- the ends of a session, without a server


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    one = Life(clock=clock, session_grace_s=GRACE_S)
    yield one
    one.kill()


def stuck(life: Life, **options: Any) -> Any:
    """Return a session with a partly computed sequence, in the middle of a step of a process that writes the pool."""

    async def begin() -> Any:
        session = life.open(**options)
        life.manager.add_writer(session.namespace, WRITER)
        await life.compute(session, 1, PROMPT)
        tokens = [9] * NUM_WRITTEN
        await life.call(session, "append", blocks_pb2.AppendRequest(sequence_ids=[1], token_ids=tokens, num_tokens=[9]))
        return session

    return asyncio.run(begin())


def quarantined(life: Life) -> int:
    life.manager.check_integrity()
    return int(life.manager.stats().quarantined_blocks)


def is_lost(life: Life, session: Any, clock: ManualClock) -> None:
    life.sessions.detach(session, end_stream)
    clock.advance(GRACE_S)


def is_unshared(life: Life, session: Any, clock: ManualClock) -> None:
    """Its client has been away for longer than the grace time, and may come back."""
    life.sessions.keep_for(session, 1000.0)
    is_lost(life, session, clock)
    assert len(life.sessions) == 1


def is_taken_over(life: Life, session: Any, _: ManualClock) -> None:
    life.attach(session.token, holder=2)


def is_closed_by_an_operator(life: Life, session: Any, _: ManualClock) -> None:
    finish(life.sessions.close_for_in_slices(session.token, 0))


def is_closed(life: Life, session: Any, _: ManualClock) -> None:
    finish(life.sessions.close_in_slices(session))


def closes(life: Life, session: Any, _: ManualClock) -> None:
    finish(life.sessions.close_for_in_slices(session.token, 1))


def detaches(life: Life, session: Any, clock: ManualClock) -> None:
    asyncio.run(life.call(session, "detach", session_pb2.DetachRequest(ttl_s=100.0)))
    is_unshared(life, session, clock)


def unmaps(life: Life, session: Any, clock: ManualClock) -> None:
    asyncio.run(life.call(session, "unmap_pool", host_pb2.UnmapPoolRequest()))
    is_lost(life, session, clock)


def reconnects(life: Life, session: Any, clock: ManualClock) -> None:
    life.sessions.detach(session, end_stream)
    clock.advance(GRACE_S * 0.9)
    life.attach(session.token, reconnects=True)
    clock.advance(10 * GRACE_S)


Ending = Callable[[Life, Any, ManualClock], None]
WITHOUT_A_WORD = [is_lost, is_unshared, is_taken_over, is_closed_by_an_operator, is_closed]


@pytest.mark.parametrize("ending", WITHOUT_A_WORD, ids=lambda ending: ending.__name__)
def test_what_a_client_did_not_ask_for_leaves_its_blocks_to_it(
    life: Life, clock: ManualClock, ending: Ending, caplog: pytest.LogCaptureFixture
) -> None:
    session = stuck(life)
    caplog.set_level(logging.WARNING)
    ending(life, session, clock)
    assert quarantined(life) == 3
    (said,) = [record for record in caplog.records if "quarantine" in record.message]
    assert said.session_id == session.session_id  # type: ignore[attr-defined]
    assert life.manager.writer_ended(WRITER) == 3
    assert quarantined(life) == 0


@pytest.mark.parametrize("ending", [closes, detaches, unmaps, reconnects], ids=lambda ending: ending.__name__)
def test_what_a_client_asked_for_leaves_nothing(life: Life, clock: ManualClock, ending: Ending) -> None:
    ending(life, stuck(life), clock)
    assert quarantined(life) == 0


def test_a_session_that_is_taken_over_and_lost_leaves_the_blocks_of_both(life: Life, clock: ManualClock) -> None:
    session = stuck(life)
    is_taken_over(life, session, clock)
    life.manager.add_writer(session.namespace, WRITER + 1)
    step = asyncio.run(life.call(session, "open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1])))
    assert step.step_id
    is_lost(life, session, clock)
    assert quarantined(life) == 6
    assert (life.manager.writer_ended(WRITER), life.manager.writer_ended(WRITER + 1)) == (3, 3)
    assert quarantined(life) == 0


def test_a_scheduler_that_is_taken_over_makes_its_batch_again_elsewhere(life: Life, clock: ManualClock) -> None:
    async def scenario() -> None:
        session = life.open()
        life.manager.add_writer(session.namespace, WRITER)
        one = scheduler_pb2.ScheduledRequest(request_id=5, token_ids=PROMPT, max_tokens=4, width=1)
        await life.call(session, "open_scheduler", scheduler_pb2.OpenSchedulerRequest())
        await life.call(session, "add_requests", scheduler_pb2.AddRequestsRequest(requests=[one]))
        first = await life.call(session, "schedule", scheduler_pb2.ScheduleRequest())
        is_taken_over(life, session, clock)
        assert quarantined(life) == 2
        again = await life.call(session, "schedule", scheduler_pb2.ScheduleRequest(retry=True))
        assert again.step.step_id > first.step.step_id
        blocks = session.namespace.steps[again.step.step_id].plan.slot_mapping // BLOCK_SIZE
        assert not life.manager.quarantine.held[blocks].any()
        await life.write(session, again.step.step_id, len(PROMPT))
        report = scheduler_pb2.StepReport(batch=again.batch, token_ids=[7])
        after = await life.call(session, "schedule", scheduler_pb2.ScheduleRequest(reports=[report]))
        assert list(after.sequence_ids) == list(again.sequence_ids)

    asyncio.run(scenario())
    assert quarantined(life) == 2


def test_a_process_that_nobody_can_watch_gets_no_memory_for_writing() -> None:
    """It is in another PID namespace: nobody would notice its end."""
    records: dict[int, bytes] = {}
    writers = Writers("the pool", Records(records, WriterRecord.unpack), lambda _: None)
    hidden: Any = SimpleNamespace(getsockopt=lambda *_: struct.pack("iII", 0, 65534, 65534))
    with pytest.raises(OSError, match="a process may not write to the pool: it is in a PID namespace"):
        writers.add(hidden)
    assert (len(writers), records) == (0, {})


class Full(dict[int, bytes]):
    """No memory is left for a value."""

    def __setitem__(self, key: int, value: bytes) -> None:
        raise ResourceExhaustedError("full")


def test_a_process_of_which_there_is_no_record_gets_no_memory_for_writing(
    tmp_path: Path, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        writers = Writers("the pool", Records(Full(), WriterRecord.unpack), lambda _: None)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "fds"))
        listener.listen()
        listener.setblocking(False)
        server = FdServer(frozenset({os.geteuid()}), lambda *_: None, clock)
        server.listen(listener)
        serving = asyncio.create_task(server.serve())
        num_before = num_open_files()
        token = server.offer([os.open(os.devnull, os.O_RDONLY)], writers, writers.add)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(tmp_path / "fds"))
            connection.send(token)
            connection.setblocking(False)
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
        assert (len(writers), num_open_files()) == (0, num_before)
        serving.cancel()
        server.close()

    asyncio.run(scenario())
    assert caplog.messages == ["memory is not handed over: full"]


# ---- processes


CLIENT = """
import sys
import numpy as np
from kvservice import ops
from kvservice.client import KVClient

prompt, num_written = range(int(sys.argv[2])), int(sys.argv[3])
kv = KVClient(sys.argv[1], transport="mapped").session()
info = kv.info
pool = kv.map_pool(writable=True)
seq = kv.allocate(prompt)
ones = np.ones((info.num_layers, len(prompt), info.num_kv_heads, info.head_size), np.float32)
kv.open_step([seq]).write(ones, ones)
step = kv.append([seq], [9] * num_written, num_tokens=[num_written])
slots = np.array(pool.step(step).slot_mapping)
print("in a step", flush=True)
sys.stdin.readline()
late = np.full((len(slots), info.num_kv_heads, info.head_size), 1e9, np.float32)
for layer in range(info.num_layers):
    ops.write_kv(pool.pool, layer, slots, late, late)
print("written", flush=True)
sys.stdin.read()
"""
FETCHING = """
import mmap, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    connection.send(bytes.fromhex(sys.argv[2]))
    pool, tables = socket.recv_fds(connection, 1, 2)[1]
memory = mmap.mmap(pool, int(sys.argv[3]))
print("mapped", flush=True)
for line in sys.stdin:
    begin, num_bytes = map(int, line.split())
    memory[begin : begin + num_bytes] = b"x" * num_bytes
    print("written", flush=True)
"""


@contextmanager
def process(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def said(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().rstrip()


def tell(running: subprocess.Popen[str], line: str = "") -> None:
    assert running.stdin is not None
    running.stdin.write(line + "\n")
    running.stdin.flush()


def random_kv(kv: Session, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    shape = (kv.info.num_layers, num_tokens, kv.info.num_kv_heads, kv.info.head_size)
    rng = np.random.default_rng(num_tokens)
    return rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32)


def test_a_process_that_was_stopped_in_a_step_changes_no_byte_of_others(tmp_path: Any) -> None:
    """Its session is lost after the time of frozen clients. Others take all blocks but those that it may write."""
    options = SMALL_POOL | {"client_timeout_s": 3, "unix_socket": str(tmp_path / "socket")}
    arguments = str(len(PROMPT)), str(NUM_WRITTEN)
    with (
        Daemon(**options) as daemon,
        KVClient(daemon.address) as client,
        process("-P", "-c", CLIENT, daemon.address, *arguments) as stopped,
        client.session() as kv,
    ):
        assert said(stopped) == "in a step"
        stopped.send_signal(signal.SIGSTOP)
        until(lambda: client.stats().sessions == 1 and client.stats().sequences == 0)
        kv.reset_prefix_cache()
        gauges = client.stats()
        assert (gauges.quarantined_blocks, gauges.free_blocks) == (3, gauges.num_blocks - 3)
        assert f"process {stopped.pid} may still write them" in daemon.log.read_text()
        tokens = range(1000, 1000 + gauges.free_blocks * BLOCK_SIZE)
        sequence, written = kv.allocate(tokens), random_kv(kv, len(tokens))
        kv.open_step([sequence]).write(*written)
        assert client.stats().free_blocks == 0
        stopped.send_signal(signal.SIGCONT)
        tell(stopped)
        assert said(stopped) == "written"
        np.testing.assert_equal(kv.read(sequence, 0, len(tokens)), written)
        assert client.stats().quarantined_blocks == 3
        stopped.kill()
        until(lambda: client.stats().free_blocks == 3)
        assert client.stats().quarantined_blocks == 0


def fetching(daemon: Daemon, session: Any) -> Any:
    """Start a process that maps the pool for writing in a session."""
    present(daemon.address, session.token)
    mapped = session.ok("map_pool", host_pb2.MapPoolRequest(writable=True))
    arguments = fd_socket(daemon.address), mapped.handover_token.hex(), str(mapped.pool_bytes)
    return process("-S", "-c", FETCHING, *arguments)


def in_a_step(session: Any) -> list[int]:
    """Return the blocks that a client may write that is in the middle of a step over a new sequence."""
    one = blocks_pb2.SequenceAllocation(sequence_id=1, token_ids=PROMPT)
    session.ok("allocate", blocks_pb2.AllocateRequest(sequences=[one]))
    session.ok("open_step", blocks_pb2.OpenStepRequest(sequence_ids=[1]))
    request = blocks_pb2.DescribeRequest(sequence_ids=[1], return_block_ids=True)
    return list(session.ok("describe", request).sequences[0].block_ids)


def test_a_process_whose_session_was_taken_over_writes_where_nobody_reads(
    daemon: Daemon, client: KVClient, raw: Any, wire: Any
) -> None:
    raw.await_no_sessions(wire)
    session = raw.RawSession(wire)
    with fetching(daemon, session) as before:
        assert said(before) == "mapped"
        blocks = in_a_step(session)
        kv = client.resume(session.token)
        try:
            (found,) = kv.describe()
            sequence = Sequence(found.sequence_id, found.length)
            written = random_kv(kv, len(PROMPT))
            kv.open_step([sequence]).write(*written)
            for block in blocks:
                tell(before, f"{block * BLOCK_BYTES} {BLOCK_BYTES}")
                assert said(before) == "written"
            np.testing.assert_equal(kv.read(sequence, 0, len(PROMPT)), written)
            assert client.stats().quarantined_blocks == len(blocks)
        finally:
            kv.close()
        assert client.stats().quarantined_blocks == len(blocks)
    until(lambda: client.stats().quarantined_blocks == 0)
    with client.session() as kv:
        kv.reset_prefix_cache()
    assert client.stats().free_blocks == client.stats().num_blocks


@pytest.mark.slow
def test_the_blocks_wait_while_the_daemon_is_killed(raw: Any) -> None:
    with Daemon(keeper=True, **SMALL_POOL | {"session_grace_s": 60}) as daemon:
        wire = raw.Wire(daemon.address)
        session = raw.RawSession(wire)
        with fetching(daemon, session) as stopped:
            assert said(stopped) == "mapped"
            blocks = in_a_step(session)
            next_process(daemon, signal.SIGKILL)  # the process is known to the next one
            wire.unary("close", session_pb2.CloseRequest(session_token=session.token))
            assert stats(wire).quarantined_blocks == len(blocks)
            next_process(daemon, signal.SIGKILL)
            assert stats(wire).quarantined_blocks == len(blocks)
            assert stats(wire).free_blocks == SMALL_POOL["num_blocks"] - len(blocks)
            assert f"{len(blocks)} blocks are in quarantine until process {stopped.pid}" in daemon.log.read_text()
        until(lambda: stats(wire).free_blocks == SMALL_POOL["num_blocks"])
        wire.close()


def stats(wire: Any) -> pool_pb2.GetStatsResponse:
    answer = wire.unary("get_stats", pool_pb2.GetStatsRequest())
    assert not isinstance(answer, Refusal), answer
    found: pool_pb2.GetStatsResponse = answer
    return found
