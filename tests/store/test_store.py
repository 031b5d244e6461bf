"""Namespaces of the block store, its counters and its events."""

from __future__ import annotations

import pytest
from blocks_rig import (
    BLOCK_BYTES,
    BLOCKS_PER_SLAB,
    SLAB_BYTES,
    SMALL_BYTES,
    SMALL_PER_SLAB,
    Rig,
    finish,
    identity,
    keys,
    rig_of,
)
from each_row import each_row

from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.store import BEING_WRITTEN, DONE, NO_ROOM, PRESENT, check_keys
from kvservice.store.store import CLEARED_BLOCKS

# More blocks than are removed or checked in one slice.
MANY = range(40 * SMALL_PER_SLAB)


def test_what_is_stored_is_found_in_its_namespace_only(rig: Rig) -> None:
    first, other, tenant = (rig.store.open(one) for one in (identity("a"), identity("b"), identity("a", "t")))
    rig.put(first, 1, 2)
    assert rig.store.lookup(first, keys(1, 2, 3)) == (2, b"\x03")
    assert rig.store.lookup(first, keys(3, 1)) == (0, b"\x02")
    for namespace in (other, tenant):
        assert rig.store.lookup(namespace, keys(1, 2)) == (0, b"\0")
        assert rig.store.acquire(namespace, keys(1, 2)).slots == b""


def test_a_tenant_keeps_within_its_slabs() -> None:
    """Its oldest blocks go first: slabs of namespaces that nobody uses, then blocks of the same namespace."""
    with rig_of(16) as rig:
        mine, unused, other = (
            rig.store.open(one) for one in (identity("a", "t"), identity("b", "t"), identity("a", "u"))
        )
        rig.store.leave(unused)
        rig.store.tenant_limits = {"t": 3 * SLAB_BYTES - 1}
        assert rig.put(other, *range(8)) == bytes([DONE] * 8), "another tenant's do not count"
        rig.put(unused, 1, 2)
        assert rig.put(mine, 1, 2, 3) == bytes([DONE] * 3)
        assert rig.store.bytes_by_tenant() == {"t": 2 * SLAB_BYTES, "u": 3 * SLAB_BYTES}
        assert rig.put(mine, 1, 4, 5) == bytes([PRESENT, DONE, DONE])
        assert not rig.store.stats(unused).num_blocks
        assert rig.put(mine, 6) == bytes([DONE]), "there is a free slot"
        assert rig.store.lookup(mine, keys(*range(1, 7)))[0] == 6
        assert rig.put(mine, 3, 7) == bytes([PRESENT, DONE])
        assert rig.store.lookup(mine, keys(*range(1, 8)))[1] == bytes([0b1111101]), "the oldest that was not put again"
        leased = rig.store.acquire(mine, keys(1, 3, 4, 5))
        with pytest.raises(QuotaExceededError) as refused:
            rig.put(mine, 8, 9, 10)
        numbers = {key: int(refused.value.metadata[key]) / SLAB_BYTES for key in ("used", "required")}
        assert numbers == {"used": 2, "required": 1}
        assert refused.value.metadata["value"] == str(3 * SLAB_BYTES - 1)
        assert (refused.value.metadata["tenant"], refused.value.metadata["limit"]) == ("t", "max_store_bytes")
        assert rig.store.lookup(mine, keys(1, 3, 4, 5, 6, 7))[0] == 6, "nothing was evicted for it"
        assert rig.put(mine, 8, 9) == bytes([DONE] * 2)
        # Leased blocks, and those that are being written already, are not needed twice.
        assert rig.put(mine, 1, 3, 10) == bytes([PRESENT, PRESENT, DONE])
        rig.store.release(leased.slots)
        being_written = rig.store.reserve(mine, keys(*range(11, 17)))
        assert rig.store.reserve(mine, keys(*range(11, 17))).statuses == bytes([BEING_WRITTEN] * 6)
        rig.store.abort(being_written.slots)
        assert rig.store.bytes_by_tenant() == {"u": 3 * SLAB_BYTES, "t": 0}
        assert rig.put(other, *range(8)) == bytes([PRESENT] * 8)
        finish(rig.store.check_in_slices())


def test_a_tenant_is_charged_for_the_slabs_that_it_takes() -> None:
    """Small blocks, and few in each of many namespaces, take more memory than their bytes."""
    with rig_of(16, max_namespaces=20) as rig:
        other = rig.store.open(identity("o", "u"))
        rig.put(other, *range(15 * BLOCKS_PER_SLAB))
        rig.store.tenant_limits = {"t": SLAB_BYTES}
        tiny = rig.store.open(identity("a", "t", block_bytes=1))
        for first in range(0, 4096, 64):
            assert rig.put(tiny, *range(first, first + 64)) == bytes([DONE] * 64)
        assert (rig.store.stats(tiny).num_blocks, rig.store.stats(tiny).num_slabs) == (SMALL_PER_SLAB, 1)
        for number in range(16):
            assert rig.put(rig.store.open(identity(f"b{number}", "t")), 1) == bytes([DONE])
            assert rig.store.bytes_by_tenant()["t"] == SLAB_BYTES
        assert rig.store.stats(other).num_blocks == 15 * BLOCKS_PER_SLAB


def test_blocks_that_were_removed_under_a_lease_leave_others_evictable() -> None:
    with rig_of(16) as rig:
        mine = rig.store.open(identity("a", "t"))
        rig.store.tenant_limits = {"t": 2 * SLAB_BYTES}
        rig.put(mine, *range(6))
        leased = rig.store.acquire(mine, keys(0, 1, 2))
        assert rig.store.remove(mine, keys(0, 1, 2)) == 3
        assert rig.store.num_storable(mine, 9) == 3
        assert rig.put(mine, 6, 7, 8) == bytes([DONE] * 3)
        with pytest.raises(QuotaExceededError):
            rig.put(mine, *range(10, 14))
        rig.store.release(leased.slots)
        assert rig.put(mine, *range(10, 14)) == bytes([DONE] * 4)


def test_a_tenant_shrinks_to_a_lower_limit() -> None:
    """As many slabs of the namespace go as leave room for what is put, then those of others in use."""
    with rig_of(16) as rig:
        mine, used = rig.store.open(identity("a", "t")), rig.store.open(identity("b", "t"))
        rig.put(used, *range(6))
        rig.put(mine, *range(12))
        leased = rig.store.acquire(mine, keys(0))
        rig.store.tenant_limits = {"t": 2 * SLAB_BYTES}
        assert rig.put(mine, 0, 20) == bytes([PRESENT, DONE])
        assert (rig.store.stats(mine).num_slabs, rig.store.stats(used).num_slabs) == (1, 1)
        assert rig.store.lookup(mine, keys(0, 20))[0] == 2
        rig.store.tenant_limits = {"t": 0}
        assert rig.put(mine, 20) == bytes([PRESENT])
        assert rig.put(mine, 21) == bytes([DONE]), "a block without a further slab"
        with pytest.raises(QuotaExceededError):
            rig.put(mine, *range(30, 36))
        assert (rig.store.stats(mine).num_slabs, rig.store.stats(used).num_slabs) == (1, 0)
        rig.store.release(leased.slots)


def test_a_call_evicts_a_bounded_number_of_blocks_for_a_tenant() -> None:
    """Whatever their size: keys beyond have no room yet."""
    with rig_of(81) as rig:
        small, large = rig.store.open(identity("a", "t", SMALL_BYTES)), rig.store.open(identity("b", "t"))
        num_blocks = 80 * SMALL_PER_SLAB
        rig.put(small, *range(num_blocks))
        rig.store.leave(small)
        rig.store.tenant_limits = {"t": 80 * SLAB_BYTES}
        numbers = range(40 * BLOCKS_PER_SLAB)
        num_done = CLEARED_BLOCKS // SMALL_PER_SLAB * BLOCKS_PER_SLAB
        assert rig.put(large, *numbers) == bytes([DONE] * num_done + [NO_ROOM] * (len(numbers) - num_done))
        assert rig.store.stats(small).num_blocks == num_blocks - CLEARED_BLOCKS
        assert rig.put(large, *numbers).count(DONE) == len(numbers) - num_done
        assert rig.store.bytes_by_tenant()["t"] == 80 * SLAB_BYTES
        left = rig.store.stats(small).num_blocks
        rig.store.tenant_limits = {"t": SLAB_BYTES}
        rig.put(large, 1000)
        assert rig.store.stats(small).num_blocks == left - CLEARED_BLOCKS


def test_one_identity_is_one_namespace(rig: Rig) -> None:
    first = rig.store.open(identity())
    assert rig.store.open(identity()) is first
    assert first.num_users == 2
    assert first.blocks_per_slab == BLOCKS_PER_SLAB
    rig.store.leave(first)
    assert first.num_users == 1


def test_a_block_must_fit_a_slab(rig: Rig) -> None:
    with each_row() as row:
        for block_bytes in (0, 16384 - 4096 + 1, 1 << 63):
            with row(block_bytes):
                with pytest.raises(InvalidArgumentError) as refused:
                    rig.store.open(identity(block_bytes=block_bytes))
                assert refused.value.field == "namespace.block_bytes"
                assert list(rig.store) == []
        for block_bytes in (1, 16384 - 4096):
            with row(block_bytes):
                namespace = rig.store.open(identity(block_bytes=block_bytes))
                assert rig.put(namespace, 1) == bytes([DONE])


def test_an_unused_namespace_gives_way_to_another_one(rig: Rig) -> None:
    """One without blocks, or else the one that was opened or left before the others."""
    used, older, newer = (rig.open(name) for name in "abc")
    for namespace in (older, newer):
        rig.put(namespace, 1, 2)
    with pytest.raises(QuotaExceededError) as refused:
        rig.open("d")
    assert refused.value.metadata == {"limit": "max_store_namespaces", "value": "3"}
    for namespace in (newer, older):
        rig.store.leave(namespace)
    rig.store.leave(rig.open("c"))
    assert rig.open("d").num_users == 1
    assert [one.identity.model for one in rig.store] == ["a", "c", "d"]
    rig.store.remove(newer, keys(1, 2))
    rig.store.leave(used)
    rig.put(used, 5)
    assert rig.open("e").num_users == 1
    assert [one.identity.model for one in rig.store] == ["d", "a", "e"]
    assert rig.store.lookup(used, keys(5)) == (1, b"\x01")
    assert rig.store.totals().num_blocks == 1
    assert rig.store.figures()["b"].evicted == 2
    finish(rig.store.check_in_slices())


def test_a_namespace_that_gives_way_is_cleared(rig: Rig) -> None:
    namespaces = [rig.open(name) for name in "abc"]
    rig.put(namespaces[0], 1)
    rig.store.leave(namespaces[0])
    rig.open("d")
    assert rig.events() == [("stored", keys(1)), ("cleared", b"")]
    rig.store.leave(namespaces[1])
    assert rig.store.lookup(rig.open("a"), keys(1)) == (0, b"\0")


def test_a_namespace_that_is_opened_while_it_gives_way_stays() -> None:
    """It loses blocks, and the next one gives way."""
    with rig_of(2 * len(MANY) // SMALL_PER_SLAB) as rig:
        first, second, _ = (rig.store.open(identity(name, block_bytes=SMALL_BYTES)) for name in "abc")
        for namespace in (first, second):
            rig.put(namespace, *MANY)
            rig.store.leave(namespace)
        steps = rig.store.make_place(identity("d"))
        next(steps)
        assert 0 < rig.store.stats(first).num_blocks < len(MANY)
        assert rig.store.open(first.identity) is first
        finish(steps)
        assert [one.identity.model for one in rig.store] == ["c", "a"]
        assert (rig.store.stats(first).num_blocks, first.num_users) == (0, 1)


def test_a_namespace_with_blocks_in_use_does_not_give_way(rig: Rig) -> None:
    namespaces = [rig.open(name) for name in "abc"]
    reserved = rig.store.reserve(namespaces[0], keys(1))
    rig.put(namespaces[1], 1)
    pinned = rig.store.acquire(namespaces[1], keys(1))
    rig.store.remove(namespaces[1], keys(1))
    for namespace in namespaces[:2]:
        rig.store.leave(namespace)
    with pytest.raises(QuotaExceededError):
        rig.open("d")
    rig.store.abort(reserved.slots)
    rig.store.release(pinned.slots)
    for name in "de":
        rig.open(name)


def test_the_quota_of_a_namespace(rig: Rig) -> None:
    namespace = rig.store.open(identity(), 2 * BLOCK_BYTES)
    rig.put(namespace, 1, 2, 3)
    assert rig.store.stats(namespace).num_blocks == 2
    assert rig.store.figures()["m"].quota_bytes == 2 * BLOCK_BYTES
    rig.store.open(identity())
    assert namespace.quota_bytes == 2 * BLOCK_BYTES
    rig.store.open(identity(), 1 << 50)
    assert namespace.quota_bytes == rig.store.config.quota_bytes
    rig.put(namespace, 4, 5)
    assert rig.store.stats(namespace).num_blocks == 4
    for model in ("m", "n"):
        with pytest.raises(InvalidArgumentError) as refused:
            rig.store.open(identity(model), BLOCK_BYTES - 1)
        assert refused.value.field == "quota_bytes"
    assert namespace.num_users == 3
    assert len(list(rig.store)) == 1


def test_statuses_and_the_keys_that_got_room(rig: Rig) -> None:
    namespace = rig.store.open(identity())
    rig.put(namespace, 1)
    reserved = rig.store.reserve(namespace, keys(1, 2, 2, 3))
    assert reserved.statuses == bytes([PRESENT, DONE, BEING_WRITTEN, DONE])
    assert reserved.keys == keys(2, 3)
    assert len(reserved.slots) == len(reserved.offsets) == 16


def test_counters(rig: Rig) -> None:
    namespace = rig.store.open(identity())
    rig.put(namespace, 1, 2)
    rig.store.lookup(namespace, keys(1, 2, 3))
    rig.store.release(rig.store.acquire(namespace, keys(1, 3)).slots)
    rig.store.lookup(namespace, keys(1, 3), counted=False)
    rig.store.release(rig.store.acquire(namespace, keys(1, 2), counted=False).slots)
    rig.store.reserve(namespace, keys(*range(10, 30)))
    counters = namespace.counters
    assert (counters.hits, counters.misses, counters.read, counters.stored) == (2, 1, 1, 2)
    # Twelve blocks fit; the two that were there could be evicted.
    assert counters.refused == 20 - 4 * BLOCKS_PER_SLAB
    assert rig.store.stats(namespace).num_evicted == 2


def test_no_room_while_everything_is_leased(rig: Rig) -> None:
    namespace = rig.store.open(identity())
    everything = range(4 * BLOCKS_PER_SLAB)
    rig.put(namespace, *everything)
    pinned = rig.store.acquire(namespace, keys(*everything))
    assert rig.put(namespace, 100) == bytes([NO_ROOM])
    rig.store.release(pinned.slots)
    assert rig.put(namespace, 100) == bytes([DONE])


def test_events_say_what_is_there(rig: Rig) -> None:
    namespace = rig.store.open(identity())
    rig.put(namespace, *range(12))
    rig.put(namespace, 20)
    rig.store.remove(namespace, keys(3, 50))
    expected = [("stored", keys(*range(12))), ("removed", keys(11)), ("stored", keys(20)), ("removed", keys(3))]
    assert rig.events() == expected
    assert finish(rig.store.clear_in_slices(namespace)) == 11
    assert rig.events()[4:] == [("cleared", b"")]


def test_blocks_stored_while_it_is_cleared_stay() -> None:
    another = len(MANY)
    with rig_of(len(MANY) // SMALL_PER_SLAB + 1) as rig:
        namespace = rig.store.open(identity(block_bytes=SMALL_BYTES))
        rig.put(namespace, *MANY)
        clearing = rig.store.clear_in_slices(namespace)
        next(clearing)
        rig.put(namespace, another)
        rig.store.leave(namespace)
        assert namespace.num_users == 1, "it is not replaced meanwhile"
        assert finish(clearing) == len(MANY)
        assert namespace.num_users == 0
        assert rig.store.stats(namespace).num_blocks == 1
        assert rig.store.lookup(namespace, keys(another)) == (1, b"\x01")
        assert rig.events()[1:3] == [("cleared", b""), ("stored", keys(another))]


def test_the_index_is_checked_to_its_end_in_slices() -> None:
    with rig_of(len(MANY) // SMALL_PER_SLAB) as rig:
        rig.put(rig.store.open(identity(block_bytes=SMALL_BYTES)), *MANY)
        for _ in range(2):  # the next check begins anew
            assert len(list(rig.store.check_in_slices())) == 1


def test_corrupt_blocks_are_removed_and_counted(rig: Rig) -> None:
    namespace = rig.store.open(identity())
    rig.put(namespace, 1, 2)
    corrupt = rig.store.hold(namespace, keys(1, 2))
    rig.store.remove(namespace, keys(1))
    rig.put(namespace, 1)  # meanwhile
    rig.store.remove_corrupt(namespace, keys(1, 2), corrupt.slots)
    rig.store.release(corrupt.slots)
    assert namespace.counters.corrupt == 1
    assert rig.store.lookup(namespace, keys(1, 2)) == (1, b"\x01")


def test_keys_have_32_bytes() -> None:
    for num_bytes in (1, 31, 33):
        with pytest.raises(InvalidArgumentError) as refused:
            check_keys(bytes(num_bytes))
        assert refused.value.field == "keys", num_bytes
    assert check_keys(bytes(64)) == 2
