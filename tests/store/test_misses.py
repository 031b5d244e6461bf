"""Why lookups of the store miss blocks."""

from __future__ import annotations

import dataclasses
import random

from blocks_rig import BLOCKS_PER_SLAB, Rig, identity, keys

from kvservice.store import GhostKeys, StoredNamespace

REASONS = ("evicted", "not_whole", "other_namespace", "never_stored")
ROOM = 4 * BLOCKS_PER_SLAB


def reasons(namespace: StoredNamespace) -> dict[str, int]:
    """Return the reasons that were counted for the namespace's model, and how often."""
    counted = {reason: getattr(namespace.counters, f"{reason}_misses") for reason in REASONS}
    return {reason: number for reason, number in counted.items() if number}


def test_the_first_missing_block_of_a_lookup_has_its_reason_counted_once(rig: Rig) -> None:
    namespace = rig.store.open(identity("m"))
    rig.put(namespace, 1, 2)
    for wanted in (keys(1, 2), keys(), keys(1, 8, 9), keys(7)):
        rig.store.lookup(namespace, wanted)
    assert reasons(namespace) == {"never_stored": 2}
    rig.store.lookup(namespace, keys(7), counted=False)
    rig.store.lookup(namespace, keys(7), explained=False)
    assert reasons(namespace) == {"never_stored": 2}


def test_what_has_left_the_store_counts_as_evicted(rig: Rig) -> None:
    """It was evicted, removed or cleared, or its whole namespace gave way."""
    namespace = rig.store.open(identity("m"))
    rig.put(namespace, *range(ROOM))
    rig.put(namespace, 100, 101)
    for missing in (10, 11):  # of a batch, the last block goes first
        rig.store.lookup(namespace, keys(missing))
    assert reasons(namespace) == {"evicted": 2}
    rig.store.remove(namespace, keys(5))
    rig.store.lookup(namespace, keys(5))
    for _ in rig.store.clear_in_slices(namespace):
        pass
    rig.store.lookup(namespace, keys(9))
    assert reasons(namespace) == {"evicted": 4}
    rig.put(namespace, 20)
    rig.store.leave(namespace)
    for name in "abc":
        rig.put(other := rig.open(name), 1)
        rig.store.leave(other)
    assert not rig.store.has(namespace)
    again = rig.open("m")
    rig.store.lookup(again, keys(20))
    assert reasons(again) == {"evicted": 5}


def test_keys_of_other_namespaces_and_of_other_ranks(rig: Rig) -> None:
    """What was evicted here counts as evicted, wherever else it is."""
    one = dataclasses.replace(identity("m"), tp_size=2)
    first, second = rig.store.open(one), rig.store.open(dataclasses.replace(one, tp_rank=1))
    newer = rig.store.open(dataclasses.replace(one, layout="of another vLLM"))
    rig.put(newer, 1, 2)
    rig.put(second, 2, 3)
    rig.store.lookup(first, keys(1))
    assert reasons(first) == {"other_namespace": 1}
    rig.store.lookup(first, keys(2))
    rig.store.lookup(first, keys(3))
    assert reasons(first) == {"other_namespace": 1, "not_whole": 2}
    rig.put(first, 3)
    rig.store.remove(first, keys(3))
    rig.store.lookup(first, keys(3))
    assert reasons(first) == {"other_namespace": 1, "not_whole": 2, "evicted": 1}


def test_reports_of_clients_that_see_the_memory_themselves(rig: Rig) -> None:
    """They say which blocks some ranks have. All ranks may have stored a block since it was missing."""
    one = dataclasses.replace(identity("m"), tp_size=2)
    first, second = rig.store.open(one), rig.store.open(dataclasses.replace(one, tp_rank=1))
    other = rig.store.open(identity("m", "other weights"))
    rig.put(first, 1)
    rig.put(second, 1, 2)
    rig.put(other, 3)
    rig.put(first, 4)
    rig.store.remove(first, keys(4))
    rig.store.count(first, 0, 0, 0, keys(1, 2, 3, 4, 5), 6)
    assert reasons(first) == {"never_stored": 3, "other_namespace": 1, "evicted": 1, "not_whole": 6}


def test_the_record_of_what_has_left_is_bounded_and_hardly_ever_wrong(rig: Rig) -> None:
    """Keys that differ in few bits have places of their own, too."""
    namespace, other = rig.store.open(identity("m")), rig.store.open(identity("n"))
    ghosts, draws = GhostKeys(), random.Random(0)
    random_keys = [draws.randbytes(32) for _ in range(20_000)]
    counted = [number.to_bytes(32, "big") for number in range(20_000)]
    for gone, never in ((random_keys[:10_000], random_keys[10_000:]), (counted[:10_000], counted[10_000:])):
        ghosts.add(namespace, b"".join(gone))
        assert sum(ghosts.have(namespace, b"".join(gone))) > 9700
        assert not any(ghosts.have(namespace, b"".join(never)))
        assert not any(ghosts.have(other, b"".join(gone)))
