"""The observer of a real daemon: what it reports, and that its failures do not affect the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from footprint import children, open_files
from grpc_status import rpc_status
from raw_wire import refusal
from scraping import POOL, compute, exposition, scrape, scrape_until, value
from small_pool import SMALL_POOL
from waiting import PATIENCE_S, until

from kvservice.client import KVClient
from kvservice.errors import OutOfBlocksError
from kvservice.launch import Daemon, StartError
from kvservice.server import observing
from kvservice.server.observing import Observing
from kvservice.telemetry.arrays import SharedArrays
from kvservice.telemetry.link import WRITE_STATS
from kvservice.top import source as top_source
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon without HTTP."""
    with Daemon(**POOL) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[KVClient]:
    with KVClient(daemon.address) as connected:
        yield connected


def get_snapshot(daemon: Daemon, timeout_s: float = 60.0, **request: Any) -> inspect_pb2.Snapshot:
    with grpc.insecure_channel(daemon.address) as channel:
        stub: Any = inspect_pb2_grpc.InspectServiceStub(channel)
        answer: inspect_pb2.Snapshot = stub.GetSnapshot(inspect_pb2.GetSnapshotRequest(**request), timeout=timeout_s)
        return answer


def snapshot_when_there_is_one(daemon: Daemon, **request: Any) -> inspect_pb2.Snapshot:
    """Return a snapshot, with retries. The call that detects the end of the observer is refused; later calls wait for
    the new observer."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return get_snapshot(daemon, **request)
        except grpc.RpcError as error:
            if refusal_of(error).reason != "OBSERVER_UNAVAILABLE" or time.monotonic() > deadline:
                raise


def observer_of(daemon: Daemon) -> int:
    (pid,) = children(daemon.process.pid)
    return pid


def has_ended(pid: int) -> bool:
    """Return whether the process has ended, also if its parent has not waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def can_listen(port: int) -> bool:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_the_observer_is_started_when_somebody_asks(daemon: Daemon, client: KVClient) -> None:
    client.stats()
    assert children(daemon.process.pid) == []
    get_snapshot(daemon)
    observer = observer_of(daemon)
    get_snapshot(daemon)
    assert children(daemon.process.pid) == [observer]


def test_the_observer_can_only_read_and_comes_last(daemon: Daemon) -> None:
    get_snapshot(daemon)
    observer = observer_of(daemon)
    mappings = [line for line in Path(f"/proc/{observer}/maps").read_text().splitlines() if "memfd:kvservice-" in line]
    assert mappings
    assert {line.split()[1] for line in mappings} == {"r--s"}
    assert {"memfd:kvservice-arrays" in line for line in mappings} == {True}, "and nothing private"
    for descriptor in Path(f"/proc/{observer}/fd").iterdir():
        if "memfd:kvservice-" in os.readlink(descriptor):
            assert "memfd:kvservice-arrays" in os.readlink(descriptor)
            flags = Path(f"/proc/{observer}/fdinfo/{descriptor.name}").read_text().split("flags:")[1].split()[0]
            assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY
    assert os.getpriority(os.PRIO_PROCESS, observer) == os.getpriority(os.PRIO_PROCESS, daemon.process.pid) + 10


def test_a_snapshot_agrees_with_the_daemons_figures(daemon: Daemon, client: KVClient) -> None:
    with client.session("engine", tenant="acme") as kv, client.session("idle") as other:
        first = compute(kv, list(range(8)))
        second = compute(kv, [0, 1, 2, 3, 50, 51])
        kv.append([kv.fork(second)], [7])
        kv.swap_out([first])
        kv.pin(list(range(4)), ttl_s=60)
        kv.free([second])
        with pytest.raises(OutOfBlocksError):
            other.allocate(list(range(33)))

        found, stats = get_snapshot(daemon), client.stats()
        pool = {name: getattr(found.pool, name) for name in vars(stats) if hasattr(found.pool, name)}
        assert len(pool) == 12
        assert pool == {name: vars(stats)[name] for name in pool}
        assert not found.pool.draining
        engine, idle = sorted(found.sessions, key=lambda session: session.session_id)
        assert (engine.session_id, engine.name, engine.tenant, engine.attached) == (
            kv.session_id,
            "engine",
            "acme",
            True,
        )
        assert (engine.sequences, engine.swapped_sequences, engine.tokens, engine.blocks) == (2, 1, 15, 4)
        assert (engine.computed_tokens, engine.query_tokens, engine.hit_tokens) == (10, 14, 4)
        assert (idle.name, idle.tenant, idle.sequences, idle.tokens, idle.blocks) == ("idle", "", 0, 0, 0)
        rows = {row.sequence_id: row for row in found.sequences}
        assert set(rows) == {info.sequence_id for info in kv.describe()}
        for info in kv.describe():
            row = rows[info.sequence_id]
            assert (row.session_id, row.session_name) == (kv.session_id, "engine")
            assert (row.length, row.computed) == (info.length, info.num_computed_tokens)
            assert (row.blocks, row.swapped) == (info.num_blocks, info.swapped)
        calls = {call.method: call for call in found.calls}
        assert (calls["allocate"].calls, calls["allocate"].errors) == (3, 1)
        assert (calls["swap_out"].calls, calls["swap_out"].errors) == (1, 0)
        assert "truncate" not in calls
        assert (found.num_sessions, found.num_sequences) == (2, 2)
        assert abs(found.time_s - time.time()) < 60
        assert 0 < found.uptime_s < 600


def test_rates_are_of_what_was_done_lately(daemon: Daemon, client: KVClient) -> None:
    get_snapshot(daemon)
    with client.session() as kv:
        while get_snapshot(daemon).rates.calls == 0:
            kv.free([compute(kv, list(range(8)))])
        found = get_snapshot(daemon)
        assert 0 < found.rates.window_s < 60
        assert found.rates.query_tokens > 0
        assert found.rates.hit_share == pytest.approx(found.rates.hit_tokens / found.rates.query_tokens)
        writes = next(call for call in found.calls if call.method == "write")
        assert writes.calls > 0
        assert 0 <= writes.p50_s <= writes.p99_s


def test_rows_are_bounded_and_searched(daemon: Daemon, client: KVClient) -> None:
    with client.session("Engine", tenant="acme") as one, client.session("batch", tenant="zeta") as two:
        for kv, lengths in ((one, (4, 16)), (two, (8,))):
            for length in lengths:
                kv.allocate([length] * length, sequence_id=5000 + length)

        def rows(**request: Any) -> tuple[list[str], list[int], int, int]:
            found = get_snapshot(daemon, **request)
            sessions = [session.name for session in found.sessions]
            return (
                sessions,
                [row.sequence_id - 5000 for row in found.sequences],
                found.num_sessions,
                found.num_sequences,
            )

        # Rows with the most blocks come first.
        assert rows() == (["Engine", "batch"], [16, 8, 4], 2, 3)
        assert rows(max_sessions=1, max_sequences=2) == (["Engine"], [16, 8], 2, 3)
        assert rows(max_sessions=1000, max_sequences=1000) == rows()
        assert rows(search="eNGi") == (["Engine"], [16, 4], 1, 2)
        assert rows(search="zeta") == (["batch"], [8], 1, 1)
        assert rows(search=str(two.session_id), max_sequences=1)[:2] == (["batch"], [8])
        assert rows(search="5016") == ([], [16], 0, 1)
        assert rows(search="nobody") == ([], [], 0, 0)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("max_sessions", -1),
        ("max_sequences", -1),
        ("max_sessions", 1001),
        ("max_sequences", 2**31 - 1),
        ("search", "x" * 1000),
    ],
)
def test_wrong_arguments_are_refused(daemon: Daemon, field: str, wrong: Any) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        get_snapshot(daemon, **{field: wrong})
    told = refusal_of(refused.value)
    assert (told.code, told.field) == ("INVALID_ARGUMENT", field)
    assert children(daemon.process.pid) == []


def refusal_of(error: Any) -> Any:
    return refusal(rpc_status.from_call(error))


def test_a_killed_observer_is_replaced_and_goes_on_where_it_was(free_port: int) -> None:
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon,
        KVClient(daemon.address) as client,
        client.session("engine", tenant="acme") as kv,
    ):
        compute(kv, list(range(10)))
        before = scrape(free_port)
        first = observer_of(daemon)
        os.kill(first, signal.SIGKILL)
        kv.free([compute(kv, [1, 2, 3])])
        after = scrape(free_port)  # waits in the socket's queue for the next observer
        assert value(before, "kvservice_computed_tokens_total") == 10
        assert value(after, "kvservice_computed_tokens_total") == 13
        assert value(after, "kvservice_tenant_computed_tokens_total", tenant="acme") == 13
        frees = {"method": "free", "status": "OK", "transport": "stream"}
        assert value(after, "kvservice_rpc_duration_seconds_count", **frees) == 1
        assert [session.name for session in get_snapshot(daemon).sessions] == ["engine"]
        assert observer_of(daemon) != first
        os.kill(observer_of(daemon), signal.SIGKILL)
        assert snapshot_when_there_is_one(daemon).pool.tokens == 10
        assert "the observer has ended" in daemon.log.read_text()


def test_restarts_of_the_observer_leave_nothing(free_port: int) -> None:
    with Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon:
        pid = daemon.process.pid

        def kill_and_look() -> None:
            os.kill(observer_of(daemon), signal.SIGKILL)
            until(lambda: children(pid) == [])
            exposition(free_port)

        kill_and_look()
        before = open_files(pid)
        for _ in range(3):
            kill_and_look()
        until(lambda: open_files(pid) == before)
        assert len(children(pid)) == 1


def test_a_frozen_observer_holds_neither_calls_nor_the_daemons_end(daemon: Daemon, client: KVClient) -> None:
    with client.session() as kv:
        get_snapshot(daemon)
        observer = observer_of(daemon)
        os.kill(observer, signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(grpc.RpcError) as given_up:
                get_snapshot(daemon, timeout_s=0.2)
            assert given_up.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        kv.free([compute(kv, list(range(8)))])
        assert client.stats().sessions == 1
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(20) == 0  # the drain time is 30 s
    assert "still busy" not in daemon.log.read_text()
    assert has_ended(observer)


def test_a_call_does_not_wait_for_ever_for_a_frozen_observer(daemon: Daemon) -> None:
    get_snapshot(daemon)
    os.kill(observer_of(daemon), signal.SIGSTOP)
    with pytest.raises(grpc.RpcError) as refused:
        get_snapshot(daemon)
    told = refusal_of(refused.value)
    assert (told.code, told.reason) == ("UNAVAILABLE", "OBSERVER_UNAVAILABLE")
    assert "does not answer; if it makes no request for 20 s, another is started" in str(refused.value)
    assert daemon.log.read_text().count("the observer does not answer for 4 s") == 1
    os.kill(observer_of(daemon), signal.SIGCONT)
    with KVClient(daemon.address) as client, client.session("later"):
        # The response to the abandoned request is not used for another one.
        found = snapshot_when_there_is_one(daemon, search="later")
        assert [session.name for session in found.sessions] == ["later"]


def test_top_waits_for_longer_than_the_daemon() -> None:
    assert observing.ANSWER_S < top_source.TIMEOUT_S
    assert observing.FIRST_ANSWER_S < top_source.START_TIMEOUT_S


class FrozenObservers(Observing):
    """Its observers start and then do nothing. `others` has the ends of their links."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        super().__init__(SharedArrays(), {}, lambda: None, lambda _: b"", sleep)
        self.started: list[subprocess.Popen[bytes]] = []
        self.others: list[tuple[socket.socket, socket.socket]] = []

    def _start(self, asking: socket.socket, answering: socket.socket) -> subprocess.Popen[bytes]:
        self.others.append((asking.dup(), answering.dup()))
        self.started.append(subprocess.Popen(["sleep", "1000"]))
        return self.started[-1]


@pytest.mark.parametrize("configured", [False, True], ids=["from the start", "later"])
def test_a_frozen_observer_is_killed_and_replaced(caplog: pytest.LogCaptureFixture, configured: bool) -> None:
    slept: list[float] = []
    limit_s = observing.SILENT_S if configured else observing.STARTING_S

    async def run() -> None:
        async def sleep(seconds: float) -> None:
            slept.append(seconds)
            await asyncio.sleep(0)

        watched = FrozenObservers(sleep)
        if configured:
            watched._ready.set()
        watched._wanted.set()
        running = asyncio.create_task(watched.run())
        async with asyncio.timeout(PATIENCE_S):
            while len(slept) < limit_s + 3:  # the pause before the restart, then seconds of the second one
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert [process.returncode for process in watched.started] == [-signal.SIGKILL] * 2
        for end in itertools.chain(*watched.others):
            end.close()

    asyncio.run(run())
    assert slept[:limit_s] == [1.0] * limit_s
    expected = f"the observer has made no request for {limit_s} s and is killed; another is started"
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_an_observer_that_makes_requests_is_kept() -> None:
    async def run() -> None:
        watched = FrozenObservers(asyncio.sleep)
        watched._ready.set()
        watched._silent_s = observing.SILENT_S - 1
        await watched._answer(WRITE_STATS)
        assert watched._silent_s == 0

    asyncio.run(run())


def test_an_observer_that_cannot_be_started_is_started_later(daemon: Daemon, client: KVClient) -> None:
    client.stats()
    pid = daemon.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    with grpc.insecure_channel(daemon.address) as channel:
        grpc.channel_ready_future(channel).result(20)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
        stub: Any = inspect_pb2_grpc.InspectServiceStub(channel)
        waiting = stub.GetSnapshot.future(inspect_pb2.GetSnapshotRequest(), timeout=60)
        until(lambda: "the observer cannot be started" in daemon.log.read_text())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert waiting.result().pool.num_blocks == 8
    client.ping()


def test_the_observer_ends_with_a_daemon_that_is_killed(free_port: int) -> None:
    """Waiting fails if the observer lives on."""
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon,
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/api/stream", timeout=20) as stream,
    ):
        stream.readline()  # a client is connected
        observer = observer_of(daemon)
        daemon.process.kill()
        daemon.process.wait()
        until(lambda: has_ended(observer))
        until(lambda: can_listen(free_port))  # other threads can outlive the main one and keep sockets open


def test_an_observer_whose_daemon_ended_before_it_was_ready_ends_quietly() -> None:
    memory = os.memfd_create("empty")
    pairs = socket.socketpair(), socket.socketpair()
    for ours, _ in pairs:
        ours.close()
    descriptors = [memory, *(theirs.fileno() for _, theirs in pairs)]
    command = [sys.executable, "-P", "-m", "kvservice.observer", *map(str, descriptors)]
    done = subprocess.run(command, pass_fds=descriptors, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    os.close(memory)
    for _, theirs in pairs:
        theirs.close()


def test_while_it_drains_the_daemon_still_tells(free_port: int) -> None:
    options = SMALL_POOL | {"http_address": f"127.0.0.1:{free_port}"}
    with Daemon(**options) as daemon, KVClient(daemon.address, transport="inline") as client, client.session() as kv:
        step = kv.open_step([kv.allocate([1, 2])])
        ones = np.ones((2, 2, 32), np.float32)
        step.extend(0, ones, ones, ones)
        assert value(scrape(free_port), "kvservice_draining") == 0
        daemon.process.send_signal(signal.SIGTERM)
        samples = scrape_until(free_port, lambda found: value(found, "kvservice_draining") == 1)
        assert value(samples, "kvservice_tokens") == 2
        assert get_snapshot(daemon).pool.draining
        step.extend(1, ones, ones, ones)
        assert daemon.process.wait(20) == 0


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with (
            pytest.raises(StartError, match=f"http_address: cannot listen on {address}"),
            Daemon(http_address=address, **POOL),
        ):
            pass


def test_it_listens_on_ipv6() -> None:
    with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError as error:
            pytest.skip(f"there is no IPv6 here: {error}")
        port = probe.getsockname()[1]
    with Daemon(http_address=f"[::1]:{port}", **POOL):
        for path in ("/metrics", "/"):
            with urllib.request.urlopen(f"http://[::1]:{port}{path}", timeout=20) as answer:
                assert answer.status == 200
