"""The block store's client, with both APIs, on every way that blocks can take."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from both_faces import Face
from client_calls import failing_calls, lost_posts, seen_calls
from each_row import each_row
from store_daemons import (
    BLOCK_BYTES,
    SMALL_STORE,
    WAYS,
    OpenStore,
    blocks_of,
    keys_of,
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
from kvservice.errors import (
    InternalError,
    InvalidArgumentError,
    MessageTooLargeError,
    StoreNotSharedError,
    StoreOffError,
)
from kvservice.v1 import store_pb2

FACES: list[Face] = ["blocking", "asyncio"]
DONE, PRESENT = PutStatus.DONE, PutStatus.PRESENT
MOST = SMALL_STORE["max_request_blocks"]
Scenario = Callable[[Any], Awaitable[None]]
# Numbers of blocks below, at and above what one request may have.
COUNTS = (0, 1, MOST, MOST + 1, 2 * MOST + 3)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    return WAYS[request.param]


def run(address: str, scenario: Scenario, block_bytes: int = BLOCK_BYTES, **options: Any) -> None:
    """Run a scenario with each API, on a store with an empty namespace of its own."""

    async def opened(face: Face) -> None:
        async with store_of(face, address, new_namespace(block_bytes), **options) as store:
            await scenario(store)

    with each_row() as row:
        for face in FACES:
            with row(face):
                asyncio.run(opened(face))


async def checked(lease: Any) -> list[bool]:
    right = lease.check()
    if inspect.isawaitable(right):
        right = await right
    return right.tolist()


def new_out(count: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    return np.full((count, block_bytes), 0xEE, np.uint8)


def test_what_is_put_is_got(store_daemon: OpenStore, way: tuple[str, str]) -> None:
    async def scenario(store: Any) -> None:
        assert store.transport == {"auto": "mapped"}.get(way[1], way[1])
        for count in COUNTS:
            numbers = range(1000 * count, 1001 * count)
            statuses = await store.put(keys_of(*numbers), blocks_of(*numbers))
            assert statuses.tolist() == [DONE] * count
            out = new_out(count)
            found = await store.get(b"".join(keys_of(*numbers)), out)
            assert found.tolist() == [True] * count
            np.testing.assert_array_equal(out, blocks_of(*numbers))
            assert (await store.put(keys_of(*numbers), blocks_of(*numbers) * 0)).tolist() == [PRESENT] * count
            assert (await store.get(keys_of(*numbers), out, verify=True)).all()
            np.testing.assert_array_equal(out, blocks_of(*numbers))

    run(store_daemon(way[0]).address, scenario, transport=way[1])


def test_a_put_into_the_mapping_brings_its_checksums(store_daemon: OpenStore) -> None:
    """The daemon then need not read the blocks."""

    async def scenario(store: Any) -> None:
        with seen_calls() as seen:
            await store.put(keys_of(1, 2), blocks_of(1, 2))
        assert [len(commit.checksums) for name, commit in seen if name == "store_commit"] == [16]
        assert (await store.get(keys_of(1, 2), new_out(2), verify=True)).all()

    run(store_daemon("write").address, scenario, transport="mapped")


def test_missing_blocks_are_told(store_daemon: OpenStore, way: tuple[str, str]) -> None:
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
        for some, num_leading in (((), 0), ((0, 1), 2), ((5, 6), 0), ((0, 5, 6), 1)):
            assert (await store.lookup(keys_of(*some))).num_leading == num_leading

    run(store_daemon(way[0]).address, scenario, transport=way[1])


def test_pieces_lie_anywhere(store_daemon: OpenStore, way: tuple[str, str]) -> None:
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
        # One piece each, in reverse order, so that they do not lie one after the other.
        order = np.arange(count)[::-1, None] * BLOCK_BYTES
        reversed_out = np.zeros((count, BLOCK_BYTES), np.uint8)
        assert (await store.get(keys_of(*range(count)), Scatter(reversed_out, order, [BLOCK_BYTES]))).all()
        np.testing.assert_array_equal(reversed_out[::-1], wanted)
        keys = keys_of(*range(100, 100 + count))
        assert (await store.put(keys, Scatter(reversed_out, order, [BLOCK_BYTES])) == DONE).all()
        assert (await store.get(keys, out)).all()
        np.testing.assert_array_equal(out, wanted)
        for untouched in (base[:, :100], base[:, 4196:4200], base[:, 4700:4800], base[:, 4812:]):
            assert (untouched == 0xEE).all()

    run(store_daemon(way[0]).address, scenario, transport=way[1])


def regions_of(seen: list[tuple[str, Any]]) -> set[str]:
    """Return the names of the regions from which blocks were put."""
    return {request.region.region for _, request in seen if isinstance(request, store_pb2.BatchPutRequest)}


def test_values_in_a_region_are_copied_by_the_daemon(store_daemon: OpenStore) -> None:
    """The last value ends with its region. Values that are only partly in the region take the session's own one."""

    async def scenario(store: Any) -> None:
        numbers = range(MOST + 1)
        with seen_calls() as seen:
            region = await store.create_region(len(numbers) * BLOCK_BYTES + 64)
            values = region.array((len(numbers), BLOCK_BYTES), "uint8", 64)
            values[...] = blocks_of(*numbers)
            assert (await store.put(keys_of(*numbers), values) == DONE).all()
            assert [name for name, _ in seen].count("create_region") == 1
            regions = regions_of(seen)
            assert len(regions) == 1
        out = new_out(len(numbers))
        assert (await store.get(keys_of(*numbers), out)).all()
        np.testing.assert_array_equal(out, blocks_of(*numbers))
        assert (await store.get(keys_of(*reversed(numbers)), values)).all()
        np.testing.assert_array_equal(values, blocks_of(*reversed(numbers)))
        outside = blocks_of(77)[0].copy()
        halves = Scatter([values, outside], [[0, BLOCK_BYTES // 2]], [BLOCK_BYTES // 2] * 2)
        with seen_calls() as seen:
            assert (await store.put(keys_of(99), halves) == DONE).all()
            assert regions.isdisjoint(regions_of(seen))
        assert (await store.get(keys_of(99), out[:1])).all()
        np.testing.assert_array_equal(out[0, : BLOCK_BYTES // 2], values[0, : BLOCK_BYTES // 2])
        np.testing.assert_array_equal(out[0, BLOCK_BYTES // 2 :], outside[BLOCK_BYTES // 2 :])

    run(store_daemon("off").address, scenario)


def test_a_store_gives_regions_up(store_daemon: OpenStore) -> None:
    """More than it may have at a time. What lies in one is put as any other memory then."""

    async def scenario(store: Any) -> None:
        for number in range(40):
            region = await store.create_region(2 * BLOCK_BYTES)
            values = region.array((2, BLOCK_BYTES), "uint8")
            values[...] = blocks_of(number, number + 100)
            await store.unregister_region(region)
            await store.unregister_region(region)
            with seen_calls() as seen:
                assert (await store.put(keys_of(number, number + 100), values) == DONE).all()
            assert region.name not in regions_of(seen)
        out = new_out(2)
        assert (await store.get(keys_of(39, 139), out)).all()
        np.testing.assert_array_equal(out, blocks_of(39, 139))
        with pytest.raises(InvalidArgumentError) as refused:
            await store.unregister_region(values)
        assert refused.value.field == "region"

    run(store_daemon("off").address, scenario)


def test_a_region_that_cannot_be_unregistered_now_is_later(store_daemon: OpenStore) -> None:
    """The session keeps one region for copies, and gives it up when a call fails."""

    async def scenario(store: Any) -> None:
        await store.put(keys_of(1), blocks_of(1))
        with seen_calls() as seen, lost_posts():
            for lost in ("store_batch_get", "unregister_region"):
                errors: dict[str, BaseException] = {lost: InternalError("for this test")}
                with (
                    failing_calls(errors),
                    pytest.raises(InternalError, match="for this test"),
                ):
                    await store.get(keys_of(1), new_out(1))
                assert not errors
            assert (await store.get(keys_of(1), new_out(1))).all()
        sent = [name for name, _ in seen if name != "store_batch_get"]
        assert sent == ["unregister_region", "create_region"]

    run(store_daemon("off").address, scenario, transport="region")


def test_a_namespace_may_ask_for_a_smaller_quota(store_daemon: OpenStore) -> None:
    async def scenario(store: Any) -> None:
        for number in range(4):
            await store.put(keys_of(number), blocks_of(number))
        assert (await store.lookup(keys_of(0, 1, 2, 3))).found.tolist() == [False, False, True, True]

    run(store_daemon("off").address, scenario, quota_gib=2.5 * BLOCK_BYTES / (1 << 30))


def test_touch_remove_and_clear(store_daemon: OpenStore) -> None:
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

    run(store_daemon("read").address, scenario)


def test_a_lease_shows_the_blocks_themselves(store_daemon: OpenStore) -> None:
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

    run(store_daemon("read").address, scenario)


def test_blocks_removed_under_a_lease_stay_until_it_ends(store_daemon: OpenStore) -> None:
    async def scenario(store: Any) -> None:
        await store.put(keys_of(1, 2), blocks_of(1, 2))
        lease = await store.acquire(keys_of(1, 2))
        assert await store.remove(keys_of(1)) == 1
        np.testing.assert_array_equal(lease.views[0], blocks_of(1)[0])
        assert await checked(lease) == [True, True]
        await lease.release()
        assert await checked(lease) == [False, True]

    run(store_daemon("read").address, scenario)


def test_without_the_mapping_a_lease_has_no_views(store_daemon: OpenStore) -> None:
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

    run(store_daemon("off").address, scenario)


def test_reserved_blocks_are_written_in_place(store_daemon: OpenStore) -> None:
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

    run(store_daemon("write").address, scenario)


def test_a_caller_may_compute_the_checksums_of_reserved_blocks(store_daemon: OpenStore) -> None:
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

    run(store_daemon("write").address, scenario)


def test_namespaces_and_tenants_share_nothing(store_daemon: OpenStore) -> None:
    address = store_daemon("read").address

    async def scenario(face: Face) -> None:
        namespace = new_namespace()
        async with store_of(face, address, namespace, tenant="a") as store:
            await store.put(keys_of(1), blocks_of(1))
        for found, options in (
            (True, {"tenant": "a", "name": "other"}),
            (False, {}),
            (False, {"tenant": "b"}),
            (False, {"tenant": "a", "namespace": new_namespace()}),
        ):
            wanted = {"namespace": namespace} | options
            async with store_of(face, address, **wanted) as store:
                assert (await store.lookup(keys_of(1))).found.tolist() == [found], options

    for face in FACES:
        asyncio.run(scenario(face))


def test_a_full_store_says_so(store_daemon: OpenStore, way: tuple[str, str]) -> None:
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

    run(store_daemon(way[0]).address, scenario, block_bytes, transport=way[1])


def test_a_block_must_fit_into_a_message(store_daemon: OpenStore) -> None:
    async def scenario(store: Any) -> None:
        for call in (store.put, store.get):
            with pytest.raises(MessageTooLargeError):
                await call(keys_of(1), np.zeros((1, 1 << 20), np.uint8))
        assert store.reachable

    run(store_daemon("off").address, scenario, 1 << 20, transport="inline")


def test_what_the_daemon_does_not_offer_is_refused(store_daemon: OpenStore) -> None:
    """A mapping, a store, and room for blocks that are larger than a slab."""
    rows: list[tuple[str, str, int, type[Exception]]] = [
        ("off", "mapped", BLOCK_BYTES, StoreNotSharedError),
        ("none", "auto", BLOCK_BYTES, StoreOffError),
        ("read", "auto", 1 << 23, InvalidArgumentError),
    ]

    async def opened(face: Face, share_store: str, transport: str, block_bytes: int) -> None:
        address = store_daemon(share_store).address
        async with store_of(face, address, new_namespace(block_bytes), transport=transport):
            raise AssertionError("it was opened")

    with each_row() as row:
        for face in FACES:
            for share_store, transport, block_bytes, error in rows:
                with row((face, error)), pytest.raises(error) as refused:
                    asyncio.run(opened(face, share_store, transport, block_bytes))
                if error is InvalidArgumentError:
                    assert "block_bytes" in str(refused.value)


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_both_apis_have_the_same_methods() -> None:
    for blocking, asynchronous in (
        (Store, AsyncStore),
        (StoreLease, AsyncStoreLease),
        (StoreReservation, AsyncStoreReservation),
    ):
        # The sync API has `found`, `statuses` and the like as attributes of objects.
        assert public(asynchronous) - public(blocking) <= {"reserved"}
        assert public(blocking) <= public(asynchronous)


def test_a_get_leaves_no_lease_behind(store_daemon: OpenStore) -> None:
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

    run(store_daemon("read").address, scenario)
