"""Shared memory regions: the rules of Triton, concurrent changes of the object by its client, and the lifetime."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import mmap
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shm_objects import OBJECT_BYTES, PREFIX, ShmFile, open_shm_files

from kvservice.blocks import Slices
from kvservice.blocks.slices import finish
from kvservice.config import ServeConfig
from kvservice.errors import (
    DuplicateRegionError,
    FailedPreconditionError,
    InvalidArgumentError,
    QuotaExceededError,
    RegionNotOpenedError,
    RegionShrunkError,
    RegionsNotAllowedError,
    UnknownRegionError,
)
from kvservice.pool import sealed
from kvservice.server.attention_calls import AttentionCalls
from kvservice.server.budget import Budget, BudgetedMemory
from kvservice.server.clock import SystemClock
from kvservice.server.region import GPU, HOST, Place, RegionTotals
from kvservice.server.regions import Regions
from kvservice.server.session_user import SessionUser, Trust
from kvservice.server.shm_object import ShmObject
from kvservice.v1 import attention_pb2, shared_memory_pb2, tensor_pb2

CONFIG = ServeConfig(max_regions=3, max_region_mib=1, max_shared_mib=2)
# A command of fcntl(2).
F_SETSIG = 10
Register = shared_memory_pb2.SystemSharedMemoryRegisterRequest
Status = shared_memory_pb2.SystemSharedMemoryStatusRequest
Unregister = shared_memory_pb2.SystemSharedMemoryUnregisterRequest


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
def shm() -> Iterator[ShmFile]:
    made = ShmFile()
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
    assert not open_shm_files()
    assert access.budget.used_bytes == 0
    assert (totals.count, totals.num_bytes) == (0, 0)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- a session's regions


@pytest.mark.parametrize(("slash", "offset", "byte_size"), [("", 0, OBJECT_BYTES), ("/", 4096, 4096), ("/", 7, 1)])
def test_what_is_read_is_what_the_client_wrote(
    regions: Regions, shm: ShmFile, slash: str, offset: int, byte_size: int
) -> None:
    regions.register("r", slash + shm.key, offset, byte_size)
    assert regions.read(Place("r", 0, byte_size), "x").tobytes() == shm.content[offset : offset + byte_size]
    assert regions.read(Place("r", byte_size - 1, 1), "x").tobytes() == shm.content[offset + byte_size - 1 :][:1]
    found = regions.status("r", HOST)["r"]
    assert (found.key, found.offset, found.byte_size) == (slash + shm.key, offset, byte_size)


def test_what_is_written_is_where_it_should_be_and_nowhere_else(regions: Regions, shm: ShmFile) -> None:
    regions.register("r", shm.key, 1000, 500)
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T
    with regions.target(Place("r", 100, 200), "x") as target:
        assert target.put(array) == Place("r", 100, 96)
    wanted = bytearray(shm.content)
    wanted[1100:1196] = array.tobytes()
    assert shm.path.read_bytes() == bytes(wanted)


def test_an_output_larger_than_its_place(regions: Regions, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, 100)
    with regions.target(Place("r", 0, 95), "out") as target, pytest.raises(InvalidArgumentError) as caught:
        target.put(np.zeros(24, np.float32))
    assert caught.value.field == "out.byte_size"
    assert shm.path.read_bytes() == shm.content


def test_a_session_may_have_so_many(regions: Regions, shm: ShmFile) -> None:
    for name in "abc":
        regions.register(name, shm.key, 0, 64)
    with pytest.raises(QuotaExceededError) as caught:
        regions.register("d", shm.key, 0, 64)
    assert caught.value.metadata["limit"] == "max_regions"
    regions.unregister("b", HOST)
    regions.register("d", shm.key, 0, 64)
    assert regions.status("", HOST).keys() == {"a", "c", "d"}


def test_unregistering_what_is_not_there_is_no_error(regions: Regions, shm: ShmFile) -> None:
    regions.unregister("none", HOST)
    regions.unregister("", HOST)
    regions.register("r", shm.key, 0, 64)
    regions.unregister("none", HOST)
    assert regions.status("", HOST).keys() == {"r"}
    regions.unregister("", HOST)
    assert regions.status("", HOST) == {}
    with pytest.raises(UnknownRegionError):
        regions.read(Place("r", 0, 1), "x")


def test_an_object_that_is_unlinked_stays(regions: Regions, shm: ShmFile) -> None:
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
def test_a_refused_registration_leaves_nothing_open(
    regions: Regions, shm: ShmFile, offset: int, byte_size: int
) -> None:
    before = num_descriptors()
    with pytest.raises(InvalidArgumentError):
        regions.register("r", shm.key, offset, byte_size)
    assert num_descriptors() == before
    assert regions.status("", HOST) == {}


def test_a_daemon_that_takes_none(shm: ShmFile) -> None:
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


def test_regions_of_one_kind_are_none_of_the_other(regions: Regions, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, 64)
    regions.unregister("r", GPU)
    regions.unregister("", GPU)
    assert regions.status("", GPU) == {}
    with pytest.raises(UnknownRegionError):
        regions.status("r", GPU)
    assert regions.status("r", HOST).keys() == {"r"}


# ---- a client that truncates its object


def test_truncated_before_it_is_used(regions: Regions, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    os.truncate(shm.path, 100)
    with pytest.raises(RegionShrunkError) as caught:
        regions.read(Place("r", 0, 101), "query")
    assert caught.value.field == "query.byte_size"
    with pytest.raises(RegionShrunkError), regions.target(Place("r", 0, 101), "out"):
        pytest.fail("must not be entered")
    assert regions.read(Place("r", 0, 100), "x").tobytes() == shm.content[:100]


def test_truncated_between_the_check_and_the_reading(
    regions: Regions, shm: ShmFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    check = ShmObject.check

    def check_then_truncate(memory: ShmObject, end: int) -> None:
        check(memory, end)
        os.truncate(shm.path, 100)

    monkeypatch.setattr(ShmObject, "check", check_then_truncate)
    with pytest.raises(RegionShrunkError, match="while it was read"):
        regions.read(Place("r", 0, OBJECT_BYTES), "x")


def test_truncated_before_the_output_is_put(regions: Regions, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    with regions.target(Place("r", 0, 4096), "out") as target:
        os.truncate(shm.path, 100)
        with pytest.raises(RegionShrunkError) as caught:
            target.put(np.zeros(1024, np.float32))
    assert caught.value.field == "out.byte_size"
    assert shm.path.read_bytes() == shm.content[:100]


# ---- how long a region lives


def test_unregistered_in_use_it_lives_until_the_call_is_over(
    regions: Regions, totals: RegionTotals, shm: ShmFile
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
        assert (len(open_shm_files()), totals.count, totals.num_bytes) == (1, 1, OBJECT_BYTES)
        finish.set()
        return attention_pb2.AttendResponse.FromString((await attending).to_bytes())

    response = asyncio.run(scenario())
    written = shm.path.read_bytes()
    assert written[1000:1256] == output.tobytes()
    assert written[3000:3008] == lse.tobytes()
    assert response.output.shared_memory == tensor_pb2.SharedMemoryPlace(region="r", offset=1000, byte_size=256)
    assert (list(response.output.shape), response.output.inline) == ([1, 2, 32], b"")
    assert response.lse.shared_memory.byte_size == 8
    assert (open_shm_files(), totals.count, totals.num_bytes) == (set(), 0, 0)


def test_a_cancelled_call_lets_go_of_its_region(regions: Regions, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)

    async def call_for_ever() -> None:
        with regions.target(Place("r", 0, 1), "x"):
            await asyncio.Event().wait()

    async def scenario() -> None:
        task = asyncio.create_task(call_for_ever())
        await asyncio.sleep(0)
        regions.close()
        assert len(open_shm_files()) == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert not open_shm_files()
