"""A caller, a session or a region goes away in the middle of a copy."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from blocks_rig import identity, keys
from daemon_lives import Life
from each_row import each_row
from manual_clock import ManualClock

from kvservice import _ext
from kvservice.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    KVServiceError,
    RegionShrunkError,
    UnknownReservationError,
)
from kvservice.v1 import store_pb2

# Copies of at most so many bytes run on the event loop.
SHORT_BYTES = 256 << 10


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
            yield SimpleNamespace(reach=1 << 20, is_remote=False)
        finally:
            self.users -= 1


class Calls:
    """The calls of one session of a daemon without its server, with slow copies."""

    def __init__(self, life: Life) -> None:
        self.life, self.copies, self.regions = life, SlowCopies(), FakeRegions()
        assert life.core.store is not None
        object.__setattr__(life.core.store, "copies", self.copies)
        self.store = life.core.store.blocks
        self.session = life.open()
        self.session.regions, self.own = self.regions, self.session.store
        self.namespace_id, self.namespace = self.own.open(identity())

    def request(self, kind: Any, *numbers: int) -> Any:
        offsets = np.arange(len(numbers), dtype="<u8").tobytes()
        region = store_pb2.Scatter(region="r", offsets=offsets)
        return kind(namespace_id=self.namespace_id, keys=keys(*numbers), region=region)

    async def call(self, name: str, request: Any) -> Any:
        return await self.life.call(self.session, f"store_{name}", request)

    async def put(self, *numbers: int) -> Any:
        return await self.call("batch_put", self.request(store_pb2.BatchPutRequest, *numbers))

    async def get(self, *numbers: int) -> Any:
        return await self.call("batch_get", self.request(store_pb2.BatchGetRequest, *numbers))

    async def begun(self, call: Any) -> asyncio.Task[Any]:
        """Start a call, and wait until it copies."""
        task = asyncio.create_task(call)
        await self.copies.begun.wait()
        return task

    def has(self, *numbers: int) -> None:
        """Let the store have these blocks."""
        reserved = self.store.reserve(self.namespace, keys(*numbers))
        self.store.commit(self.namespace, reserved.slots, reserved.keys, bytes(len(reserved.slots)))

    def lookup(self, *numbers: int) -> tuple[int, bytes]:
        return self.store.lookup(self.namespace, keys(*numbers))

    def in_use(self) -> tuple[int, int, int]:
        """Return the blocks leased and reserved, and the users of the region."""
        totals = self.store.totals()
        return totals.num_leased, totals.num_reserved, self.regions.users

    def events(self) -> list[tuple[str, bytes]]:
        journal = self.life.core.engine.journal
        assert journal is not None
        changes: list[Any] = [batch.change for batch in journal.since(1, 1 << 30)]
        return [(change.kind, change.keys) for change in changes]


@pytest.fixture
def life(clock: ManualClock) -> Iterator[Life]:
    running = Life(clock=clock, allow_client_shm="on", store_copy_threads=4)
    yield running
    running.kill()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_region_of_gpu_memory_is_refused(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        regions = life.open().regions
        calls = Calls(life)
        calls.has(1)
        monkeypatch.setattr(life.core.device, "open_cuda_region", Mock(), raising=False)
        session = calls.session
        monkeypatch.setattr(session.shared, "open_cuda_region", lambda *_: Mock(number=1))
        session.regions = type(regions)(life.config, life.sessions.region_totals, session.shared, lambda: None)
        session.regions.register_cuda("r", b"handle", 0, 1 << 20)
        for call in (calls.get(1), calls.put(2)):
            with pytest.raises(InvalidArgumentError, match="memory of a GPU") as refused:
                await call
            assert refused.value.field == "region.region"
        assert calls.in_use() == (0, 0, 0)
        assert not calls.copies.begun.is_set()
        assert calls.lookup(1, 2) == (1, b"\1")
        session.regions.close()

    asyncio.run(scenario())


def test_a_put_whose_caller_goes_is_undone_after_the_copy(life: Life) -> None:
    async def scenario() -> None:
        calls = Calls(life)
        task = await calls.begun(calls.put(1, 2))
        task.cancel()
        await settled()
        assert task.cancelled()
        assert calls.in_use() == (0, 2, 1), "the copy goes on, and writes there"
        calls.copies.finish.set()
        await settled()
        assert calls.in_use() == (0, 0, 0)
        assert calls.lookup(1, 2) == (0, b"\0")
        assert calls.events() == []

    asyncio.run(scenario())


def test_a_put_whose_session_ends_is_undone_after_the_copy(life: Life) -> None:
    async def scenario() -> None:
        calls = Calls(life)
        task = await calls.begun(calls.put(1))
        calls.own.close()
        assert calls.in_use() == (0, 1, 1)
        calls.copies.finish.set()
        with pytest.raises(FailedPreconditionError):
            await task
        assert calls.in_use() == (0, 0, 0)
        assert calls.lookup(1) == (0, b"\0")

    asyncio.run(scenario())


def test_a_put_whose_copy_fails_is_undone(life: Life) -> None:
    async def scenario() -> None:
        calls = Calls(life)
        calls.copies.error = RegionShrunkError("shrunk")
        calls.copies.finish.set()
        with pytest.raises(RegionShrunkError):
            await calls.put(1)
        assert calls.store.totals().num_reserved == 0

    asyncio.run(scenario())


def test_a_put_that_is_waited_for_is_published(life: Life) -> None:
    async def scenario() -> None:
        calls = Calls(life)
        calls.copies.finish.set()
        await calls.put(1, 2)
        assert calls.in_use() == (0, 0, 0)
        assert calls.lookup(1, 2) == (2, b"\x03")
        assert calls.events() == [("stored", keys(1, 2))]

    asyncio.run(scenario())


def test_a_get_holds_blocks_and_region_until_its_end(life: Life) -> None:
    async def scenario(way: str) -> None:
        calls = Calls(life)
        calls.has(1, 2)
        task = await calls.begun(calls.get(1, 2))
        if way == "the caller goes":
            task.cancel()
        elif way == "the session ends":
            calls.own.close()
        elif way == "the block is removed":
            calls.store.remove(calls.namespace, keys(1))
        else:
            calls.copies.error = RegionShrunkError("shrunk")
        await settled()
        assert calls.in_use() == (2, 0, 1)
        calls.copies.finish.set()
        with contextlib.suppress(asyncio.CancelledError, RegionShrunkError):
            await task
        await settled()
        assert calls.in_use() == (0, 0, 0)

    with each_row() as row:
        for way in ("the caller goes", "the session ends", "the block is removed", "the copy fails"):
            with row(way):
                asyncio.run(scenario(way))


def test_a_commit_whose_session_ends_publishes_nothing(life: Life) -> None:
    async def scenario(writers: int, closes: bool) -> None:
        calls = Calls(life)
        reservation_id, _ = calls.own.reserve(calls.namespace, keys(1))
        for number in range(writers):
            calls.own.add_writer(number)
        request = store_pb2.StoreCommitRequest(reservation_id=reservation_id)
        task = await calls.begun(calls.call("commit", request))
        with pytest.raises(UnknownReservationError):
            await calls.call("commit", request)
        calls.own.close(writers_done=closes)
        calls.copies.finish.set()
        with pytest.raises(UnknownReservationError):
            await task
        assert calls.lookup(1) == (0, b"\0")
        assert calls.store.totals().num_reserved == 0
        assert (calls.store.totals().used_bytes > 0) == (writers > 0 and not closes)
        calls.store.quarantine.ended(0)
        assert calls.store.totals().used_bytes == 0

    with each_row() as row:
        for writers, closes in ((0, False), (1, False), (1, True)):
            with row((writers, closes)):
                asyncio.run(scenario(writers, closes))


def test_a_commit_with_checksums_publishes_without_reading_the_blocks(life: Life) -> None:
    async def scenario() -> None:
        calls = Calls(life)
        reservation_id, _ = calls.own.reserve(calls.namespace, keys(1, 2, 3))
        sums = np.array([7, 9], "<u8").tobytes()
        for wrong in (sums[:-1], sums * 2):
            request = store_pb2.StoreCommitRequest(reservation_id=reservation_id, written=b"\x05", checksums=wrong)
            with pytest.raises(InvalidArgumentError) as refused:
                await calls.call("commit", request)
            assert refused.value.field == "checksums"
            assert calls.store.totals().num_reserved == 3
        request.checksums = sums
        answer = await calls.call("commit", request)
        assert answer.num_blocks == 2
        assert calls.store.totals().num_reserved == 0
        assert calls.events() == [("stored", keys(1, 3))]
        assert calls.store.checksums(calls.store.acquire(calls.namespace, keys(1, 3)).slots) == sums

    asyncio.run(scenario())


def test_only_so_many_copies_run_at_once(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert life.core.store is not None
        copies = life.core.store.copies
        calls = [asyncio.create_task(copies.checksums(bytes(8), SHORT_BYTES + 1)) for _ in range(10)]
        go_on.release(10)
        await asyncio.gather(*calls)
        go_on.release()
        await copies.checksums(bytes(8), SHORT_BYTES + 1)

    asyncio.run(scenario())
    assert max(most) <= 4
    assert (shares[0], shares[-1]) == (4, 4)
    assert set(shares[3:10]) == {1}


def test_short_copies_run_at_once(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext, "store_checksums", lambda *_: threading.current_thread().name.encode())

    async def scenario() -> None:
        assert life.core.store is not None
        copies = life.core.store.copies
        here = threading.current_thread().name.encode()
        assert await copies.checksums(bytes(8), SHORT_BYTES) == here
        assert await copies.checksums(bytes(8), SHORT_BYTES + 1) != here

    asyncio.run(scenario())
