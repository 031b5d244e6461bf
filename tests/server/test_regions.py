"""Shared memory regions: their rules, concurrent changes of the object by its client, and the lifetime."""

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
from daemon_lives import Life, finish
from each_row import each_row
from manual_clock import ManualClock
from open_files import num_open_files
from shm_objects import OBJECT_BYTES, PREFIX, ShmFile, open_shm_files
from waiting import until

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
from kvservice.v1 import attention_pb2, regions_pb2, tensor_pb2

LIMITS: dict[str, Any] = {"max_regions": 3, "max_region_mib": 4, "max_shared_mib": 8, "share_store": "off"}
# A command of fcntl(2).
F_SETSIG = 10


def at(region: str, offset: int, byte_size: int) -> tensor_pb2.SharedMemoryPlace:
    return tensor_pb2.SharedMemoryPlace(region=region, offset=offset, byte_size=byte_size)


@pytest.fixture
def shm() -> Iterator[ShmFile]:
    made = ShmFile()
    yield made
    made.path.unlink(missing_ok=True)


def is_open(shm: ShmFile) -> bool:
    return any(file.split()[0] == str(shm.path) for file in open_shm_files())


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    running = Life(clock=clock, **LIMITS)
    yield running
    running.kill()


@pytest.fixture
def session(life: Life) -> Iterator[Any]:
    # What earlier tests have dropped is open until the garbage collector finds it.
    before = open_shm_files()
    opened = life.open()
    yield opened
    opened.regions.close()
    assert open_shm_files() == before
    totals = life.sessions.region_totals
    assert (totals.count, totals.num_bytes) == (0, 0)


@pytest.fixture
def regions(session: Any) -> Any:
    return session.regions


# ---- a session's regions


def test_what_is_read_is_what_the_client_wrote(regions: Any, shm: ShmFile) -> None:
    for slash, offset, byte_size in (("", 0, OBJECT_BYTES), ("/", 4096, 4096), ("/", 7, 1)):
        regions.register("r", slash + shm.key, offset, byte_size)
        assert regions.read(at("r", 0, byte_size), "x").tobytes() == shm.content[offset : offset + byte_size]
        assert regions.read(at("r", byte_size - 1, 1), "x").tobytes() == shm.content[offset + byte_size - 1 :][:1]
        found = regions.of_host()["r"]
        assert (found.key, found.offset, found.byte_size) == (slash + shm.key, offset, byte_size)
        regions.unregister("r")


def test_what_is_written_is_where_it_should_be_and_nowhere_else(regions: Any, shm: ShmFile) -> None:
    regions.register("r", shm.key, 1000, 500)
    array = np.arange(24, dtype=np.float32).reshape(4, 6).T
    with regions.target(at("r", 100, 200), "x") as target:
        place = target.put(array)
        assert (place.region, place.offset, place.byte_size) == ("r", 100, 96)
    wanted = bytearray(shm.content)
    wanted[1100:1196] = array.tobytes()
    assert shm.path.read_bytes() == bytes(wanted)


def test_an_output_larger_than_its_place(regions: Any, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, 100)
    with regions.target(at("r", 0, 95), "out") as target, pytest.raises(InvalidArgumentError) as caught:
        target.put(np.zeros(24, np.float32))
    assert caught.value.field == "out.byte_size"
    assert shm.path.read_bytes() == shm.content


def test_a_session_may_have_so_many(regions: Any, shm: ShmFile) -> None:
    for name in "abc":
        regions.register(name, shm.key, 0, 64)
    with pytest.raises(QuotaExceededError) as caught:
        regions.register("d", shm.key, 0, 64)
    assert caught.value.metadata["limit"] == "max_regions"
    regions.unregister("b")
    regions.register("d", shm.key, 0, 64)
    assert regions.of_host().keys() == {"a", "c", "d"}


def test_unregistering_what_is_not_there_is_no_error(regions: Any, shm: ShmFile) -> None:
    regions.unregister("none")
    regions.unregister("")
    regions.register("r", shm.key, 0, 64)
    regions.unregister("none")
    assert regions.of_host().keys() == {"r"}
    regions.unregister("")
    assert regions.of_host() == {}
    with pytest.raises(UnknownRegionError):
        regions.read(at("r", 0, 1), "x")


def test_an_object_that_is_unlinked_stays(regions: Any, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    shm.path.unlink()
    assert regions.read(at("r", 0, OBJECT_BYTES), "x").tobytes() == shm.content


def test_what_is_no_shared_memory_is_not_opened(regions: Any) -> None:
    makes: tuple[Callable[[Path], object], ...] = (os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path))
    for make in makes:
        path = Path("/dev/shm", f"kvservice-test-{os.getpid()}-odd")
        make(path)
        before = num_open_files()
        try:
            with pytest.raises(RegionNotOpenedError) as caught:
                regions.register("r", path.name, 0, 1)
        finally:
            (os.rmdir if path.is_dir() else os.unlink)(path)
        assert caught.value.field == "key"
        assert num_open_files() == before


def test_an_object_is_opened_if_its_peer_could(regions: Any, shm: ShmFile) -> None:
    """The first matching class decides: owner, group or others. Root gets no more than others."""
    me, mine = os.geteuid(), os.getegid()
    other, others = me + 1001, max(os.getgroups(), default=mine) + 1001
    rows = {
        (me, mine): {0o600, 0o644, 0o640, 0o620, 0o660, 0o666, 0o606, 0o777},
        (other, mine): {0o660, 0o666, 0o066, 0o777},
        (other, others): {0o666, 0o606, 0o066, 0o777},
    }
    modes = (0o600, 0o644, 0o640, 0o620, 0o660, 0o666, 0o606, 0o066, 0o400, 0o777, 0o000)
    with each_row() as row:
        for (uid, gid), allowed in rows.items():
            if uid != me and me != 0:
                continue  # only root can give an object away
            for mode in modes:
                with row((uid, gid, oct(mode))):
                    os.chown(shm.path, uid, gid)
                    shm.path.chmod(mode)
                    if mode in allowed:
                        regions.register("r", shm.key, 0, 64)
                        regions.unregister("r")
                    else:
                        with pytest.raises(RegionNotOpenedError):
                            regions.register("r", shm.key, 0, 64)


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


def test_an_object_with_a_lease_keeps_nobody_waiting(regions: Any, leased: Path) -> None:
    with pytest.raises(RegionNotOpenedError, match="Resource temporarily unavailable"):
        regions.register("r", leased.name, 0, 1)


def test_a_refused_registration_leaves_nothing_open(regions: Any, shm: ShmFile) -> None:
    for offset, byte_size in ((OBJECT_BYTES, 1), (0, OBJECT_BYTES + 1), (0, 0)):
        before = num_open_files()
        with pytest.raises(InvalidArgumentError):
            regions.register("r", shm.key, offset, byte_size)
        assert num_open_files() == before
        assert regions.of_host() == {}


def test_a_daemon_that_takes_none(shm: ShmFile, clock: ManualClock) -> None:
    life = Life(clock=clock, allow_client_shm="off", share_pool="off", share_store="off")
    regions = life.open().regions
    calls: list[Callable[[], object]] = [
        lambda: regions.register("r", shm.key, 0, 1),
        lambda: regions.unregister(""),
        lambda: regions.of_host(),
        lambda: regions.read(at("r", 0, 1), "x"),
    ]
    for call in calls:
        with pytest.raises(RegionsNotAllowedError, match="allow-client-shm"):
            call()
    life.kill()


# ---- regions that the daemon makes


def test_a_region_that_the_daemon_makes(life: Life, regions: Any) -> None:
    token, _ = finish(regions.create_in_slices("made", 5000))
    assert len(token) == 16
    byte_size = 2 * mmap.PAGESIZE
    totals = life.sessions.region_totals
    assert (totals.count, totals.num_bytes) == (1, byte_size)
    made = regions.of_host()["made"]
    assert (made.byte_size, made.key, made.offset) == (byte_size, "", 0)
    array = np.arange(100, dtype=np.float32)
    with regions.target(at("made", byte_size - 400, 400), "x") as target:
        target.put(array)
    assert regions.read(at("made", byte_size - 400, 400), "x").tobytes() == array.tobytes()
    with pytest.raises(InvalidArgumentError):
        regions.read(at("made", byte_size - 399, 400), "x")


def test_a_session_may_have_so_much_made(regions: Any) -> None:
    finish(regions.create_in_slices("a", 3 << 20))
    with pytest.raises(QuotaExceededError) as caught:
        finish(regions.create_in_slices("b", (1 << 20) + 1))
    assert caught.value.metadata["limit"] == "max_region_mib"
    with pytest.raises(InvalidArgumentError):
        finish(regions.create_in_slices("b", 0))
    regions.unregister("a")
    finish(regions.create_in_slices("b", 4 << 20))


def test_a_region_is_made_in_slices(regions: Any) -> None:
    """Each of them allocates a MiB."""
    slices = regions.create_in_slices("made", (3 << 20) - 1)
    for _ in range(2):
        next(slices)
        assert regions.of_host() == {}
        with pytest.raises(QuotaExceededError):  # all of it counts
            finish(regions.create_in_slices("other", (1 << 20) + 1))
    finish(slices)
    assert list(regions.of_host()) == ["made"]


def test_a_region_whose_session_closes_its_own_meanwhile_is_not_made(regions: Any) -> None:
    descriptors = num_open_files()
    slices = regions.create_in_slices("made", 2 << 20)
    next(slices)
    regions.close()
    with pytest.raises(FailedPreconditionError):
        finish(slices)
    slices = regions.create_in_slices("twice", 2 << 20)
    next(slices)
    finish(regions.create_in_slices("twice", 1))
    with pytest.raises(DuplicateRegionError):
        finish(slices)
    regions.unregister("twice")
    abandoned = regions.create_in_slices("abandoned", 2 << 20)
    next(abandoned)
    abandoned.close()
    gc.collect()  # frees the frames of the errors
    until(lambda: num_open_files() <= descriptors)
    finish(regions.create_in_slices("all", 4 << 20))


def test_regions_of_host_and_gpu_memory_share_their_names(
    life: Life, session: Any, shm: ShmFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are listed together, in the order in which they were made, and unregistered by the same call."""
    regions = session.regions
    on_gpu = SimpleNamespace(number=3, close=lambda: None)
    monkeypatch.setattr(session.shared, "open_cuda_region", lambda *_: on_gpu)
    regions.register("z", shm.key, 8, 64)
    assert regions.register_cuda("g", bytes(64), 0, 32) == 3
    finish(regions.create_in_slices("a", mmap.PAGESIZE))
    for name in "zga":
        with pytest.raises(DuplicateRegionError):
            regions.register(name, shm.key, 0, 64)
        with pytest.raises(DuplicateRegionError):
            regions.register_cuda(name, bytes(64), 0, 32)
        with pytest.raises(DuplicateRegionError):
            finish(regions.create_in_slices(name, 1))

    def listed() -> list[regions_pb2.Region]:
        response = asyncio.run(life.call(session, "list_regions", regions_pb2.ListRegionsRequest()))
        return list(response.regions)

    host, gpu, made = listed()
    assert host == regions_pb2.Region(name="z", key=shm.key, offset=8, byte_size=64)
    assert gpu == regions_pb2.Region(name="g", byte_size=32, device_id=0)
    assert made == regions_pb2.Region(name="a", byte_size=mmap.PAGESIZE)
    regions.unregister("g")
    assert listed() == [host, made]
    regions.register_cuda("g", bytes(64), 0, 32)
    regions.unregister("")
    assert listed() == []


# ---- a client that truncates its object


def test_truncated_before_it_is_used(regions: Any, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    os.truncate(shm.path, 100)
    with pytest.raises(RegionShrunkError) as caught:
        regions.read(at("r", 0, 101), "query")
    assert caught.value.field == "query.byte_size"
    with pytest.raises(RegionShrunkError), regions.target(at("r", 0, 101), "out"):
        pytest.fail("must not be entered")
    assert regions.read(at("r", 0, 100), "x").tobytes() == shm.content[:100]


def test_truncated_between_the_check_and_the_reading(
    regions: Any, shm: ShmFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    memory = type(regions.of_host()["r"].memory)
    check = memory.check

    def check_then_truncate(one: Any, end: int) -> None:
        check(one, end)
        os.truncate(shm.path, 100)

    monkeypatch.setattr(memory, "check", check_then_truncate)
    with pytest.raises(RegionShrunkError, match="while it was read"):
        regions.read(at("r", 0, OBJECT_BYTES), "x")


def test_truncated_before_the_output_is_put(regions: Any, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    with regions.target(at("r", 0, 4096), "out") as target:
        os.truncate(shm.path, 100)
        with pytest.raises(RegionShrunkError) as caught:
            target.put(np.zeros(1024, np.float32))
    assert caught.value.field == "out.byte_size"
    assert shm.path.read_bytes() == shm.content[:100]


# ---- how long a region lives


def test_unregistered_in_use_it_lives_until_the_call_is_over(
    life: Life, session: Any, shm: ShmFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    regions, totals = session.regions, life.sessions.region_totals
    regions.register("r", shm.key, 0, OBJECT_BYTES)
    output = np.arange(64, dtype=np.float32).reshape(1, 2, 32)
    lse = np.array([[5.0, 6.0]], np.float32)

    async def scenario() -> attention_pb2.AttendResponse:
        over = asyncio.Event()

        async def attend(*_: Any) -> tuple[Any, Any]:
            await over.wait()
            return output, lse

        monkeypatch.setattr(life.core.engine, "attend", attend)
        tensor = tensor_pb2.Tensor(
            data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=output.shape, shared_memory=at("r", 0, output.nbytes)
        )
        request = attention_pb2.AttendRequest(
            query=tensor,
            key=tensor,
            value=tensor,
            return_lse=True,
            output_place=at("r", 1000, 1000),
            lse_place=at("r", 3000, 8),
        )
        attending = asyncio.create_task(life.call(session, "extend", request))
        await asyncio.sleep(0)
        regions.unregister("r")
        assert regions.of_host() == {}
        assert (is_open(shm), totals.count, totals.num_bytes) == (True, 1, OBJECT_BYTES)
        over.set()
        return attention_pb2.AttendResponse.FromString((await attending).to_bytes())

    response = asyncio.run(scenario())
    written = shm.path.read_bytes()
    assert written[1000:1256] == output.tobytes()
    assert written[3000:3008] == lse.tobytes()
    assert response.output.shared_memory == at("r", 1000, 256)
    assert (list(response.output.shape), response.output.inline) == ([1, 2, 32], b"")
    assert response.lse.shared_memory.byte_size == 8
    assert (is_open(shm), totals.count, totals.num_bytes) == (False, 0, 0)


def test_a_cancelled_call_lets_go_of_its_region(regions: Any, shm: ShmFile) -> None:
    regions.register("r", shm.key, 0, OBJECT_BYTES)

    async def call_for_ever() -> None:
        with regions.target(at("r", 0, 1), "x"):
            await asyncio.Event().wait()

    async def scenario() -> None:
        task = asyncio.create_task(call_for_ever())
        await asyncio.sleep(0)
        regions.close()
        assert is_open(shm)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert not is_open(shm)
