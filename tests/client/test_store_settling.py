"""Leases and reservations of calls without an answer are given back. The end of a session says whether its client has
stopped writing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from both_faces import Face
from fake_streams import FakeWaiting
from store_daemons import OpenStore, blocks_of, keys_of, link_of, new_namespace, store_of

from kvservice.client import PutStatus
from kvservice.client.connection import SessionConnection
from kvservice.client.store.access import StoreAccess
from kvservice.client.store.link import ANY_HOLDER, WRITES_S, Dialer, StoreLink
from kvservice.client.store.memory import MappedStore
from kvservice.client.store.writes import Writes
from kvservice.client.threads import finish
from kvservice.errors import CallTimeoutError, InternalError

DONE, UNREACHABLE = PutStatus.DONE, PutStatus.UNREACHABLE
HOLDER = 77
FACES: list[Face] = ["blocking", "asyncio"]


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt, and for the end of a task."""


class LostAnswers:
    """Loses the answer to the next call of a name: the call is executed, then `error` is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = SessionConnection.call
        self.name = ""
        self.error: BaseException = CallTimeoutError("late")

        async def intercepted(connection: SessionConnection, name: str, *arguments: Any) -> Any:
            response = await call(connection, name, *arguments)
            if name == self.name:
                self.name = ""
                raise self.error
            return response

        monkeypatch.setattr(SessionConnection, "call", intercepted)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> LostAnswers:
    return LostAnswers(monkeypatch)


def access_of(store: Any) -> StoreAccess:
    core = getattr(store, "_target", store)
    access: StoreAccess = getattr(core, "_core", core)._access
    return access


async def settled(store: Any) -> None:
    access = access_of(store)
    while access._settling is not None:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("name", ["store_reserve", "store_commit"])
def test_a_put_that_reaches_its_limit_leaves_no_reservation(
    store_daemon: OpenStore, lost: LostAnswers, face: Face, name: str
) -> None:
    """And the leases of the session last."""

    async def scenario() -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            await store.put(keys_of(1), blocks_of(1))
            lease = await store.acquire(keys_of(1))
            lost.name = name
            assert (await store.put(keys_of(2), blocks_of(2))).tolist() == [UNREACHABLE]
            assert not (await store.lookup(keys_of(1))).found.any(), "calls fail at once"
            await settled(store)
            assert await lease.renew()
            await store.remove(keys_of(2))
            assert (await store.put(keys_of(2), blocks_of(2))).tolist() == [DONE]

    asyncio.run(scenario())


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("operation", ["put", "reserve"])
def test_an_interrupted_call_leaves_no_reservation(
    store_daemon: OpenStore, lost: LostAnswers, face: Face, operation: str
) -> None:
    async def scenario() -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            lost.name, lost.error = "store_reserve", Interrupt()
            with pytest.raises(Interrupt):
                await (store.put(keys_of(2), blocks_of(2)) if operation == "put" else store.reserve(keys_of(2)))
            assert store.reachable
            await settled(store)
            assert (await store.put(keys_of(2), blocks_of(2))).tolist() == [DONE]

    asyncio.run(scenario())


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_reservation_can_end_while_the_daemon_does_not_answer(
    store_daemon: OpenStore, lost: LostAnswers, face: Face, end: str
) -> None:
    async def scenario() -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            reservation = await store.reserve(keys_of(2))
            lost.name = "store_lookup"
            assert not (await store.lookup(keys_of(1))).found.any()
            await getattr(reservation, end)()
            await settled(store)
            await store.remove(keys_of(2))
            assert (await store.put(keys_of(2), blocks_of(2))).tolist() == [DONE]

    asyncio.run(scenario())


@pytest.mark.parametrize("face", FACES)
def test_what_an_unanswered_call_has_leased_is_released(
    store_daemon: OpenStore, lost: LostAnswers, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr(StoreLink, "release", lambda _, numbers: released.extend(numbers))

    async def scenario() -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            await store.put(keys_of(1), blocks_of(1))
            lost.name = "store_acquire"
            assert not (await store.acquire(keys_of(1))).found.any()
            await settled(store)

    asyncio.run(scenario())
    assert len(released) == 1
    assert released[0] > 0


class Rig:
    """A link over fakes. `closed` are the holders with which its session was closed."""

    def __init__(self) -> None:
        self.waiting, self.closed = FakeWaiting(), cast(list[int], [])
        self.dialer = cast(Dialer, SimpleNamespace(waiting=self.waiting, close_session=self._close_session))
        connection: Any = SimpleNamespace(holder=HOLDER, close=self._close)
        unused: Any = None
        writes = Writes(self.waiting.signal())
        remote: Any = SimpleNamespace(close=lambda: None)
        self.link = StoreLink(unused, connection, b"", 1, 1, unused, unused, remote, unused, 1, writes)

    async def _close(self) -> None:
        self.closed_at = self.waiting.now

    async def _close_session(self, _: bytes, holder: int) -> None:
        self.closed.append(holder)


@pytest.mark.parametrize(("lost", "reservations", "holder"), [
    (False, set(), HOLDER), (False, {5}, HOLDER), (True, set(), HOLDER), (True, {5}, ANY_HOLDER),
])  # fmt: skip
def test_a_link_ends_with_the_promise_of_its_client(lost: bool, reservations: set[int], holder: int) -> None:
    """Not if the caller may be writing to reservations that it has not ended."""
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


@pytest.mark.parametrize("face", FACES)
def test_copies_into_the_memory_are_counted(
    store_daemon: OpenStore, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that fails; its reservation is aborted."""
    counts: list[int] = []

    async def scenario() -> None:
        async with store_of(face, store_daemon("write").address, new_namespace()) as store:
            link = link_of(store)

            def fail(*_: object) -> None:
                counts.append(link.writes._count)
                raise InternalError("the copy fails")

            with monkeypatch.context() as patched:
                patched.setattr(MappedStore, "copy_in", fail)
                with pytest.raises(InternalError):
                    await store.put(keys_of(1), blocks_of(1))
            counts.append(link.writes._count)
            assert (await store.put(keys_of(1), blocks_of(1))).tolist() == [DONE]

    asyncio.run(scenario())
    assert counts == [1, 0]
