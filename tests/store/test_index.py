"""The rules of the store's index, one by one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from each_row import each_row
from store_rig import BEING_WRITTEN, DONE, NO_ROOM, PRESENT, Store, bits, key_of, keys_of, pack, unpack

from kvservice import _ext
from kvservice.errors import InvalidArgumentError

SLAB_BYTES = 16384
PLENTY = 1 << 40
LARGE = SLAB_BYTES - 4096  # a slab has one block of this size
STRIDE_BYTE = 56  # of the first record of a slab
THIRD = 4096  # a slab has three blocks of this size


@pytest.fixture
def store() -> Store:
    return Store(num_slabs=4, slab_bytes=SLAB_BYTES)


def lease(store: Store, namespace: int, *names: object) -> tuple[bytes, bytes, tuple[int, ...]]:
    """Acquire blocks that are there. Returns their slots, offsets and versions."""
    found, slots, offsets, versions = store.index.acquire(namespace, keys_of(names), False)
    assert all(bits(found, len(names)))
    return slots, offsets, unpack(versions)


# first_block, stride and blocks per slab for each size of a block.
GEOMETRIES = {
    1: (8192, 64, 128),
    64: (8192, 64, 128),
    65: (4096, 128, 64),
    4095: (4096, 4096, 3),
    4096: (4096, 4096, 3),
    4097: (4096, 8192, 1),
    LARGE: (4096, LARGE, 1),
}


def test_geometry(store: Store) -> None:
    with each_row() as row:
        for block_bytes, expected in GEOMETRIES.items():
            with row(block_bytes):
                first_block, stride, per_slab = store.index.geometry(store.index.open(block_bytes, PLENTY))
                assert (first_block, stride, per_slab) == expected
                assert first_block + per_slab * stride <= SLAB_BYTES


def test_a_block_is_found_after_its_commit(store: Store) -> None:
    namespace = store.index.open(THIRD, PLENTY)
    _, slots, _ = store.index.reserve(namespace, keys_of("a"))
    assert store.index.lookup(namespace, keys_of("a")) == (0, b"\x00")
    assert store.index.acquire(namespace, keys_of("a"), False) == (b"\x00", b"", b"", b"")
    store.index.commit(slots, pack([7]))
    assert store.index.lookup(namespace, keys_of("a")) == (1, b"\x01")
    assert store.index.checksums(slots) == pack([7])


def test_lookup_counts_leading_keys_and_marks_all(store: Store) -> None:
    namespace = store.index.open(64, PLENTY)
    store.put(namespace, range(0, 20))
    assert store.index.lookup(namespace, keys_of([*range(10), "x", *range(10, 15)])) == (10, b"\xff\xfb")
    assert store.index.lookup(namespace, b"") == (0, b"")


def test_acquire_can_stop_before_the_first_key_that_is_missing(store: Store) -> None:
    namespace = store.index.open(64, PLENTY)
    store.put(namespace, "abd")
    found, slots, _, _ = store.index.acquire(namespace, keys_of("abcd"), True)
    assert bits(found, 4) == [True, True, False, False]
    assert len(unpack(slots)) == 2
    assert store.index.stats(namespace).num_leased == 2


def test_the_first_writer_of_a_key_wins(store: Store) -> None:
    namespace = store.index.open(THIRD, PLENTY)
    statuses, slots, _ = store.index.reserve(namespace, keys_of("aba"))
    assert list(statuses) == [DONE, DONE, BEING_WRITTEN]
    assert list(store.index.reserve(namespace, keys_of("b"))[0]) == [BEING_WRITTEN]
    store.index.commit(slots, slots)
    assert store.put(namespace, "ab") == [PRESENT, PRESENT]


def test_namespaces_do_not_share_keys(store: Store) -> None:
    first, second = store.index.open(THIRD, PLENTY), store.index.open(THIRD, PLENTY)
    store.put(first, "a")
    assert store.found(second, "a") == [False]
    assert store.put(second, "a") == [DONE]
    assert store.index.remove(first, keys_of("a")) == 1
    assert store.found(second, "a") == [True]


def test_an_aborted_block_is_missing_and_its_room_is_free(store: Store) -> None:
    namespace = store.index.open(THIRD, PLENTY)
    store.index.abort(store.index.reserve(namespace, keys_of("ab"))[1])
    assert store.found(namespace, "ab") == [False, False]
    assert store.index.num_free_slabs == store.index.num_slabs == 4
    assert store.put(namespace, "ab") == [DONE, DONE]


def test_the_least_recently_used_block_is_evicted(store: Store) -> None:
    namespace = store.index.open(LARGE, PLENTY)
    for name in "abcd":
        store.put(namespace, name)
    store.index.touch(namespace, keys_of("a"))
    store.index.release(lease(store, namespace, "b")[0])
    assert store.found(namespace, "c") == [True]  # a lookup is no use
    store.put(namespace, "ef")
    assert store.found(namespace, "abcdef") == [True, True, False, False, True, True]
    assert store.index.stats(namespace).num_evicted == 2


def test_the_last_block_of_a_chain_is_evicted_first() -> None:
    with each_row() as row:
        for how in ("commit", "release", "touch"):
            with row(how):
                store = Store(num_slabs=4, slab_bytes=SLAB_BYTES)
                namespace = store.index.open(LARGE, PLENTY)
                store.put(namespace, "abcd")
                if how == "release":
                    store.index.release(lease(store, namespace, *"abcd")[0])
                elif how == "touch":
                    store.index.touch(namespace, keys_of("abcd"))
                store.put(namespace, "e")
                assert store.found(namespace, "abcde") == [True, True, True, False, True]


def test_a_put_does_not_evict_the_blocks_that_it_names(store: Store) -> None:
    namespace = store.index.open(LARGE, PLENTY)
    for name in "abcd":
        store.put(namespace, name)
    assert store.put(namespace, "eafb") == [DONE, PRESENT, DONE, PRESENT]
    assert store.found(namespace, "abcdef") == [True, True, False, False, True, True]


def test_leased_and_reserved_blocks_are_not_evicted(store: Store) -> None:
    namespace = store.index.open(LARGE, PLENTY)
    store.put(namespace, "ab")
    slots, offsets, versions = lease(store, namespace, "a")
    reserved = store.index.reserve(namespace, keys_of("cd"))[1]
    assert store.put(namespace, "xyz") == [DONE, NO_ROOM, NO_ROOM]
    assert store.versions(namespace, offsets) == versions
    assert store.found(namespace, "ab") == [True, False]
    store.index.abort(reserved)
    store.index.release(slots)
    assert store.put(namespace, "efg") == [DONE] * 3


def test_a_block_is_leased_until_its_last_release(store: Store) -> None:
    namespace = store.index.open(LARGE, 1 * LARGE)
    store.put(namespace, "a")
    first, second = lease(store, namespace, "a")[0], lease(store, namespace, "a")[0]
    store.index.release(first)
    assert store.put(namespace, "b") == [NO_ROOM]
    store.index.release(second)
    assert store.put(namespace, "b") == [DONE]


def test_a_removed_block_keeps_its_bytes_until_its_last_release(store: Store) -> None:
    namespace = store.index.open(LARGE, 1 * LARGE)
    store.put(namespace, "a")
    slots, offsets, versions = lease(store, namespace, "a")
    assert store.index.remove(namespace, keys_of("aa")) == 1
    assert store.found(namespace, "a") == [False]
    assert store.put(namespace, "a") == [NO_ROOM]
    assert store.versions(namespace, offsets) == versions
    stats = store.index.stats(namespace)
    assert (stats.num_blocks, stats.num_leased, stats.num_condemned, stats.used_bytes) == (0, 1, 1, LARGE)
    store.index.release(slots)
    assert store.versions(namespace, offsets) != versions
    assert store.put(namespace, "a") == [DONE]


def test_reserved_blocks_are_not_removed(store: Store) -> None:
    namespace = store.index.open(THIRD, PLENTY)
    slots = store.index.reserve(namespace, keys_of("a"))[1]
    assert store.index.remove(namespace, keys_of("a")) == 0
    assert store.index.clear(namespace, 10) == 0
    store.index.commit(slots, slots)
    assert store.found(namespace, "a") == [True]


def test_clear_removes_in_slices_and_leased_blocks_last(store: Store) -> None:
    namespace = store.index.open(THIRD, PLENTY)
    store.put(namespace, range(9))
    slots, _, _ = lease(store, namespace, 8)
    assert store.index.clear(namespace, 6) == 6
    assert store.found(namespace, range(9)) == [True, True, *[False] * 6, True]
    assert [store.index.clear(namespace, 2), store.index.clear(namespace, 2)] == [2, 1]
    assert store.index.clear(namespace, 2) == 0
    assert store.index.num_free_slabs == 3
    store.index.release(slots)
    assert store.index.num_free_slabs == 4


def test_the_version_of_a_slot_changes_with_its_block() -> None:
    with each_row() as row:
        for change in ("evict", "remove", "another namespace", "abort"):
            with row(change):
                store = Store(num_slabs=4, slab_bytes=SLAB_BYTES)
                namespace = store.index.open(LARGE, PLENTY)
                store.put(namespace, "abcd")
                slots, offsets, versions = lease(store, namespace, "a")
                store.index.release(slots)
                assert versions[0] != 0
                if change == "evict":
                    store.put(namespace, "efgh")
                elif change == "remove":
                    store.index.remove(namespace, keys_of("a"))
                elif change == "another namespace":
                    store.put(store.index.open(LARGE, PLENTY), "abcd")
                else:
                    store.index.remove(namespace, keys_of("a"))
                    store.index.abort(store.index.reserve(namespace, keys_of("a"))[1])
                assert store.versions(namespace, offsets) != versions


def test_bytes_of_another_layout_are_not_taken_for_a_version(store: Store) -> None:
    """A slab with smaller blocks has more records. Another namespace may have blocks where they were, and its writer
    chooses their bytes."""
    small, large = store.index.open(64, PLENTY), store.index.open(LARGE, PLENTY)
    store.put(small, range(128))
    slots, offsets, versions = lease(store, small, 100)
    store.index.release(slots)
    store.index.clear(small, 128)
    store.put(large, "abcd")
    store.memory.reshape(4, SLAB_BYTES)[:, 4096:].view("<u8")[:] = versions[0]
    assert store.versions(small, offsets) == (0,)


def test_versions_start_at_random_and_are_never_reused() -> None:
    seen: set[int] = set()
    for seed in range(3):
        store = Store(1, SLAB_BYTES, seed)
        namespace = store.index.open(THIRD, PLENTY)
        for name in range(20):
            store.put(namespace, [name])
            slots, _, versions = lease(store, namespace, name)
            assert versions[0] not in seen
            seen.add(versions[0])
            store.index.release(slots)
    assert max(seen) < 1 << 63


def test_a_quota_limits_a_namespace(store: Store) -> None:
    namespace = store.index.open(64, 10 * 64 + 63)
    store.put(namespace, range(30))
    assert sum(store.found(namespace, range(30))) == 10
    assert store.index.stats(namespace).used_bytes == 640
    assert store.put(store.index.open(64, 63), "a") == [NO_ROOM]


def test_offered_blocks_keep_their_order_in_whatever_order_they_come_back(store: Store) -> None:
    namespace = store.index.open(64, PLENTY)
    for name in range(9):
        store.put(namespace, [name])
    first, second, third = (store.index.coldest(namespace, 2)[0] for _ in range(3))
    for slots in (second, third, first):
        store.index.release(slots)
    store.index.record_removed(True)
    assert store.index.evict_blocks(namespace, 7) == 7
    assert store.index.take_removed() == [(namespace, keys_of(range(7)))]


def test_a_new_namespace_takes_the_least_recently_used_slab_of_a_full_store(store: Store) -> None:
    first = store.index.open(THIRD, PLENTY)
    for name in range(12):
        store.put(first, [name])
    store.index.touch(first, keys_of([0]))  # the slab of 0, 1 and 2 is the newest now
    second = store.index.open(LARGE, PLENTY)
    assert store.put(second, "a") == [DONE]
    assert store.found(first, range(12)) == [True] * 3 + [False] * 3 + [True] * 6
    assert store.index.stats(first).num_slabs == 3


def test_a_namespace_takes_slabs_only_if_they_are_older_than_its_own_blocks(store: Store) -> None:
    first, second = store.index.open(LARGE, PLENTY), store.index.open(LARGE, PLENTY)
    store.put(first, "a")
    store.put(second, "a")
    store.put(first, "b")
    store.put(second, "b")
    assert store.put(second, "c") == [DONE]  # the oldest is first's
    assert store.found(first, "ab") == [False, True]
    assert store.put(second, "d") == [DONE]  # the oldest is its own
    assert store.found(second, "abcd") == [False, True, True, True]
    assert store.found(first, "b") == [True]


def test_a_slab_with_a_leased_or_reserved_block_is_not_taken(store: Store) -> None:
    first, second = store.index.open(THIRD, PLENTY), store.index.open(LARGE, PLENTY)
    store.put(first, range(11))
    slots, _, _ = lease(store, first, *range(0, 9, 3))
    reserved = store.index.reserve(first, keys_of(["x"]))[1]
    assert store.put(second, "a") == [NO_ROOM]
    store.index.abort(reserved)
    assert store.put(second, "ab") == [DONE, NO_ROOM]
    assert store.found(first, range(9)) == [True] * 9
    store.index.release(slots)
    assert store.put(second, "cd") == [DONE, DONE]


def test_empty_slabs_are_free_for_other_namespaces(store: Store) -> None:
    first, second = store.index.open(THIRD, PLENTY), store.index.open(LARGE, PLENTY)
    store.put(first, range(12))
    store.index.remove(first, keys_of(range(12)))
    assert store.index.num_free_slabs == 4
    assert store.put(second, "abcd") == [DONE] * 4
    assert store.index.stats(first).num_evicted == 0


def test_a_slab_that_is_given_back_takes_no_memory_from_its_neighbours() -> None:
    """Slabs of the smallest size."""
    with each_row() as row:
        for slab in range(3):
            with row(slab):
                store = Store(num_slabs=3, slab_bytes=8192)
                namespace = store.index.open(64, PLENTY)
                _, _, blocks_per_slab = store.index.geometry(namespace)
                names = range(3 * blocks_per_slab)
                store.put(namespace, names)
                given_back = names[slab * blocks_per_slab : (slab + 1) * blocks_per_slab]
                store.index.remove(namespace, keys_of(given_back))
                assert store.index.num_free_slabs == 1
                store.check()
                assert store.found(namespace, names) == [name not in given_back for name in names]


def test_removed_keys_are_recorded_in_order(store: Store) -> None:
    first, second = store.index.open(LARGE, PLENTY), store.index.open(LARGE, PLENTY)
    store.put(first, "x")
    store.index.remove(first, keys_of("x"))
    assert store.index.take_removed() == []
    store.index.record_removed(True)
    store.put(first, "ab")
    store.put(second, "cde")
    store.index.remove(second, keys_of("e"))
    store.index.abort(store.index.reserve(second, keys_of("f"))[1])
    assert store.index.take_removed() == [(first, key_of("b")), (second, key_of("e"))]
    assert store.index.take_removed() == []


def test_only_a_namespace_without_blocks_is_closed(store: Store) -> None:
    namespace = store.index.open(THIRD, PLENTY)
    slots = store.index.reserve(namespace, keys_of("a"))[1]
    with pytest.raises(RuntimeError, match="has blocks"):
        store.index.close(namespace)
    store.index.abort(slots)
    store.index.close(namespace)
    assert store.index.open(THIRD, PLENTY) != namespace


def test_totals_are_the_sums_and_keep_the_evictions_of_closed_namespaces(store: Store) -> None:
    first, second = store.index.open(LARGE, 2 * LARGE), store.index.open(THIRD, PLENTY)
    store.put(first, "ab")
    store.put(first, "c")
    store.put(second, "a")
    totals = store.index.totals()
    assert (totals.num_blocks, totals.num_slabs, totals.used_bytes) == (3, 3, 2 * LARGE + THIRD)
    store.index.clear(first, 10)
    store.index.close(first)
    assert store.index.totals().num_evicted == 1


def test_many_keys_come_and_go() -> None:
    """The table grows, and deletions keep the other keys findable."""
    store = Store(64, 1 << 20)
    namespace = store.index.open(64, PLENTY)
    for begin in range(0, 60_000, 2000):
        assert store.put(namespace, range(begin, begin + 2000)) == [DONE] * 2000
    assert all(store.found(namespace, range(60_000)))
    assert store.index.remove(namespace, keys_of(range(0, 60_000, 3))) == 20_000
    assert store.found(namespace, range(60_000)) == [i % 3 != 0 for i in range(60_000)]
    store.check()


WRONG_SLOTS: dict[str, Callable[[Store, bytes], object]] = {
    "release of a free slot": lambda store, _: store.index.release(pack([3 << 32])),
    "release of a slot outside": lambda store, _: store.index.release(pack([99 << 32])),
    "release of an index outside": lambda store, _: store.index.release(pack([2000])),
    "release without a lease": lambda store, slots: store.index.release(slots),
    "commit of a committed block": lambda store, slots: store.index.commit(slots, slots),
    "abort of a committed block": lambda store, slots: store.index.abort(slots),
    "checksum of a free slot": lambda store, _: store.index.checksums(pack([3 << 32])),
}


def test_wrong_slots_are_refused() -> None:
    with each_row() as row:
        for what, call in WRONG_SLOTS.items():
            with row(what):
                store = Store(num_slabs=4, slab_bytes=SLAB_BYTES)
                namespace = store.index.open(THIRD, PLENTY)
                slots = store.index.reserve(namespace, keys_of("a"))[1]
                store.index.commit(slots, slots)
                with pytest.raises(RuntimeError, match="slot"):
                    call(store, slots)
                assert store.found(namespace, "a") == [True]
                store.check()


def test_a_check_works_in_slices(store: Store) -> None:
    namespace = store.index.open(THIRD, PLENTY)
    store.put(namespace, range(12))
    assert [store.index.check(4) for _ in range(5)] == [False, False, False, True, False]
    assert isinstance(store.index, _ext.StoreIndex)


def test_a_namespace_shrinks_to_a_lower_quota_as_it_stores(store: Store) -> None:
    """Its least recently used blocks give way, two for each new one. Leased ones stay."""
    namespace = store.index.open(64, PLENTY)
    store.put(namespace, range(8))
    slots, _, _ = lease(store, namespace, 0)
    store.index.set_quota(namespace, 4 * 64)
    assert store.index.stats(namespace).num_blocks == 8
    for name, left in (("a", 7), ("b", 6), ("c", 5), ("d", 4), ("e", 4)):
        assert store.put(namespace, name) == [DONE]
        assert store.index.stats(namespace).num_blocks == left
    assert store.found(namespace, [0, *"abcde"]) == [True, False, False, True, True, True]
    store.index.release(slots)
    store.index.set_quota(namespace, PLENTY)
    store.put(namespace, "fg")
    assert store.index.stats(namespace).num_blocks == 6
    store.check()


def test_blocks_come_only_where_the_memory_is(store: Store) -> None:
    """Slabs behind it that have blocks, those of a process before, keep them, and are free no earlier than others."""
    index = store.index
    index.set_ready(2 * SLAB_BYTES + 1)
    strides = store.memory.view(np.uint32)[STRIDE_BYTE // 4 :: SLAB_BYTES // 4]
    assert (strides.tolist(), index.num_free_slabs) == ([1, 1, 0, 0], 2)
    namespace = index.open(LARGE, PLENTY)
    statuses, slots, offsets = index.reserve(namespace, keys_of("abcd"))
    assert [offset // SLAB_BYTES for offset in unpack(offsets)] == [0, 1]
    assert list(statuses) == [DONE, DONE, NO_ROOM, NO_ROOM]
    index.commit(slots, slots)
    store.check()
    index.set_ready(store.num_bytes)
    assert store.put(namespace, "cd") == [DONE, DONE]
    assert store.found(namespace, "abcd") == [True] * 4
    store.check()

    store.restart(2)
    index = store.index
    index.recover([(namespace, LARGE, PLENTY)])
    index.set_ready(store.slab_bytes)
    assert store.found(namespace, "abcd") == [True] * 4
    assert index.remove(namespace, keys_of("ad")) == 2
    store.check()
    assert index.num_free_slabs == 1
    assert store.put(namespace, "e") == [DONE]
    assert store.found(namespace, "abcde") == [False, True, True, False, True]
    index.set_ready(store.num_bytes)
    assert store.put(namespace, "f") == [DONE]
    assert store.found(namespace, "bcef") == [True] * 4
    store.check()


def test_more_memory_than_there_is_is_refused(store: Store) -> None:
    for num_bytes in (-1, store.num_bytes + store.slab_bytes):
        with pytest.raises(InvalidArgumentError) as caught:
            store.index.set_ready(num_bytes)
        assert caught.value.field == "num_bytes"
    assert store.index.num_free_slabs == 4
