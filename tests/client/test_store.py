"""The block store's client, with both APIs, on every way that blocks can take."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from both_faces import Face
from store_daemons import (
    BLOCK_BYTES,
    SMALL_STORE,
    WAYS,
    OpenStore,
    blocks_of,
    keys_of,
    link_of,
    new_namespace,
    store_of,
)

from kvservice import _ext
from kvservice.client import (
    AsyncStore,
    AsyncStoreLease,
    AsyncStoreReservation,
    PutStatus,
    Scatter,
    Store,
    StoreLease,
    StoreReservation,
)
from kvservice.client.connection import SessionConnection
from kvservice.client.store.core import StoreCore
from kvservice.client.store.leases import LeaseCore, ReservationCore
from kvservice.client.store.link import StoreLink
from kvservice.errors import (
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    StoreNotSharedError,
    StoreOffError,
)
from kvservice.v1 import shared_memory_pb2, store_pb2

DONE, PRESENT = PutStatus.DONE, PutStatus.PRESENT
MOST = SMALL_STORE["max_request_blocks"]
Scenario = Callable[[Any], Awaitable[None]]
# Numbers of blocks below, at and above what one request may have.
COUNTS = (0, 1, MOST, MOST + 1, 2 * MOST + 3)


@pytest.fixture(params=["blocking", "asyncio"])
def face(request: pytest.FixtureRequest) -> Face:
    return request.param


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    return WAYS[request.param]


def run(face: Face, address: str, scenario: Scenario, **options: Any) -> None:
    """Run a scenario on a store with an empty namespace of its own."""

    async def opened() -> None:
        async with store_of(face, address, options.pop("namespace", new_namespace()), **options) as store:
            await scenario(store)

    asyncio.run(opened())


async def checked(lease: Any) -> list[bool]:
    right = lease.check()
    if inspect.isawaitable(right):
        right = await right
    return right.tolist()


def new_out(count: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    return np.full((count, block_bytes), 0xEE, np.uint8)


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_put_is_got(store_daemon: OpenStore, face: Face, way: tuple[str, str], count: int) -> None:
    async def scenario(store: Any) -> None:
        assert store.transport == {"auto": "mapped"}.get(way[1], way[1])
        numbers = range(count)
        statuses = await store.put(keys_of(*numbers), blocks_of(*numbers))
        assert statuses.tolist() == [DONE] * count
        out = new_out(count)
        found = await store.get(b"".join(keys_of(*numbers)), out)
        assert found.tolist() == [True] * count
        np.testing.assert_array_equal(out, blocks_of(*numbers))
        assert (await store.put(keys_of(*numbers), blocks_of(*numbers) * 0)).tolist() == [PRESENT] * count
        assert (await store.get(keys_of(*numbers), out, verify=True)).all()
        np.testing.assert_array_equal(out, blocks_of(*numbers))

    run(face, store_daemon(way[0]).address, scenario, transport=way[1])


def test_a_put_into_the_mapping_brings_its_checksums(
    store_daemon: OpenStore, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon then need not read the blocks."""
    commits: list[store_pb2.StoreCommitRequest] = []
    call = StoreLink.call

    async def recorded(link: StoreLink, name: str, request: Any, timeout_s: float | None) -> Any:
        commits.extend([request] if name == "store_commit" else [])
        return await call(link, name, request, timeout_s)

    monkeypatch.setattr(StoreLink, "call", recorded)

    async def scenario(store: Any) -> None:
        await store.put(keys_of(1, 2), blocks_of(1, 2))
        assert [len(commit.checksums) for commit in commits] == [16]
        assert (await store.get(keys_of(1, 2), new_out(2), verify=True)).all()

    run(face, store_daemon("write").address, scenario, transport="mapped")


def test_missing_blocks_are_told(store_daemon: OpenStore, face: Face, way: tuple[str, str]) -> None:
    async def scenario(store: Any) -> None:
        there = [number for number in range(3 * MOST) if number not in (5, MOST, 2 * MOST + 1)]
        await store.put(keys_of(*there), blocks_of(*there))
        numbers = list(range(3 * MOST))
        out = new_out(len(numbers))
        found = await store.get(keys_of(*numbers), out)
        assert np.flatnonzero(~found).tolist() == [5, MOST, 2 * MOST + 1]
        np.testing.assert_array_equal(out[found], blocks_of(*there))
        assert (out[~found] == 0xEE).all()
        looked = await store.lookup(keys_of(*numbers))
        assert looked.num_leading == 5
        np.testing.assert_array_equal(looked.found, found)
        assert (await store.lookup(keys_of(*range(6, MOST)))).num_leading == MOST - 6
        assert (await store.lookup(b"")).num_leading == 0

    run(face, store_daemon(way[0]).address, scenario, transport=way[1])


def test_pieces_lie_anywhere(store_daemon: OpenStore, face: Face, way: tuple[str, str]) -> None:
    async def scenario(store: Any) -> None:
        sizes = [4096, 500, 12]
        count = MOST + 2
        layers = [np.random.default_rng(size).integers(0, 256, (2 * count, size), np.uint8) for size in sizes]
        rows = np.arange(count) * 2
        source = Scatter(layers, rows[:, None] * np.array(sizes), sizes)
        assert (await store.put(keys_of(*range(count)), source) == DONE).all()
        wanted = np.concatenate([layer[rows] for layer in layers], axis=1)
        out = new_out(count)
        assert (await store.get(keys_of(*range(count)), out)).all()
        np.testing.assert_array_equal(out, wanted)
        # One array for all pieces, in reverse order, with room between them.
        base = np.full(count * 5000, 0xEE, np.uint8)
        places = np.arange(count)[::-1, None] * 5000 + np.array([100, 4200, 4800])
        assert (await store.get(keys_of(*range(count)), Scatter(base, places, sizes))).all()
        base = base.reshape(count, 5000)[::-1]
        np.testing.assert_array_equal(base[:, 100:4196], wanted[:, :4096])
        np.testing.assert_array_equal(base[:, 4200:4700], wanted[:, 4096:4596])
        np.testing.assert_array_equal(base[:, 4800:4812], wanted[:, 4596:])
        for untouched in (base[:, :100], base[:, 4196:4200], base[:, 4700:4800], base[:, 4812:]):
            assert (untouched == 0xEE).all()

    run(face, store_daemon(way[0]).address, scenario, transport=way[1])


def test_values_in_a_region_are_copied_by_the_daemon(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        numbers = range(MOST + 1)
        region = await store.create_region(len(numbers) * BLOCK_BYTES + 64)
        values = region.array((len(numbers), BLOCK_BYTES), "uint8", 64)
        values[...] = blocks_of(*numbers)
        assert (await store.put(keys_of(*numbers), values) == DONE).all()
        assert link_of(store).staging._region is None
        out = new_out(len(numbers))
        assert (await store.get(keys_of(*numbers), out)).all()
        np.testing.assert_array_equal(out, blocks_of(*numbers))
        assert (await store.get(keys_of(*reversed(numbers)), values)).all()
        np.testing.assert_array_equal(values, blocks_of(*reversed(numbers)))

    run(face, store_daemon("off").address, scenario)


def test_a_region_that_cannot_be_unregistered_now_is_later(
    store_daemon: OpenStore, face: Face, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session keeps one region for copies, and gives it up when a call fails."""
    call, armed = SessionConnection.call_until, {"store_batch_get", "system_shared_memory_unregister"}

    async def intercepted(self: SessionConnection, deadline: float | None, name: str, request: Any) -> Any:
        if name in armed:
            armed.remove(name)
            raise InternalError("for this test")
        return await call(self, deadline, name, request)

    async def scenario(store: Any) -> None:
        await store.put(keys_of(1), blocks_of(1))
        monkeypatch.setattr(SessionConnection, "call_until", intercepted)
        monkeypatch.setattr(SessionConnection, "post", lambda *_: None)
        for _ in range(2):
            with pytest.raises(InternalError, match="for this test"):
                await store.get(keys_of(1), new_out(1))
        assert not armed
        assert (await store.get(keys_of(1), new_out(1))).all()
        answer = await link_of(store).call(
            "system_shared_memory_status", shared_memory_pb2.SystemSharedMemoryStatusRequest(), None
        )
        assert len(answer.regions) == 1

    run(face, store_daemon("off").address, scenario, transport="region")


def test_a_namespace_may_ask_for_a_smaller_quota(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        for number in range(4):
            await store.put(keys_of(number), blocks_of(number))
        assert (await store.lookup(keys_of(0, 1, 2, 3))).found.tolist() == [False, False, True, True]

    run(face, store_daemon("off").address, scenario, quota_gib=2.5 * BLOCK_BYTES / (1 << 30))


def test_touch_remove_and_clear(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        numbers = range(2 * MOST + 3)
        keys = keys_of(*numbers)
        await store.put(keys, blocks_of(*numbers))
        assert await store.touch(keys) == len(keys)
        assert await store.touch(keys_of(7, 999)) == 1
        assert await store.remove(keys[: MOST + 1]) == MOST + 1
        assert await store.remove(keys[: MOST + 1]) == 0
        assert (await store.lookup(keys)).found.tolist() == [False] * (MOST + 1) + [True] * (MOST + 2)
        assert await store.clear() == MOST + 2
        assert await store.clear() == 0
        assert not (await store.lookup(keys)).found.any()

    run(face, store_daemon("read").address, scenario)


def test_a_lease_shows_the_blocks_themselves(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        numbers = [number for number in range(2 * MOST + 2) if number != MOST + 3]
        await store.put(keys_of(*numbers), blocks_of(*numbers))
        lease = await store.acquire(keys_of(*range(2 * MOST + 2)))
        assert np.flatnonzero(~lease.found).tolist() == [MOST + 3]
        views = lease.views
        assert views[MOST + 3] is None
        for number in numbers:
            assert not views[number].flags.writeable
            np.testing.assert_array_equal(views[number], blocks_of(number)[0])
        with pytest.raises(ValueError, match="read-only"):
            views[0][0] = 1
        assert await checked(lease) == lease.found.tolist()
        assert await lease.renew(5.0)
        assert await lease.renew()
        await lease.release()
        assert not await lease.renew()
        await lease.release()
        leading = await store.acquire(keys_of(*range(2 * MOST + 2)), leading_only=True)
        assert leading.found.tolist() == [True] * (MOST + 3) + [False] * (MOST - 1)
        await leading.release()
        nothing = await store.acquire(keys_of(7000, 7001))
        assert nothing.found.tolist() == await checked(nothing) == [False, False]
        assert nothing.views == [None, None]
        assert await nothing.renew()

    run(face, store_daemon("read").address, scenario)


def test_blocks_removed_under_a_lease_stay_until_it_ends(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        await store.put(keys_of(1, 2), blocks_of(1, 2))
        lease = await store.acquire(keys_of(1, 2))
        assert await store.remove(keys_of(1)) == 1
        np.testing.assert_array_equal(lease.views[0], blocks_of(1)[0])
        assert await checked(lease) == [True, True]
        await lease.release()
        assert await checked(lease) == [False, True]

    run(face, store_daemon("read").address, scenario)


def test_without_the_mapping_a_lease_has_no_views(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        await store.put(keys_of(1), blocks_of(1))
        lease = await store.acquire(keys_of(1, 2))
        assert lease.found.tolist() == [True, False]
        with pytest.raises(StoreNotSharedError):
            _ = lease.views
        with pytest.raises(StoreNotSharedError):
            await checked(lease)
        await lease.release()
        with pytest.raises(StoreNotSharedError):
            await store.reserve(keys_of(5))

    run(face, store_daemon("off").address, scenario)


def test_reserved_blocks_are_written_in_place(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        numbers = range(2 * MOST + 2)
        await store.put(keys_of(3), blocks_of(3))
        reservation = await store.reserve(keys_of(*numbers))
        assert [number for number in numbers if reservation.statuses[number] != DONE] == [3]
        assert reservation.statuses[3] == PRESENT
        assert (await store.reserve(keys_of(4))).statuses.tolist() == [PutStatus.BEING_WRITTEN]
        for number, view in zip(numbers, reservation.views, strict=True):
            if number == 3:
                assert view is None
            else:
                view[...] = blocks_of(number)[0]
        assert not (await store.lookup(keys_of(4))).found.any()
        written = np.array([number % 5 != 0 for number in numbers])
        assert await reservation.commit(written) == sum(written) - 1
        out = new_out(len(numbers))
        found = await store.get(keys_of(*numbers), out, verify=True)
        np.testing.assert_array_equal(found, written)
        np.testing.assert_array_equal(out[found], blocks_of(*np.flatnonzero(written).tolist()))
        assert await reservation.commit() == 0
        aborted = await store.reserve(keys_of(0, 5))
        assert aborted.statuses.tolist() == [DONE, DONE]
        await aborted.abort()
        assert await aborted.commit() == 0
        assert aborted.views == [None, None]
        assert (await store.put(keys_of(0, 5), blocks_of(0, 5))).tolist() == [DONE, DONE]
        with pytest.raises(InvalidArgumentError, match="written"):
            await aborted.commit(np.ones(3, bool))

    run(face, store_daemon("write").address, scenario)


def test_a_caller_may_compute_the_checksums_of_reserved_blocks(store_daemon: OpenStore, face: Face) -> None:
    """Three requests; one block is there, one is not published, and one has a wrong checksum."""

    async def scenario(store: Any) -> None:
        numbers = range(2 * MOST + 2)
        await store.put(keys_of(3), blocks_of(3))
        reservation = await store.reserve(keys_of(*numbers))
        checksums = np.zeros(len(numbers), np.uint64)
        for number, view in zip(numbers, reservation.views, strict=True):
            if view is not None:
                view[...] = blocks_of(number)[0]
                sums = _ext.store_checksums(view.ctypes.data, bytes(8), BLOCK_BYTES, 1)
                checksums[number] = int.from_bytes(sums, "little")
        checksums[MOST + 1] += np.uint64(1)
        with pytest.raises(InvalidArgumentError, match="checksums"):
            await reservation.commit(checksums=checksums[1:])
        written = np.array([number != MOST for number in numbers])
        assert await reservation.commit(written, checksums=checksums) == len(numbers) - 2
        found = await store.get(keys_of(*numbers), new_out(len(numbers)), verify=True)
        assert np.flatnonzero(~found).tolist() == [MOST, MOST + 1]

    run(face, store_daemon("write").address, scenario)


def test_namespaces_and_tenants_share_nothing(store_daemon: OpenStore, face: Face) -> None:
    namespace = new_namespace()
    address = store_daemon("read").address

    async def fill(store: Any) -> None:
        await store.put(keys_of(1), blocks_of(1))

    async def full(store: Any) -> None:
        assert (await store.lookup(keys_of(1))).found.all()

    async def empty(store: Any) -> None:
        assert not (await store.lookup(keys_of(1))).found.any()

    run(face, address, fill, namespace=namespace, tenant="a")
    run(face, address, full, namespace=namespace, tenant="a", name="other")
    run(face, address, empty, namespace=namespace)
    run(face, address, empty, namespace=namespace, tenant="b")
    run(face, address, empty, namespace=new_namespace(), tenant="a")


def test_a_full_store_says_so(store_daemon: OpenStore, face: Face, way: tuple[str, str]) -> None:
    """The daemon has 16 MiB: leased blocks fill it, so that there is no room for others."""
    block_bytes = 1 << 19

    async def scenario(store: Any) -> None:
        await store.clear()
        numbers = range(40)
        statuses = await store.put(keys_of(*numbers), np.zeros((40, block_bytes), np.uint8))
        assert (statuses == DONE).all()  # the first ones were evicted
        lease = await store.acquire(keys_of(*numbers))
        assert 0 < lease.found.sum() < 40
        statuses = await store.put(keys_of(*range(100, 140)), np.zeros((40, block_bytes), np.uint8))
        assert PutStatus.NO_ROOM in statuses
        np.testing.assert_array_equal((await store.lookup(keys_of(*range(100, 140)))).found, statuses == DONE)
        await lease.release()
        await store.clear()

    namespace = new_namespace(block_bytes)
    run(face, store_daemon(way[0]).address, scenario, namespace=namespace, transport=way[1])


def test_a_block_must_fit_into_a_message(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(store: Any) -> None:
        for call in (store.put, store.get):
            with pytest.raises(MessageTooLargeError):
                await call(keys_of(1), np.zeros((1, 1 << 20), np.uint8))
        assert store.reachable

    run(face, store_daemon("off").address, scenario, namespace=new_namespace(1 << 20), transport="inline")


@pytest.mark.parametrize(
    ("share_store", "transport", "error"),
    [("off", "mapped", StoreNotSharedError), ("none", "auto", StoreOffError)],
)
def test_what_the_daemon_does_not_offer_is_refused(
    store_daemon: OpenStore, face: Face, share_store: str, transport: str, error: type[Exception]
) -> None:
    async def scenario(_: Any) -> None:
        raise AssertionError("it was opened")

    with pytest.raises(error):
        run(face, store_daemon(share_store).address, scenario, transport=transport)


def test_a_block_larger_than_a_slab_is_refused(store_daemon: OpenStore, face: Face) -> None:
    async def scenario(_: Any) -> None:
        raise AssertionError("it was opened")

    with pytest.raises(InvalidArgumentError, match="block_bytes"):
        run(face, store_daemon("read").address, scenario, namespace=new_namespace(1 << 23))


@pytest.mark.parametrize("method", ["lookup", "get", "put", "acquire", "reserve", "touch", "remove"])
def test_wrong_keys_are_refused_before_anything_is_sent(store_daemon: OpenStore, face: Face, method: str) -> None:
    async def scenario(store: Any) -> None:
        blocks = [np.zeros((1, BLOCK_BYTES), np.uint8)] if method in ("get", "put") else []
        for keys in (b"\0" * 33, [b"\0" * 31]):
            with pytest.raises(InvalidArgumentError) as error:
                await getattr(store, method)(keys, *blocks)
            assert error.value.field == "keys"
        if blocks:
            with pytest.raises(InvalidArgumentError) as error:
                await getattr(store, method)(keys_of(1, 2), *blocks)
            assert error.value.field == {"get": "out", "put": "values"}[method]
        if method == "acquire":
            with pytest.raises(InvalidArgumentError) as error:
                await store.acquire(keys_of(1), -1.0)
            assert error.value.field == "ttl_s"

    run(face, store_daemon("write").address, scenario)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_both_apis_have_the_same_methods() -> None:
    for blocking, asynchronous, core in (
        (Store, AsyncStore, StoreCore),
        (StoreLease, AsyncStoreLease, LeaseCore),
        (StoreReservation, AsyncStoreReservation, ReservationCore),
    ):
        # The sync API has `found`, `statuses` and the like as attributes of objects.
        assert public(core) == public(asynchronous)
        assert public(core) - public(blocking) <= {"reserved"}
        assert public(blocking) <= public(asynchronous)


def test_a_get_leaves_no_lease_behind(store_daemon: OpenStore, face: Face) -> None:
    """Its lease is released without waiting for the answer; the next call comes after that."""

    async def scenario(store: Any) -> None:
        for number in range(3):
            await store.put(keys_of(number), blocks_of(number))
            assert (await store.get(keys_of(number), new_out(1))).all()
        lease = await store.acquire(keys_of(0, 1, 2))
        await store.clear()
        assert await checked(lease) == [True] * 3
        await lease.release()
        assert await checked(lease) == [False] * 3  # no other lease keeps the memory of the removed blocks

    run(face, store_daemon("read").address, scenario)
