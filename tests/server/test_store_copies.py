"""A caller, a session or a region goes away in the middle of a copy."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from blocks_rig import BLOCK_BYTES, Rig, identity, keys, make
from manual_clock import ManualClock

from kvservice import _ext
from kvservice.config import ServeConfig
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    RegionShrunkError,
    UnknownReservationError,
)
from kvservice.server.region import HOST, RegionTotals
from kvservice.server.regions import Regions
from kvservice.server.scatter import Places
from kvservice.server.store_calls import StoreCalls
from kvservice.server.store_copies import SHORT_BYTES, StoreCopies
from kvservice.server.store_copy_calls import StoreCopyCalls
from kvservice.store import SessionStore
from kvservice.v1 import store_pb2


class SlowCopies:
    """Copies that wait for `finish`. `error` is raised then."""

    def __init__(self) -> None:
        self.begun, self.finish = asyncio.Event(), asyncio.Event()
        self.error: KVServiceError | None = None

    async def _wait(self, offsets: bytes) -> int:
        self.begun.set()
        await self.finish.wait()
        if self.error is not None:
            raise self.error
        return len(offsets) // 8

    async def checksums(self, offsets: bytes, _: int) -> bytes:
        return bytes(8 * await self._wait(offsets))

    async def write(self, offsets: bytes, *_: Any) -> bytes:
        return bytes(8 * await self._wait(offsets))

    async def read(self, offsets: bytes, *_: Any) -> bytes:
        return b"\xff" * -(-await self._wait(offsets) // 8)

    write_from, read_into = write, read


class FakeRegions:
    """One region, of which it counts the users."""

    users = 0

    @contextlib.contextmanager
    def host_region(self, _: str, __: str) -> Iterator[Any]:
        self.users += 1
        try:
            yield SimpleNamespace(reach=1 << 20, kind=HOST)
        finally:
            self.users -= 1


class Calls:
    """The handlers of one session over a store of four slabs, with slow copies."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.copies, self.regions = rig, SlowCopies(), FakeRegions()
        server: Any = SimpleNamespace(blocks=rig.store, copies=self.copies, chain=None)
        self.copying, self.others = StoreCopyCalls(ServeConfig(), server), StoreCalls(server)
        self.own = SessionStore(rig.store, "", 1)
        self.namespace_id, self.namespace = self.own.open(identity())
        self.session: Any = SimpleNamespace(store=self.own, regions=self.regions)

    def request(self, kind: Any, *numbers: int) -> Any:
        offsets = np.arange(len(numbers), dtype="<u8").tobytes()
        region = store_pb2.Scatter(region="r", offsets=offsets)
        return kind(namespace_id=self.namespace_id, keys=keys(*numbers), region=region)

    async def put(self, *numbers: int) -> Any:
        return await self.copying.batch_put(self.session, self.request(store_pb2.BatchPutRequest, *numbers))

    async def get(self, *numbers: int) -> Any:
        return await self.copying.batch_get(self.session, self.request(store_pb2.BatchGetRequest, *numbers))

    async def begun(self, call: Any) -> asyncio.Task[Any]:
        """Start a call, and wait until it copies."""
        task = asyncio.create_task(call)
        await self.copies.begun.wait()
        return task

    def in_use(self) -> tuple[int, int, int]:
        """Return the blocks leased and reserved, and the users of the region."""
        totals = self.rig.store.totals()
        return totals.num_leased, totals.num_reserved, self.regions.users


@pytest.fixture
def rig() -> Iterator[Rig]:
    clock, memory = ManualClock(), mmap.mmap(-1, 4 * 16384)
    yield make("native", 4, memory, clock)
    clock.close()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_region_of_gpu_memory_is_refused(rig: Rig) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        rig.put(calls.namespace, 1)
        access = Mock(**{"open_cuda_region.return_value.number": 1})
        regions = Regions(ServeConfig(allow_client_shm="on"), RegionTotals(), access)
        regions.register_cuda("r", b"handle", 0, 1 << 20)
        calls.session.regions = regions
        for call in (calls.get(1), calls.put(2)):
            with pytest.raises(InvalidArgumentError, match="memory of a GPU") as refused:
                await call
            assert refused.value.field == "region.region"
        assert calls.in_use() == (0, 0, 0)
        assert not calls.copies.begun.is_set()
        assert rig.store.lookup(calls.namespace, keys(1, 2)) == (1, b"\1")
        regions.close()

    asyncio.run(scenario())


def test_a_put_whose_caller_goes_is_undone_after_the_copy(rig: Rig) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        task = await calls.begun(calls.put(1, 2))
        task.cancel()
        await settled()
        assert task.cancelled()
        assert calls.in_use() == (0, 2, 1), "the copy goes on, and writes there"
        calls.copies.finish.set()
        await settled()
        assert calls.in_use() == (0, 0, 0)
        assert rig.store.lookup(calls.namespace, keys(1, 2)) == (0, b"\0")
        assert rig.events() == []

    asyncio.run(scenario())


def test_a_put_whose_session_ends_is_undone_after_the_copy(rig: Rig) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        task = await calls.begun(calls.put(1))
        calls.own.close()
        assert calls.in_use() == (0, 1, 1)
        calls.copies.finish.set()
        with pytest.raises(FailedPreconditionError):
            await task
        assert calls.in_use() == (0, 0, 0)
        assert rig.store.lookup(calls.namespace, keys(1)) == (0, b"\0")

    asyncio.run(scenario())


def test_a_put_whose_copy_fails_is_undone(rig: Rig) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        calls.copies.error = RegionShrunkError("shrunk")
        calls.copies.finish.set()
        with pytest.raises(RegionShrunkError):
            await calls.put(1)
        assert calls.rig.store.totals().num_reserved == 0

    asyncio.run(scenario())


def test_a_put_that_is_waited_for_is_published(rig: Rig) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        calls.copies.finish.set()
        await calls.put(1, 2)
        assert calls.in_use() == (0, 0, 0)
        assert rig.store.lookup(calls.namespace, keys(1, 2)) == (2, b"\x03")
        assert rig.events() == [("stored", keys(1, 2))]

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["the caller goes", "the session ends", "the block is removed", "the copy fails"])
def test_a_get_holds_blocks_and_region_until_its_end(rig: Rig, way: str) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        rig.put(calls.namespace, 1, 2)
        task = await calls.begun(calls.get(1, 2))
        if way == "the caller goes":
            task.cancel()
        elif way == "the session ends":
            calls.own.close()
        elif way == "the block is removed":
            rig.store.remove(calls.namespace, keys(1))
        else:
            calls.copies.error = RegionShrunkError("shrunk")
        await settled()
        assert calls.in_use() == (2, 0, 1)
        calls.copies.finish.set()
        with contextlib.suppress(asyncio.CancelledError, RegionShrunkError):
            await task
        await settled()
        assert calls.in_use() == (0, 0, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(("writers", "closes"), [(0, False), (1, False), (1, True)])
def test_a_commit_whose_session_ends_publishes_nothing(rig: Rig, writers: int, closes: bool) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        reservation_id, _ = calls.own.reserve(calls.namespace, keys(1))
        for number in range(writers):
            calls.own.add_writer(number)
        request = store_pb2.StoreCommitRequest(reservation_id=reservation_id)
        task: Any = calls.others.commit(calls.session, request)
        await calls.copies.begun.wait()
        with pytest.raises(UnknownReservationError):
            calls.others.commit(calls.session, request)
        calls.own.close(writers_done=closes)
        calls.copies.finish.set()
        with pytest.raises(UnknownReservationError):
            await task
        assert rig.store.lookup(calls.namespace, keys(1)) == (0, b"\0")
        assert rig.store.totals().num_reserved == 0
        assert (rig.store.totals().used_bytes > 0) == (writers > 0 and not closes)
        rig.store.quarantine.ended(0)
        assert rig.store.totals().used_bytes == 0

    asyncio.run(scenario())


def test_a_commit_with_checksums_publishes_without_reading_the_blocks(rig: Rig) -> None:
    async def scenario() -> None:
        calls = Calls(rig)
        reservation_id, _ = calls.own.reserve(calls.namespace, keys(1, 2, 3))
        sums = np.array([7, 9], "<u8").tobytes()
        for wrong in (sums[:-1], sums * 2):
            request = store_pb2.StoreCommitRequest(reservation_id=reservation_id, written=b"\x05", checksums=wrong)
            with pytest.raises(InvalidArgumentError) as refused:
                calls.others.commit(calls.session, request)
            assert refused.value.field == "checksums"
            assert rig.store.totals().num_reserved == 3
        request.checksums = sums
        answer: Any = calls.others.commit(calls.session, request)
        assert answer.num_blocks == 2
        assert rig.store.totals().num_reserved == 0
        assert rig.events() == [("stored", keys(1, 3))]
        assert rig.store.checksums(rig.store.acquire(calls.namespace, keys(1, 3)).slots) == sums

    asyncio.run(scenario())


def test_only_so_many_copies_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait in order. A copy that runs alone has all threads."""
    running: list[int] = []
    shares: list[int] = []
    most: list[int] = []
    go_on = threading.Semaphore(0)

    def checksums(number: int, _: bytes, __: int, num_threads: int) -> bytes:
        running.append(number)
        shares.append(num_threads)
        most.append(len(running))
        go_on.acquire()
        running.remove(number)
        return b""

    monkeypatch.setattr(_ext, "store_checksums", checksums)

    async def scenario() -> None:
        copies = StoreCopies(7, num_threads=4)
        calls = [asyncio.create_task(copies.checksums(bytes(8), SHORT_BYTES + 1)) for _ in range(10)]
        go_on.release(10)
        await asyncio.gather(*calls)
        go_on.release()
        await copies.checksums(bytes(8), SHORT_BYTES + 1)

    asyncio.run(scenario())
    assert max(most) <= 4
    assert (shares[0], shares[-1]) == (4, 4)
    assert set(shares[3:10]) == {1}


def test_short_copies_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext, "store_checksums", lambda *_: threading.current_thread().name.encode())

    async def scenario() -> None:
        copies = StoreCopies(7, num_threads=1)
        here = threading.current_thread().name.encode()
        assert await copies.checksums(bytes(8), SHORT_BYTES) == here
        assert await copies.checksums(bytes(8), SHORT_BYTES + 1) != here

    asyncio.run(scenario())


def test_places_of_pieces() -> None:
    places = Places(np.array([1, 3], np.uint64), np.array([[5, 6], [7, 8]], np.uint64))
    assert [(int(at), int(size)) for at, size in places.ranges()] == [(5, 1), (6, 3), (7, 1), (8, 3)]
    assert [(int(at), int(size)) for at, size in places.of(np.array([False, True])).ranges()] == [(7, 1), (8, 3)]
    packed = Places.packed(3, BLOCK_BYTES)
    assert packed.offsets.tolist() == [[0], [BLOCK_BYTES], [2 * BLOCK_BYTES]]
