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
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from each_row import each_row
from footprint import children, open_files
from grpc_status import rpc_status
from raw_wire import refusal
from scraping import POOL, compute, exposition, scrape, scrape_until, value
from small_pool import SMALL_POOL
from waiting import PATIENCE_S, until

from kvservice.client import KVClient, Session
from kvservice.errors import OutOfBlocksError
from kvservice.launch import Daemon, StartError
from kvservice.server.watching import observing
from kvservice.server.watching.observing import Observing
from kvservice.v1 import inspect_pb2, inspect_pb2_grpc


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon without HTTP, whose observer runs after the first test that asks for a snapshot."""
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


LAST_PRIORITY = 19
WRONG_ARGUMENTS: list[tuple[str, Any]] = [
    ("max_sessions", -1),
    ("max_sequences", -1),
    ("max_sessions", 1001),
    ("max_sequences", 2**31 - 1),
    ("search", "x" * 1000),
]


def test_the_observer_is_started_when_somebody_asks_for_what_it_can_answer() -> None:
    with Daemon(**POOL) as daemon, KVClient(daemon.address) as client, client.session("engine", tenant="acme") as kv:
        client.stats()
        with each_row() as row:
            for field, wrong in WRONG_ARGUMENTS:
                with row(f"{field}={str(wrong)[:20]}"):
                    with pytest.raises(grpc.RpcError) as refused:
                        get_snapshot(daemon, **{field: wrong})
                    told = refusal_of(refused.value)
                    assert (told.code, told.field) == ("INVALID_ARGUMENT", field)
        assert children(daemon.process.pid) == []
        with client.session("idle") as other:
            check_a_snapshot(daemon, client, kv, other)
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
    daemons = os.getpriority(os.PRIO_PROCESS, daemon.process.pid)
    assert os.getpriority(os.PRIO_PROCESS, observer) == min(daemons + 10, LAST_PRIORITY)


def check_a_snapshot(daemon: Daemon, client: KVClient, kv: Session, other: Session) -> None:
    """Compare all figures of a daemon that nobody else has used yet."""
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
    assert len(pool) == 13
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


def refusal_of(error: Any) -> Any:
    return refusal(rpc_status.from_call(error))


def test_a_killed_observer_is_replaced_goes_on_where_it_was_and_leaves_nothing(free_port: int) -> None:
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon,
        KVClient(daemon.address) as client,
        client.session("engine", tenant="acme") as kv,
    ):
        compute(kv, list(range(10)))
        before = scrape(free_port)
        first = observer_of(daemon)
        files = open_files(daemon.process.pid)
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
        os.kill(observer_of(daemon), signal.SIGKILL)
        until(lambda: children(daemon.process.pid) == [])
        exposition(free_port)
        until(lambda: open_files(daemon.process.pid) == files)
        assert len(children(daemon.process.pid)) == 1


def test_a_frozen_observer_holds_neither_calls_nor_the_daemons_end() -> None:
    with Daemon(**POOL) as daemon, KVClient(daemon.address) as client:
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
        with pytest.raises(grpc.RpcError) as refused:
            get_snapshot(daemon)
        told = refusal_of(refused.value)
        assert (told.code, told.reason) == ("UNAVAILABLE", "OBSERVER_UNAVAILABLE")
        assert "does not answer; if it makes no request for 20 s, another is started" in str(refused.value)
        assert daemon.log.read_text().count("the observer does not answer for 4 s") == 1
        os.kill(observer, signal.SIGCONT)
        with client.session("later"):
            # The response to the abandoned request is not used for another one.
            found = snapshot_when_there_is_one(daemon, search="later")
            assert [session.name for session in found.sessions] == ["later"]
        # A call that was cut off is not counted as answered.
        (counted,) = [call for call in found.calls if call.method == "get_snapshot"]
        assert (counted.calls, counted.errors) == (4, 3)
        os.kill(observer, signal.SIGSTOP)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(20) == 0  # the drain time is 30 s
        assert "still busy" not in daemon.log.read_text()
        assert has_ended(observer)


class Inspected(inspect_pb2_grpc.InspectServiceServicer):
    """A daemon without a pool. `left_s` has how long the caller of each request would wait for the answer."""

    def __init__(self) -> None:
        self.left_s: list[float] = []

    def GetSnapshot(self, _: Any, context: grpc.ServicerContext) -> inspect_pb2.Snapshot:  # noqa: N802  gRPC's name
        self.left_s.append(context.time_remaining())
        return inspect_pb2.Snapshot()


def test_top_waits_for_longer_than_the_daemon(tmp_path: Path) -> None:
    """The first answer may take longer, because the observer is started for it."""
    inspected = Inspected()
    server = grpc.server(ThreadPoolExecutor(1))
    inspect_pb2_grpc.add_InspectServiceServicer_to_server(inspected, server)
    address = f"unix:{tmp_path}/socket"
    server.add_insecure_port(address)
    server.start()
    ours, theirs = os.openpty()
    command = [sys.executable, "-P", "-m", "kvservice", "top", "--address", address, "--interval", "0.1"]
    environ = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environ) as process:
        try:
            until(lambda: len(inspected.left_s) > 2 or process.poll() is not None)
            assert len(inspected.left_s) > 2, process.communicate()
        finally:
            process.kill()
            for end in (ours, theirs):
                os.close(end)
            server.stop(None).wait()
    first, *later = inspected.left_s
    assert first > observing.FIRST_ANSWER_S
    assert min(later) > observing.ANSWER_S


class Observers(Observing):
    """Its observers are processes that do nothing, and the test makes and answers their requests over the links:
    `links` has the sockets of each observer for its questions and its answers."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        nothing: Any = None
        super().__init__(nothing, {}, lambda: None, lambda _: b"", sleep)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.links: list[tuple[socket.socket, socket.socket]] = []

    def start_process(self, asking: socket.socket, answering: socket.socket) -> subprocess.Popen[bytes]:
        self.links.append((asking.dup(), answering.dup()))
        self.processes.append(subprocess.Popen(["sleep", "1000"]))
        return self.processes[-1]

    def read_answers(self) -> bytes:
        """Return what the daemon has answered the latest observer."""
        with contextlib.suppress(BlockingIOError):
            return self.links[-1][0].recv(100, socket.MSG_DONTWAIT)
        return b""


@contextlib.asynccontextmanager
async def running(observers: Observers) -> AsyncIterator[None]:
    """Start the first observer."""
    asked = asyncio.create_task(observers.snapshot(b""))
    run = asyncio.create_task(observers.run())
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield
    finally:
        for task in (asked, run):
            task.cancel()
        await asyncio.gather(asked, run, return_exceptions=True)
        for end in itertools.chain(*observers.links):
            end.close()


async def configured(observers: Observers) -> None:
    """Let the latest observer take its configuration, as it does when it has started."""
    answering = observers.links[-1][1]
    answering.setblocking(False)
    question = await asyncio.get_running_loop().sock_recv(answering, 1000)
    assert question[4:5] == b"c"
    answering.send(frame(b"\0"))
    # The daemon now asks for the snapshot.
    assert (await asyncio.get_running_loop().sock_recv(answering, 1000))[4:5] == b"s"


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


@pytest.mark.parametrize("has_started", [False, True], ids=["from the start", "later"])
def test_a_frozen_observer_is_killed_and_replaced(caplog: pytest.LogCaptureFixture, has_started: bool) -> None:
    slept: list[float] = []
    may_pass = asyncio.Event()
    limit_s = observing.SILENT_S if has_started else observing.STARTING_S

    async def sleep(seconds: float) -> None:
        await may_pass.wait()
        slept.append(seconds)
        await asyncio.sleep(0)

    async def run() -> None:
        observers = Observers(sleep)
        async with running(observers):
            while not observers.links:
                await asyncio.sleep(0)
            if has_started:
                await configured(observers)
            may_pass.set()
            while len(slept) < limit_s + 3:  # the pause before the restart, then seconds of the second one
                await asyncio.sleep(0)
        assert [process.returncode for process in observers.processes] == [-signal.SIGKILL] * 2

    asyncio.run(run())
    assert slept[:limit_s] == [1.0] * limit_s
    expected = f"the observer has made no request for {limit_s} s and is killed; another is started"
    assert [record.getMessage() for record in caplog.records] == [expected]


def test_an_observer_that_makes_requests_is_kept() -> None:
    slept: list[float] = []
    observers: Observers

    async def sleep(seconds: float) -> None:
        """Make a request in the last second of the time that an observer has."""
        slept.append(seconds)
        if len(slept) % (observing.SILENT_S - 1) == 0:
            observers.links[-1][0].send(frame(b"w"))
            while not observers.read_answers():
                await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def run() -> None:
        nonlocal observers
        observers = Observers(sleep)
        async with running(observers):
            while not observers.links:
                await asyncio.sleep(0)
            await configured(observers)
            while len(slept) < 4 * observing.SILENT_S:
                await asyncio.sleep(0)
            assert len(observers.processes) == 1

    asyncio.run(run())


def test_an_observer_that_cannot_be_started_is_started_later() -> None:
    with Daemon(**POOL) as daemon, grpc.insecure_channel(daemon.address) as channel:
        pid = daemon.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        grpc.channel_ready_future(channel).result(20)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), limits[1]))
        stub: Any = inspect_pb2_grpc.InspectServiceStub(channel)
        waiting = stub.GetSnapshot.future(inspect_pb2.GetSnapshotRequest(), timeout=60)
        until(lambda: "the observer cannot be started" in daemon.log.read_text())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        assert waiting.result().pool.num_blocks == 8


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


def test_the_port_of_a_killed_daemon_is_free_again(free_port: int) -> None:
    """A client of the observer is connected, and the observer ends."""
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon,
        urllib.request.urlopen(f"http://127.0.0.1:{free_port}/api/stream", timeout=20) as stream,
    ):
        stream.readline()
        observer = observer_of(daemon)
        daemon.process.kill()
        daemon.process.wait()
        until(lambda: has_ended(observer))
        until(lambda: can_listen(free_port))  # other threads can outlive the main one and keep sockets open


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
