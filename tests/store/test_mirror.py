"""What a client sees of the store's index in its memory, and leases there, as the index itself has it."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from store_rig import DONE, NO_ROOM, Store, bits, key_of, keys_of, pack, unpack

from kvservice import _ext
from kvservice.client.store import memory as memory_module
from kvservice.client.store.memory import Geometry, MappedStore, StoreChanges
from kvservice.client.store.values import split_keys
from kvservice.errors import InvalidArgumentError

SLAB_BYTES, NUM_SLABS = 16384, 4
PLENTY, ALL = 1 << 40, 1 << 30
THIRD = 4096  # a slab has three blocks of this size
RECORD_BYTES, LEASE_BYTE = 64, 60
# Units of time of a shared lease, and how many it lasts.
UNIT_MS, LIFETIME = 16, 10_000 // 16


class View:
    """A mirror of a namespace."""

    def __init__(self, store: Store, namespace: int) -> None:
        place = store.index.geometry(namespace)
        self.mirror = _ext.StoreMirror(store.address, store.num_bytes, store.slab_bytes, *place, namespace)
        self._versions: dict[int, int] = {}

    def found(self, names: Iterable[object]) -> list[bool]:
        listed = list(names)
        self.mirror.refresh(ALL)
        return bits(self.mirror.find(keys_of(listed), False)[0], len(listed))

    def lease(self, names: Iterable[object]) -> bytes:
        """Lease blocks that are there. Returns their offsets."""
        listed = list(names)
        self.mirror.refresh(ALL)
        found, offsets, versions = self.mirror.lease(keys_of(listed), False)
        assert all(bits(found, len(listed)))
        self._versions |= zip(unpack(offsets), unpack(versions), strict=True)
        return offsets

    def renew(self, offsets: bytes) -> bool:
        return self.mirror.renew(offsets, self._of(offsets))

    def release(self, offsets: bytes) -> None:
        self.mirror.release(offsets, self._of(offsets))

    def _of(self, offsets: bytes) -> bytes:
        return pack(self._versions.get(offset, 1) for offset in unpack(offsets))


class Looked:
    """A MappedStore that tells changes."""

    def __init__(self, view: View) -> None:
        self._mirror = view.mirror

    def changes(self) -> tuple[list[bytes], list[bytes], bool]:
        self._mirror.refresh(ALL)
        gone, come, is_all = self._mirror.take_changes()
        return split_keys(gone), split_keys(come), is_all


@pytest.fixture
def store() -> Store:
    return Store(num_slabs=NUM_SLABS, slab_bytes=SLAB_BYTES)


def opened(store: Store, block_bytes: int = THIRD, quota_bytes: int = PLENTY) -> tuple[int, View]:
    namespace = store.index.open(block_bytes, quota_bytes)
    return namespace, View(store, namespace)


def age(store: Store, namespace: int, offset: int, units: int) -> None:
    """Let the shared lease of a block be older."""
    first_block, stride, _ = store.index.geometry(namespace)
    slab = offset // SLAB_BYTES * SLAB_BYTES
    start = slab + (offset - slab - first_block) // stride * RECORD_BYTES + LEASE_BYTE
    word = store.memory[start : start + 4].view("<u4")
    word[0] = (int(word[0]) & 0xFF) | ((int(word[0]) >> 8) - units) % (1 << 24) << 8


def test_a_look_that_sees_all_now_sees_every_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if these have few blocks each: a slab counts as one record more."""
    one = SLAB_BYTES - 8192
    store = Store(num_slabs=64, slab_bytes=SLAB_BYTES)
    namespace = store.index.open(one, PLENTY)
    first_block, stride, per_slab = store.index.geometry(namespace)
    assert per_slab == 1
    place = Geometry(one, SLAB_BYTES, first_block, stride, per_slab, namespace, has_tiers=False)
    mapped = MappedStore(store.map, place, True, 1, (0, 0))
    for most, tells_now in ((128, True), (127, False), (64, False)):
        monkeypatch.setattr(memory_module, "LOOKED_AT", most)
        assert mapped.tells_now == tells_now
    monkeypatch.setattr(memory_module, "LOOKED_AT", 128)
    for name in range(64):
        assert store.put(namespace, [name]) == [DONE]
        found = mapped.find(key_of(name), max_age_s=0.0)
        assert found is not None
        assert found.all()


def test_committed_blocks_are_seen_as_the_index_has_them(store: Store) -> None:
    namespace, view = opened(store)
    _, slots, _ = store.index.reserve(namespace, keys_of("ab"))
    assert view.found("ab") == [False, False]
    store.index.commit(slots, slots)
    assert view.found("axb") == [True, False, True]
    keys = keys_of("ab")
    _, _, offsets, versions = store.index.acquire(namespace, keys, False)
    assert view.mirror.find(keys, False)[1:] == (offsets, versions)
    found, offsets, _ = view.mirror.find(keys_of("axb"), True)
    assert (bits(found, 3), len(offsets)) == ([True, False, False], 8)


def test_what_has_gone_is_not_seen_without_looking_again(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, "ab")
    assert view.found("ab") == [True, True]
    store.index.remove(namespace, keys_of("a"))
    assert bits(view.mirror.find(keys_of("ab"), False)[0], 2) == [False, True]


def test_looking_takes_the_slabs_in_turn(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(3 * NUM_SLABS))
    counts = [view.mirror.refresh(1) for _ in range(NUM_SLABS)]
    assert counts == [3, 6, 9, 12]


def test_namespaces_see_their_own_blocks(store: Store) -> None:
    """Slabs go from one to another, with other geometries."""
    (first, one), (second, other) = opened(store), opened(store, 64)
    store.put(first, range(12))
    assert one.found(range(12)) == [True] * 12
    store.put(second, range(300))
    assert other.found(range(300)) == store.found(second, range(300))
    assert one.found(range(12)) == store.found(first, range(12))
    assert sum(one.found(range(12))) < 12


def test_leased_blocks_are_passed_over_until_the_lease_ends(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(12))
    offsets = view.lease(range(12))
    assert store.put(namespace, ["new"]) == [NO_ROOM]
    assert store.found(namespace, range(12)) == [True] * 12
    view.release(offsets[:8])
    assert store.put(namespace, ["new"]) == [DONE]
    assert store.found(namespace, range(12)) == [False] + [True] * 11
    store.check()


def test_two_leases_of_a_block_end_one_after_the_other(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(12))
    offsets = view.lease(range(12))
    second = View(store, namespace).lease(range(12))
    view.release(offsets)
    assert store.put(namespace, ["new"]) == [NO_ROOM]
    view.release(second)
    assert store.put(namespace, ["new"]) == [DONE]


def test_a_lease_that_is_not_renewed_ends_by_itself(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(12))
    offsets = view.lease(range(12))
    for offset in unpack(offsets):
        age(store, namespace, offset, LIFETIME - 100)
    assert view.renew(offsets)
    for offset in unpack(offsets):
        age(store, namespace, offset, LIFETIME - 100)
    assert store.put(namespace, ["new"]) == [NO_ROOM]
    for offset in unpack(offsets):
        age(store, namespace, offset, 200)
    assert not view.renew(offsets)
    assert store.put(namespace, ["new"]) == [DONE]


def test_leases_of_others_a_moment_later_count(store: Store) -> None:
    """A clock may have been read before another one that gave a lease its time."""
    namespace, view = opened(store)
    store.put(namespace, range(12))
    offsets = view.lease(range(12))
    for offset in unpack(offsets):
        age(store, namespace, offset, -20)
    second = View(store, namespace)
    again = second.lease(range(12))
    assert view.renew(offsets)
    assert store.put(namespace, ["new"]) == [NO_ROOM]
    second.release(again)
    assert store.put(namespace, ["new"]) == [NO_ROOM]
    # Removed ones wait for the end, each for its own.
    store.index.remove(namespace, keys_of([0, 1]))
    assert store.index.stats(namespace).num_condemned == 2
    view.release(offsets[8:])
    assert store.index.stats(namespace).num_condemned == 1
    view.release(offsets[:8])
    assert store.index.stats(namespace).num_condemned == 0


def test_the_end_of_a_lost_lease_changes_nothing(store: Store) -> None:
    """Where the record was there may be bytes of another namespace's block."""
    (first, one), (second, _) = opened(store, 64), opened(store)
    store.put(first, range(128 * NUM_SLABS))
    offsets = one.lease(range(128 * NUM_SLABS))
    for offset in unpack(offsets):
        age(store, first, offset, LIFETIME + 100)
    assert store.put(second, range(3 * NUM_SLABS)) == [DONE] * 3 * NUM_SLABS
    before = store.memory.copy()
    one.release(offsets)
    assert not one.renew(offsets)
    assert (store.memory == before).all()


def test_a_lease_keeps_a_slab_from_another_namespace(store: Store) -> None:
    (first, one), (second, _) = opened(store), opened(store, 64)
    store.put(first, range(12))
    offsets = one.lease([0, 3, 6, 9])  # of each slab one
    assert store.put(second, ["a"]) == [NO_ROOM]
    one.release(offsets[8:16])
    assert store.put(second, ["a"]) == [DONE]
    assert store.found(first, range(12)) == [True] * 3 + [False] * 3 + [True] * 6
    store.check()


def test_a_lower_quota_passes_leased_blocks_over(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(6))
    offsets = view.lease([0, 1])
    store.index.set_quota(namespace, 3 * THIRD)
    store.put(namespace, ["new"])
    assert store.found(namespace, [0, 1, "new"]) == [True] * 3
    view.release(offsets)
    store.check()


@pytest.mark.parametrize("call", ["remove", "clear"])
def test_a_leased_block_that_is_removed_keeps_its_bytes(store: Store, call: str) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(12))
    offsets = view.lease([3])
    versions = store.versions(namespace, offsets)
    if call == "remove":
        assert store.index.remove(namespace, keys_of(range(12))) == 12
    else:
        assert store.index.clear(namespace, 12) == 12
    assert view.found([3]) == [False]
    store.put(namespace, range(100, 112))
    assert store.versions(namespace, offsets) == versions
    assert sum(store.found(namespace, range(100, 112))) == 11
    store.check()
    view.release(offsets)
    store.check()
    assert store.put(namespace, ["last"]) == [DONE]
    assert store.versions(namespace, offsets) != versions
    assert store.index.stats(namespace).num_condemned == 0


def test_the_daemons_lease_of_a_removed_block_ends_before_the_shared_one(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(12))
    slots, _ = store.index.acquire(namespace, keys_of([3]), False)[1:3]
    offsets = view.lease([3])
    versions = store.versions(namespace, offsets)
    store.index.remove(namespace, keys_of([3]))
    store.index.release(slots)
    store.put(namespace, ["new"])
    assert store.versions(namespace, offsets) == versions
    view.release(offsets)
    assert store.put(namespace, ["last"]) == [DONE]
    assert store.versions(namespace, offsets) != versions
    store.check()


def test_leases_outlive_the_daemon(store: Store) -> None:
    """Leases of removed blocks do, too. A block that the process before was about to evict is seen again."""
    namespace, view = opened(store)
    store.put(namespace, range(12))
    offsets = view.lease([0, 1])
    store.index.remove(namespace, keys_of([1]))
    first_block, _, _ = store.index.geometry(namespace)
    hidden = 2 * RECORD_BYTES  # the third block of the first slab
    assert first_block > hidden
    store.memory[hidden : hidden + 8] = 0
    assert view.found([2]) == [False]
    versions = store.versions(namespace, offsets)
    store.restart(seed=2)
    _, condemned = store.index.recover([(namespace, THIRD, PLENTY)])
    store.index.release(condemned)
    assert view.found([0, 1, 2]) == [True, False, True]
    store.put(namespace, range(100, 112))
    assert store.versions(namespace, offsets) == versions
    store.check()


def test_changes_are_told_from_the_first_call_on(store: Store) -> None:
    namespace, view = opened(store)
    store.put(namespace, range(6))
    view.mirror.refresh(ALL)

    def changes() -> tuple[set[bytes], set[bytes], bool]:
        view.mirror.refresh(ALL)
        gone, come, is_all = view.mirror.take_changes()
        return set(split_keys(gone)), set(split_keys(come)), is_all

    assert changes() == (set(), set(map(key_of, range(6))), True)
    store.put(namespace, [6])
    store.index.remove(namespace, keys_of([0]))
    assert changes() == ({key_of(0)}, {key_of(6)}, False)
    # One that has come and gone was never seen, and one that has gone and come is in both lists.
    store.put(namespace, ["short"])
    store.index.remove(namespace, keys_of(["short", 1]))
    store.put(namespace, ["other", 1])
    assert changes() == ({key_of(1)}, {key_of(1), key_of("other")}, False)
    assert changes() == (set(), set(), False)
    # Two looks between two calls.
    store.put(namespace, ["seen"])
    view.mirror.refresh(ALL)
    store.index.remove(namespace, keys_of(["seen"]))
    assert changes() == ({key_of("seen")}, set(), False)


def test_offsets_that_are_not_of_blocks_are_refused(store: Store) -> None:
    _, view = opened(store)
    for offset in (0, SLAB_BYTES * NUM_SLABS, 1 << 63):
        with pytest.raises(InvalidArgumentError, match="offsets"):
            view.renew(offset.to_bytes(8, "little"))
    with pytest.raises(InvalidArgumentError, match="blocks_per_slab"):
        _ext.StoreMirror(store.address, store.num_bytes, SLAB_BYTES, 4096, 4096, 4, 1)


def test_scribbled_records_change_nothing_in_the_index(store: Store) -> None:
    """A client that may write to the memory can only deceive itself and those that look there."""
    namespace, view = opened(store)
    store.put(namespace, range(12))
    draw = random.Random(0)
    for _ in range(200):
        slab, record = draw.randrange(NUM_SLABS), draw.randrange(3)
        start = slab * SLAB_BYTES + record * RECORD_BYTES
        store.memory[start : start + 56] = list(draw.randbytes(56))
        found, offsets, _ = view.mirror.find(keys_of(range(12)), False)
        assert sum(bits(found, 12)) == len(offsets) // 8
        view.mirror.refresh(ALL)
        store.put(namespace, [draw.randrange(1000)])
        store.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_changes(seed: int) -> None:
    """Beside leases that come and go, the mirror always sees what the index has, and what is leased stays."""
    draw = random.Random(seed)
    store = Store(num_slabs=6, slab_bytes=SLAB_BYTES, seed=seed)
    sizes = [THIRD, 64, 4097]
    numbers = [store.index.open(size, PLENTY) for size in sizes]
    views = [View(store, number) for number in numbers]
    leases: list[tuple[int, bytes, bytes]] = []
    told = StoreChanges(lambda: Looked(views[0]))
    there: set[bytes] = set()
    for _ in range(1500):
        which = draw.randrange(len(sizes))
        names = [draw.randrange(40) for _ in range(draw.randint(1, 8))]
        match draw.randrange(6):
            case 0 | 1:
                store.put(numbers[which], names)
            case 2:
                store.index.remove(numbers[which], keys_of(names))
            case 3:
                store.index.touch(numbers[which], keys_of(names))
            case 4:
                views[which].mirror.refresh(ALL)
                _, offsets, versions = views[which].mirror.lease(keys_of(names), False)
                leases.append((which, offsets, versions))
            case _:
                if leases:
                    ended, offsets, versions = leases.pop(draw.randrange(len(leases)))
                    views[ended].mirror.release(offsets, versions)
        assert views[which].found(range(40)) == store.found(numbers[which], range(40))
        if which == 0:
            gone, come = told.take()
            assert there.issuperset(gone)
            assert there.isdisjoint(come)
            there = there.difference(gone).union(come)
            found = store.found(numbers[0], range(40))
            assert there == {key_of(name) for name in range(40) if found[name]}
        for leased, places, expected in leases:
            assert store.versions(numbers[leased], places) == unpack(expected)
        if not draw.randrange(300):
            store.restart(seed=draw.randrange(100))
            _, condemned = store.index.recover(
                [(number, size, PLENTY) for number, size in zip(numbers, sizes, strict=True)]
            )
            store.index.release(condemned)
    store.check()
