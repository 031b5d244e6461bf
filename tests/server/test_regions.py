"""Shared memory regions: the rules of Triton, concurrent changes of the object by its client, and the lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import itertools
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shm_objects import shm_objects
from small_pool import SMALL_POOL
from waiting import until

from kvservice.blocks import Slices
from kvservice.blocks.slices import finish
from kvservice.client import KVClient
from kvservice.config import ServeConfig
from kvservice.errors import (
    DuplicateRegionError,
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    QuotaExceededError,
    RegionNotOpenedError,
    RegionShrunkError,
    RegionsNotAllowedError,
    UnknownRegionError,
)
from kvservice.launch import Daemon
from kvservice.pool import sealed
from kvservice.server.attention_calls import AttentionCalls
from kvservice.server.budget import Budget, BudgetedMemory
from kvservice.server.clock import SystemClock
from kvservice.server.region import GPU, HOST, Place, RegionTotals
from kvservice.server.regions import Regions
from kvservice.server.session_user import SessionUser, Trust
from kvservice.server.shm_object import ShmObject
from kvservice.v1 import attention_pb2, session_pb2, shared_memory_pb2, tensor_pb2

OBJECT_BYTES = 1 << 16
CONFIG = ServeConfig(max_regions=3, max_region_mib=1, max_shared_mib=2)
# A command of fcntl(2).
F_SETSIG = 10
PREFIX = f"/dev/shm/kvservice-test-{os.getpid()}"
Register = shared_memory_pb2.SystemSharedMemoryRegisterRequest
Status = shared_memory_pb2.SystemSharedMemoryStatusRequest
Unregister = shared_memory_pb2.SystemSharedMemoryUnregisterRequest


class Object:
    """A shared memory object of a client, with varying bytes."""

    serial = itertools.count()

    def __init__(self) -> None:
        self.key = f"{Path(PREFIX).name}-{next(self.serial)}"
        self.path = Path("/dev/shm", self.key)
        self.content = np.random.default_rng(1).integers(0, 256, OBJECT_BYTES, np.uint8).tobytes()
        self.path.write_bytes(self.content)


class Access:
    """A replacement for HostAccess with the methods that regions use."""

    def __init__(self, config: ServeConfig = CONFIG) -> None:
        self.numbers: list[int] = []
        self.offered: list[Any] = []
        self.budget = Budget(config.max_shared_mib)
        self.user = SessionUser(Trust.of(config), SystemClock())

    def make_memory(self, name: str, num_bytes: int, field: str) -> Slices[BudgetedMemory]:
        return self.budget.make_in_slices(name, num_bytes, field=field)

    def add_region(self, address: int, num_bytes: int) -> int:
        assert address % mmap.PAGESIZE == 0
        assert num_bytes > 0
        self.numbers.append(len(self.numbers) + 1)
        return self.numbers[-1]

    def remove_region(self, number: int) -> None:
        self.numbers.remove(number)

    def hand_over(self, memory: Any) -> bytes:
        self.offered.append(memory.sealed)
        return b"token"

    def withdraw(self, token: bytes) -> None:
        assert token == b"token"


@pytest.fixture
def shm() -> Iterator[Object]:
    made = Object()
    yield made
    made.path.unlink(missing_ok=True)


@pytest.fixture
def totals() -> RegionTotals:
    return RegionTotals()


@pytest.fixture
def regions(totals: RegionTotals) -> Iterator[Regions]:
    access = Access()
    made = Regions(CONFIG, totals, access)  # type: ignore[arg-type]
    yield made
    made.close()
    assert not shm_files()
    assert access.budget.used_bytes == 0
    assert (totals.count, totals.num_bytes) == (0, 0)


def num_descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def open_files(pid: int | str, *prefixes: str) -> set[str]:
    """Return the open files of a process with these prefixes. It is a set, because mmap duplicates descriptors."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            path = os.readlink(descriptor)
            if path.startswith(prefixes):
                found.add(f"{path} {descriptor.stat().st_ino}")
    return found


def shm_files() -> set[str]:
    """Return the objects of these tests that this process has open."""
    return open_files("self", PREFIX)


def region_files(pid: int) -> set[str]:
    """Return the region files that a daemon has open."""
    return open_files(pid, "/dev/shm/", "/memfd:kvservice-region")


# ---- a session's regions


@pytest.mark.parametrize(("slash", "offset", "byte_size"), [("", 0, OBJECT_BYTES), ("/", 4096, 4096), ("/", 7, 1)])
def test_what_is_read_is_what_the_client_wrote(
    regions: Regions, shm: Object, slash: str, offset: int, byte_size: int
) -> None:
    regions.register("r", slash + shm.key, offset, byte_size)
    assert regions.read(Place("r", 0, byte_size), "x").tobytes() == shm.content[offset : offset + byte_size]
    assert regions.read(Place("r", byte_size - 1, 1), "x").tobytes() == shm.content[offset + byte_size - 1 :][:1]
    found = regions.status("r", HOST)["r"]
    assert (found.key, found.offset, found.byte_size) == (slash + shm.key, offset, byte_size)


def test_what_is_written_is_where_it_should_be_and_nowhere_else(regions: Regions, shm: Object) -> None:
    regions.register("r", shm.key, 1000, 500)
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T
    with regions.target(Place("r", 100, 200), "x") as target:
        assert target.put(array) == Place("r", 100, 96)
    wanted = bytearray(shm.content)
    wanted[1100:1196] = array.tobytes()
    assert shm.path.read_bytes() == bytes(wanted)


def test_an_output_larger_than_its_place(regions: Regions, shm: Object) -> None:
    regions.register("r", shm.key, 0, 100)
    with regions.target(Place("r", 0, 95), "out") as target, pytest.raises(InvalidArgumentError) as caught:
        target.put(np.zeros(24, np.float32))
    assert caught.value.field == "out.byte_size"
    assert shm.path.read_bytes() == shm.content


def test_a_session_may_have_so_many(regions: Regions, shm: Object) -> None:
    for name in "abc":
        regions.register(name, shm.key, 0, 64)
    with pytest.raises(QuotaExceededError) as caught:
        regions.register("d", shm.key, 0, 64)
    assert caught.value.metadata["limit"] == "max_regions"
    regions.unregister("b", HOST)
    regions.register("d", shm.key, 0, 64)
    assert regions.status("", HOST).keys() == {"a", "c", "d"}


def test_unregistering_what_is_not_there_is_no_error(regions: Regions, shm: Object) -> None:
    regions.unregister("none", HOST)
    regions.unregister("", HOST)
    regions.register("r", shm.key, 0, 64)
    regions.unregister("none", HOST)
    assert regions.status("", HOST).keys() == {"r"}
    regions.unregister("", HOST)
    assert regions.status("", HOST) == {}
    with pytest.raises(UnknownRegionError):
        regions.read(Place("r", 0, 1), "x")


def test_an_object_that_is_unlinked_stays(regions: Regions, shm: Object) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    shm.path.unlink()
    assert regions.read(Place("r", 0, OBJECT_BYTES), "x").tobytes() == shm.content


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_shared_memory_is_not_opened(regions: Regions, make: Callable[[Path], object]) -> None:
    path = Path("/dev/shm", f"kvservice-test-{os.getpid()}-odd")
    make(path)
    before = num_descriptors()
    try:
        with pytest.raises(RegionNotOpenedError) as caught:
            regions.register("r", path.name, 0, 1)
    finally:
        (os.rmdir if path.is_dir() else os.unlink)(path)
    assert caught.value.field == "key"
    assert num_descriptors() == before


@pytest.fixture
def leased() -> Iterator[Path]:
    """An object whose owner has a lease on it and never releases it."""
    path = Path(f"{PREFIX}-leased")
    path.write_bytes(bytes(OBJECT_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # The signal that reports a conflicting open to the owner; SIGURG is ignored by default.
        fcntl.fcntl(descriptor, F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        yield path
    finally:
        os.close(descriptor)
        path.unlink()


def test_an_object_with_a_lease_keeps_nobody_waiting(regions: Regions, leased: Path) -> None:
    with pytest.raises(RegionNotOpenedError, match="Resource temporarily unavailable"):
        regions.register("r", leased.name, 0, 1)


@pytest.mark.parametrize(("offset", "byte_size"), [(OBJECT_BYTES, 1), (0, OBJECT_BYTES + 1), (0, 0)])
def test_a_refused_registration_leaves_nothing_open(regions: Regions, shm: Object, offset: int, byte_size: int) -> None:
    before = num_descriptors()
    with pytest.raises(InvalidArgumentError):
        regions.register("r", shm.key, offset, byte_size)
    assert num_descriptors() == before
    assert regions.status("", HOST) == {}


def test_a_daemon_that_takes_none(shm: Object) -> None:
    config = ServeConfig(allow_client_shm="off")
    regions = Regions(config, RegionTotals(), Access(config))  # type: ignore[arg-type]
    calls: list[Callable[[], object]] = [
        lambda: regions.register("r", shm.key, 0, 1),
        lambda: regions.unregister("", HOST),
        lambda: regions.status("", HOST),
        lambda: regions.read(Place("r", 0, 1), "x"),
    ]
    for call in calls:
        with pytest.raises(RegionsNotAllowedError, match="allow-client-shm"):
            call()


# ---- regions that the daemon makes


def test_a_region_that_the_daemon_makes(regions: Regions, totals: RegionTotals) -> None:
    token, number = finish(regions.create_in_slices("made", 5000))
    assert (token, number) == (b"token", 1)
    byte_size = 2 * mmap.PAGESIZE
    assert (totals.count, totals.num_bytes) == (1, byte_size)
    made = regions.status("", HOST)["made"]
    assert (made.byte_size, made.key, made.offset) == (byte_size, "", 0)
    array = np.arange(100, dtype=np.float32)
    with regions.target(Place("made", byte_size - 400, 400), "x") as target:
        target.put(array)
    assert regions.read(Place("made", byte_size - 400, 400), "x").tobytes() == array.tobytes()
    with pytest.raises(InvalidArgumentError):
        regions.read(Place("made", byte_size - 399, 400), "x")
    with pytest.raises(PermissionError):
        os.ftruncate(regions._access.offered[0].fd, 0)  # type: ignore[attr-defined]


def test_a_session_may_have_so_much_made(regions: Regions) -> None:
    finish(regions.create_in_slices("a", 700 << 10))
    with pytest.raises(QuotaExceededError) as caught:
        finish(regions.create_in_slices("b", 400 << 10))
    assert caught.value.metadata["limit"] == "max_region_mib"
    with pytest.raises(InvalidArgumentError):
        finish(regions.create_in_slices("b", 0))
    regions.unregister("a", HOST)
    finish(regions.create_in_slices("b", 1 << 20))
    assert regions._access.numbers == [1]  # type: ignore[attr-defined]
    regions.close()
    assert regions._access.numbers == []  # type: ignore[attr-defined]


@pytest.fixture
def slow_regions(monkeypatch: pytest.MonkeyPatch) -> tuple[Regions, Access]:
    """Regions whose memory is allocated page by page."""
    monkeypatch.setattr(sealed, "SLICE_BYTES", mmap.PAGESIZE)
    access = Access()
    return Regions(CONFIG, RegionTotals(), access), access  # type: ignore[arg-type]


def test_a_region_is_made_in_slices(slow_regions: tuple[Regions, Access]) -> None:
    regions, access = slow_regions
    slices = regions.create_in_slices("made", 3 * mmap.PAGESIZE - 1)
    for _ in range(2):
        next(slices)
        assert access.budget.used_bytes == 3 * mmap.PAGESIZE, "all of it counts"
        assert regions.status("", HOST) == {}
    with pytest.raises(QuotaExceededError):
        finish(regions.create_in_slices("other", CONFIG.max_region_mib << 20))
    assert finish(slices) == (b"token", 1)
    assert list(regions.status("", HOST)) == ["made"]


def test_a_region_whose_session_closes_its_own_meanwhile_is_not_made(slow_regions: tuple[Regions, Access]) -> None:
    regions, access = slow_regions
    descriptors = len(os.listdir("/proc/self/fd"))
    slices = regions.create_in_slices("made", 2 * mmap.PAGESIZE)
    next(slices)
    regions.close()
    with pytest.raises(FailedPreconditionError):
        finish(slices)
    slices = regions.create_in_slices("twice", 2 * mmap.PAGESIZE)
    next(slices)
    finish(regions.create_in_slices("twice", 1))
    with pytest.raises(DuplicateRegionError):
        finish(slices)
    regions.unregister("twice", HOST)
    abandoned = regions.create_in_slices("abandoned", 2 * mmap.PAGESIZE)
    next(abandoned)
    abandoned.close()
    assert access.budget.used_bytes == 0
    assert access.numbers == []
    gc.collect()  # frees the frames of the errors
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    finish(regions.create_in_slices("all", CONFIG.max_region_mib << 20))


def test_regions_of_one_kind_are_none_of_the_other(regions: Regions, shm: Object) -> None:
    regions.register("r", shm.key, 0, 64)
    regions.unregister("r", GPU)
    regions.unregister("", GPU)
    assert regions.status("", GPU) == {}
    with pytest.raises(UnknownRegionError):
        regions.status("r", GPU)
    assert regions.status("r", HOST).keys() == {"r"}


# ---- a client that truncates its object


def test_truncated_before_it_is_used(regions: Regions, shm: Object) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    os.truncate(shm.path, 100)
    with pytest.raises(RegionShrunkError) as caught:
        regions.read(Place("r", 0, 101), "query")
    assert caught.value.field == "query.byte_size"
    with pytest.raises(RegionShrunkError), regions.target(Place("r", 0, 101), "out"):
        pytest.fail("must not be entered")
    assert regions.read(Place("r", 0, 100), "x").tobytes() == shm.content[:100]


def test_truncated_between_the_check_and_the_reading(
    regions: Regions, shm: Object, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    check = ShmObject.check

    def check_then_truncate(memory: ShmObject, end: int) -> None:
        check(memory, end)
        os.truncate(shm.path, 100)

    monkeypatch.setattr(ShmObject, "check", check_then_truncate)
    with pytest.raises(RegionShrunkError, match="while it was read"):
        regions.read(Place("r", 0, OBJECT_BYTES), "x")


def test_truncated_before_the_output_is_put(regions: Regions, shm: Object) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    with regions.target(Place("r", 0, 4096), "out") as target:
        os.truncate(shm.path, 100)
        with pytest.raises(RegionShrunkError) as caught:
            target.put(np.zeros(1024, np.float32))
    assert caught.value.field == "out.byte_size"
    assert shm.path.read_bytes() == shm.content[:100]


def test_a_daemon_outlives_a_client_that_truncates_all_the_time(daemon: Daemon, client: KVClient, shm: Object) -> None:
    refused, done, stop = 0, 0, threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            os.truncate(shm.path, 0)
            os.truncate(shm.path, OBJECT_BYTES)

    with client.session() as kv:
        register(kv, shm)
        step = kv.open_step([kv.allocate(range(48))])
        place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=48 * 2 * 32 * 4)
        tensor = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=(48, 2, 32), shared_memory=place)
        disturber = threading.Thread(target=disturb)
        disturber.start()
        try:
            for _ in range(300):
                request = attention_pb2.WriteRequest(step_id=step.step_id, layer=0, key=tensor, value=tensor)
                try:
                    call(kv, "write", request)
                    done += 1
                    step = kv.open_step(step.sequences)
                except RegionShrunkError:
                    refused += 1
        finally:
            stop.set()
            disturber.join()
        assert kv.describe()[0].length == 48
    assert refused > 0
    assert done + refused == 300
    assert daemon.process.poll() is None


def call(kv: Any, name: str, request: Any) -> Any:
    """Send a call like the client does, with the given request."""
    try:
        kv._core.call(name, request).send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("the blocking face suspended")


def register(kv: Any, shm: Object) -> None:
    call(kv, "system_shared_memory_register", Register(name="r", key=shm.key, byte_size=OBJECT_BYTES))


# ---- how long a region lives


def test_unregistered_in_use_it_lives_until_the_call_is_over(
    regions: Regions, totals: RegionTotals, shm: Object
) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    output = np.arange(64, dtype=np.float32).reshape(1, 2, 32)
    lse = np.array([[5.0, 6.0]], np.float32)
    finish = asyncio.Event()

    async def attend(*_: Any) -> tuple[Any, Any]:
        await finish.wait()
        return output, lse

    async def scenario() -> attention_pb2.AttendResponse:
        calls = AttentionCalls(ServeConfig(), SimpleNamespace(manager=None, attend=attend))  # type: ignore[arg-type]
        size = output.nbytes
        place = tensor_pb2.SharedMemoryPlace(region="r", offset=0, byte_size=size)
        tensor = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=output.shape, shared_memory=place)
        request = attention_pb2.AttendRequest(
            query=tensor,
            key=tensor,
            value=tensor,
            return_lse=True,
            output_place=tensor_pb2.SharedMemoryPlace(region="r", offset=1000, byte_size=1000),
            lse_place=tensor_pb2.SharedMemoryPlace(region="r", offset=3000, byte_size=8),
        )
        session: Any = SimpleNamespace(namespace=None, regions=regions)
        attending = asyncio.create_task(calls.extend(session, request))
        await asyncio.sleep(0)
        regions.unregister("r", HOST)
        assert regions.status("", HOST) == {}
        assert (len(shm_files()), totals.count, totals.num_bytes) == (1, 1, OBJECT_BYTES)
        finish.set()
        return attention_pb2.AttendResponse.FromString((await attending).to_bytes())

    response = asyncio.run(scenario())
    written = shm.path.read_bytes()
    assert written[1000:1256] == output.tobytes()
    assert written[3000:3008] == lse.tobytes()
    assert response.output.shared_memory == tensor_pb2.SharedMemoryPlace(region="r", offset=1000, byte_size=256)
    assert (list(response.output.shape), response.output.inline) == ([1, 2, 32], b"")
    assert response.lse.shared_memory.byte_size == 8
    assert (shm_files(), totals.count, totals.num_bytes) == (set(), 0, 0)


def test_a_cancelled_call_lets_go_of_its_region(regions: Regions, shm: Object) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)

    async def call_for_ever() -> None:
        with regions.target(Place("r", 0, 1), "x"):
            await asyncio.Event().wait()

    async def scenario() -> None:
        task = asyncio.create_task(call_for_ever())
        await asyncio.sleep(0)
        regions.close()
        assert len(shm_files()) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert not shm_files()


def test_a_session_that_is_closed_closes_its_regions(daemon: Daemon, client: KVClient, wire: Any, raw: Any) -> None:
    raw.await_no_sessions(wire)
    pid = daemon.process.pid
    before = num_descriptors(pid)
    with client.session() as kv:
        for _ in range(4):
            kv.create_region(4096)
        assert len(region_files(pid)) == 4
    until(lambda: num_descriptors(pid) <= before)
    assert not region_files(pid)


@pytest.mark.parametrize("detachable", [False, True])
def test_a_killed_clients_regions_are_closed(
    daemon: Daemon, client: KVClient, wire: Any, raw: Any, detachable: bool
) -> None:
    raw.await_no_sessions(wire)
    pid = daemon.process.pid
    before = num_descriptors(pid)
    script = (
        "import sys, time\n"
        "from kvservice.client import KVClient\n"
        f"kv = KVClient(sys.argv[1]).session(detachable={detachable})\n"
        "memories = [kv.create_region(1 << 20) for _ in range(4)]\n"
        "print(kv.token.hex(), flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-P", "-c", script, daemon.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            token = process.stdout.readline().strip()
            assert token, process.communicate()
            assert len(region_files(pid)) == 4
        finally:
            process.send_signal(signal.SIGKILL)
    until(lambda: not region_files(pid))
    until(lambda: num_descriptors(pid) <= before)
    assert shm_objects(process.pid) == set()
    assert client.stats().sessions == detachable
    if detachable:
        with client.resume(bytes.fromhex(token)) as kv:
            assert kv.regions() == []


def test_regions_outlive_a_broken_stream(client: KVClient, wire: Any, raw: Any, shm: Object) -> None:
    session = raw.RawSession(wire)
    session.ok("system_shared_memory_register", Register(name="r", key=shm.key, byte_size=64))
    session.stream.cancel()
    time.sleep(client.info.session_grace_s / 5)
    session.stream = wire.stream()
    session.stream.attach(session.token, reconnects=True)
    time.sleep(2 * client.info.session_grace_s)  # the timers that the broken stream started must be cancelled
    assert session.ok("system_shared_memory_status", Status()).regions.keys() == {"r"}
    session.close()


def test_what_a_resumed_session_had_shared_is_closed(daemon: Daemon) -> None:
    """Each client that takes the session over makes its own regions, within the limit of one session."""
    with KVClient(daemon.address, transport="lane") as client, client.session(detachable=True) as kv:
        for _ in range(SMALL_POOL["max_regions"] + 1):
            kv.detach()
            kv = client.resume(kv.token)
            kv.create_region(4096)
            kv.map_pool()
            assert len(kv.regions()) == 1
        kv.close()


def test_a_session_shares_before_its_first_stream(wire: Any, shm: Object) -> None:
    token = wire.unary("open", session_pb2.OpenRequest()).session_token
    wire.unary("system_shared_memory_register", Register(session_token=token, name="r", key=shm.key, byte_size=64))
    stream = wire.stream()
    stream.attach(token)
    reply = stream.send("system_shared_memory_status", Status())
    assert reply.system_shared_memory_status.regions.keys() == {"r"}
    stream.cancel()
    wire.unary("close", session_pb2.CloseRequest(session_token=token))


# ---- who may


def test_a_registration_that_is_sent_again_is_answered_again(raw_session: Any, shm: Object) -> None:
    request = Register(name="r", key=shm.key, byte_size=64, request_id=77)
    for transport in ("unary", "stream", "stream"):
        assert raw_session.call("system_shared_memory_register", request, transport) == (
            shared_memory_pb2.SystemSharedMemoryRegisterResponse()
        )
    request.request_id = 78
    assert raw_session.call("system_shared_memory_register", request).code == "ALREADY_EXISTS"


def test_names_are_each_sessions_own(wire: Any, raw: Any, shm: Object) -> None:
    one, two = raw.RawSession(wire), raw.RawSession(wire)
    one.ok("system_shared_memory_register", Register(name="r", key=shm.key, byte_size=64))
    two.ok("system_shared_memory_register", Register(name="r", key=shm.key, byte_size=32))
    two.ok("system_shared_memory_unregister", Unregister())
    assert one.ok("system_shared_memory_status", Status()).regions["r"].byte_size == 64
    one.close()
    two.close()


def test_a_client_over_tcp_is_refused(shm: Object, raw: Any, free_port: int) -> None:
    with Daemon(**SMALL_POOL, tcp_address=f"127.0.0.1:{free_port}") as daemon:
        near, far = raw.Wire(daemon.address), raw.Wire(f"127.0.0.1:{free_port}")
        local = raw.RawSession(near)
        local.ok("system_shared_memory_register", Register(name="r", key=shm.key, byte_size=64))
        remote = raw.RawSession(far)
        remote.token = local.token
        place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=64)
        tensor = tensor_pb2.Tensor(shared_memory=place)
        requests: list[tuple[str, Any]] = [
            ("system_shared_memory_register", Register(name="s", key=shm.key, byte_size=64)),
            ("system_shared_memory_status", Status()),
            ("system_shared_memory_unregister", Unregister()),
            ("write", attention_pb2.WriteRequest(key=tensor)),
            ("extend", attention_pb2.AttendRequest(query=tensor)),
            ("extend", attention_pb2.AttendRequest(output_place=place)),
            ("decode", attention_pb2.AttendRequest(lse_place=place)),
        ]
        for name, request in requests:
            for transport in ("unary", "stream"):
                refused = remote.call(name, request, transport)
                assert (refused.code, refused.reason) == ("FAILED_PRECONDITION", "REGIONS_NOT_ALLOWED"), name
        assert local.ok("system_shared_memory_status", Status()).regions.keys() == {"r"}
        for wire in (near, far):
            wire.close()


def test_a_daemon_says_whether_it_takes_regions(client: KVClient) -> None:
    assert client.info.allow_client_shm
    with Daemon(**SMALL_POOL | {"allow_client_shm": "off"}) as daemon, KVClient(daemon.address) as other:
        assert not other.info.allow_client_shm
        with other.session() as kv:
            with pytest.raises(RegionsNotAllowedError):
                kv.create_region(4096)
            with pytest.raises(KVServiceError):
                kv.regions()
        assert shm_objects(os.getpid()) == set()


def test_tensors_in_regions_are_bounded_as_messages_are(raw_session: Any, daemon: Daemon) -> None:
    path = Path("/dev/shm", f"kvservice-test-{os.getpid()}-large")
    with path.open("wb") as file:
        file.truncate(1 << 28)  # a hole, which uses no memory
    try:
        raw_session.ok("system_shared_memory_register", Register(name="r", key=path.name, byte_size=1 << 28))
        shape = (1, 2, 1 << 24)
        place = tensor_pb2.SharedMemoryPlace(region="r", byte_size=4 << 25)
        tensor = tensor_pb2.Tensor(data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=shape, shared_memory=place)
        refused = raw_session.call("write", attention_pb2.WriteRequest(step_id=1, layer=0, key=tensor, value=tensor))
        assert (refused.reason, refused.field) == ("INVALID_ARGUMENT", "key.shared_memory.byte_size")
    finally:
        path.unlink()
    assert daemon.process.poll() is None
