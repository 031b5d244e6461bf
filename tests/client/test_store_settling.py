"""Leases and reservations of calls without an answer are given back. The end of a session says whether its client has
stopped writing.

A namespace with room for one block shows whether a place is free: another block can be stored there.
"""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest
from both_faces import Face
from client_calls import failing_calls
from each_row import each_row
from fake_streams import FakeWaiting, finish
from store_daemons import BLOCK_BYTES, OpenStore, blocks_of, keys_of, new_namespace, store_of
from waiting import PATIENCE_S

from kvservice import _ext
from kvservice.client import PutStatus
from kvservice.client.store import Dialer
from kvservice.client.store.link import StoreLink, Writes
from kvservice.errors import CallTimeoutError, InternalError

DONE, BEING_WRITTEN, UNREACHABLE = PutStatus.DONE, PutStatus.BEING_WRITTEN, PutStatus.UNREACHABLE
# The holder that closes a session, and the one that stands for no promise; how long the end waits for copies.
HOLDER, ANY_HOLDER, WRITES_S = 77, 0, 10.0
FACES: list[Face] = ["blocking", "asyncio"]
ONE_BLOCK_GIB = BLOCK_BYTES / (1 << 30)


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, and for the end of a task."""


def answer_lost(name: str, error: BaseException | None = None) -> Any:
    """Lose the answer to the next call of a name: the call is executed, then the error is raised."""
    return failing_calls({name: error or CallTimeoutError("late")}, executed=True)


async def settled(store: Any) -> None:
    """Wait until calls are answered again."""
    async with asyncio.timeout(PATIENCE_S):
        while not store.reachable:
            await asyncio.sleep(0.001)


async def stored(store: Any, number: int) -> None:
    """Put a block until it is stored: nobody else has reserved it, or the only place, for ever."""
    async with asyncio.timeout(PATIENCE_S):
        while (await store.put(keys_of(number), blocks_of(number))).tolist() != [DONE]:
            await asyncio.sleep(0.001)


def test_a_put_that_reaches_its_limit_leaves_no_reservation(store_daemon: OpenStore) -> None:
    """And the leases of the session last."""

    async def scenario(face: Face, name: str) -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            await store.put(keys_of(1), blocks_of(1))
            lease = await store.acquire(keys_of(1))
            with answer_lost(name):
                assert (await store.put(keys_of(2), blocks_of(2))).tolist() == [UNREACHABLE]
                assert not (await store.lookup(keys_of(1))).found.any(), "calls fail at once"
            await settled(store)
            assert await lease.renew()
            await store.remove(keys_of(2))
            assert (await store.put(keys_of(2), blocks_of(2))).tolist() == [DONE]

    with each_row() as row:
        for face, name in itertools.product(FACES, ("store_reserve", "store_commit")):
            with row((face, name)):
                asyncio.run(scenario(face, name))


def test_an_interrupted_call_leaves_no_reservation(store_daemon: OpenStore) -> None:
    async def scenario(face: Face, operation: str) -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            with answer_lost("store_reserve", Interrupt()):
                with pytest.raises(Interrupt):
                    await (store.put(keys_of(2), blocks_of(2)) if operation == "put" else store.reserve(keys_of(2)))
                assert store.reachable
            await stored(store, 2)

    with each_row() as row:
        for face, operation in itertools.product(FACES, ("put", "reserve")):
            with row((face, operation)):
                asyncio.run(scenario(face, operation))


def test_a_reservation_can_end_while_the_daemon_does_not_answer(store_daemon: OpenStore) -> None:
    async def scenario(face: Face, end: str) -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            reservation = await store.reserve(keys_of(2))
            with answer_lost("store_lookup"):
                assert not (await store.lookup(keys_of(1))).found.any()
            await getattr(reservation, end)()
            await settled(store)
            await store.remove(keys_of(2))
            assert (await store.put(keys_of(2), blocks_of(2))).tolist() == [DONE]

    with each_row() as row:
        for face, end in itertools.product(FACES, ("commit", "abort")):
            with row((face, end)):
                asyncio.run(scenario(face, end))


def test_what_an_unanswered_call_has_leased_is_released(store_daemon: OpenStore) -> None:
    """The block that it had leased is removed, and gives its place to another one."""

    async def scenario(face: Face) -> None:
        address = store_daemon("write").address
        async with store_of(face, address, new_namespace(), quota_gib=ONE_BLOCK_GIB) as store:
            await store.put(keys_of(1), blocks_of(1))
            with answer_lost("store_acquire"):
                assert not (await store.acquire(keys_of(1))).found.any()
            await settled(store)
            await store.remove(keys_of(1))
            await stored(store, 2)

    with each_row() as row:
        for face in FACES:
            with row(face):
                asyncio.run(scenario(face))


def test_a_copy_that_fails_leaves_no_reservation(store_daemon: OpenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the store closes with its promise, so that the place of a block that it had reserved is free at once."""

    def fail(*_: object) -> None:
        raise InternalError("the copy fails")

    async def scenario(face: Face) -> None:
        address, namespace = store_daemon("write").address, new_namespace()
        async with store_of(face, address, namespace, quota_gib=ONE_BLOCK_GIB) as other:
            async with store_of(face, address, namespace) as store:
                with monkeypatch.context() as patched:
                    patched.setattr(_ext, "store_copy_in", fail)
                    with pytest.raises(InternalError):
                        await store.put(keys_of(1), blocks_of(1))
                await stored(store, 1)
                await store.remove(keys_of(1))
                reservation = await store.reserve(keys_of(2))
                assert reservation.statuses.tolist() == [DONE]
                assert (await other.put(keys_of(2), blocks_of(2))).tolist() == [BEING_WRITTEN]
            assert (await other.put(keys_of(3), blocks_of(3))).tolist() == [DONE]

    with each_row() as row:
        for face in FACES:
            with row(face):
                asyncio.run(scenario(face))


class Rig:
    """A link over fakes. `closed` are the holders with which its session was closed."""

    def __init__(self) -> None:
        self.waiting, self.closed = FakeWaiting(), cast(list[int], [])
        self.dialer = cast(Dialer, SimpleNamespace(waiting=self.waiting, close_session=self._close_session))
        connection: Any = SimpleNamespace(holder=HOLDER, close=self._close)
        unused: Any = None
        writes = Writes(cast(Any, self.waiting.signal()))
        remote: Any = SimpleNamespace(close=lambda: None)
        self.link = StoreLink(unused, connection, b"", 1, 1, unused, unused, remote, unused, 1, writes)

    async def _close(self) -> None:
        self.closed_at = self.waiting.now

    async def _close_session(self, _: bytes, holder: int) -> None:
        self.closed.append(holder)


def test_a_link_ends_with_the_promise_of_its_client() -> None:
    """Not if the caller may be writing to reservations that it has not ended."""
    rows: list[tuple[bool, set[int], int]] = [
        (False, set(), HOLDER),
        (False, {5}, HOLDER),
        (True, set(), HOLDER),
        (True, {5}, ANY_HOLDER),
    ]
    with each_row() as row:
        for lost, reservations, holder in rows:
            with row((lost, reservations)):
                rig = Rig()
                rig.link.reservations.update(reservations)
                finish(rig.link.close(rig.dialer, lost=lost))
                assert rig.closed == [holder]


def test_a_link_ends_after_its_copies() -> None:
    rig = Rig()
    began = rig.waiting.now
    first, second = rig.link.writes, rig.link.writes
    first.__enter__()
    second.__enter__()
    rig.waiting.plan(1.0, lambda: first.__exit__(None))
    rig.waiting.plan(2.0, lambda: second.__exit__(None))
    finish(rig.link.close(rig.dialer))
    assert rig.closed == [HOLDER]
    assert rig.closed_at == began + 2.0


def test_a_copy_that_does_not_end_does_not_hold_up_the_end() -> None:
    rig = Rig()
    began = rig.waiting.now
    rig.link.writes.__enter__()
    finish(rig.link.close(rig.dialer))
    assert rig.closed == [ANY_HOLDER]
    assert rig.closed_at == began + WRITES_S


def test_the_end_waits_for_a_copy_into_the_mapped_memory(
    store_daemon: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it runs, others find the block reserved."""

    async def scenario() -> None:
        address, namespace = store_daemon("write").address, new_namespace()
        loop, begun, go_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        copy_in = _ext.store_copy_in

        def held(*args: Any) -> bytes:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(PATIENCE_S)
            return copy_in(*args)

        async with store_of("asyncio", address, namespace) as other:
            async with store_of("asyncio", address, namespace) as store:
                with monkeypatch.context() as patched:
                    patched.setattr(_ext, "store_copy_in", held)
                    putting = asyncio.create_task(store.put(keys_of(1), blocks_of(1)))
                    await begun.wait()
                closing = asyncio.create_task(store.close())
                for _ in range(20):
                    assert (await other.put(keys_of(1), blocks_of(1))).tolist() == [BEING_WRITTEN]
                go_on.set()
                await asyncio.gather(putting, closing, return_exceptions=True)
            await stored(other, 2)

    asyncio.run(scenario())
