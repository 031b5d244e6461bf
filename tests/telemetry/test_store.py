"""The figures that the block store counts."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from blocks_rig import BLOCK_BYTES, Rig, identity, keys, make
from manual_clock import ManualClock


@pytest.fixture
def rig() -> Iterator[Rig]:
    clock, memory = ManualClock(), mmap.mmap(-1, 4 * 16384)
    yield make("native", 4, memory, clock)
    clock.close()


def test_figures_of_a_model(rig: Rig) -> None:
    first, other = rig.store.open(identity("m", "a")), rig.store.open(identity("m", "b"))
    rig.put(first, 1, 2)
    rig.put(other, 1)
    rig.store.lookup(other, keys(1, 2))
    rig.store.acquire(first, keys(1))
    rig.store.reserve(first, keys(9))
    (figures,) = rig.store.figures().values()
    assert asdict(figures) == {
        "namespaces": 2, "blocks": 3, "leased": 1, "reserved": 1, "quarantined": 0, "used_bytes": 4 * BLOCK_BYTES,
        "quota_bytes": 8 * 16384, "hits": 1, "misses": 1,
        "read": 1, "read_bytes": BLOCK_BYTES, "stored": 3, "stored_bytes": 3 * BLOCK_BYTES, "evicted": 0, "refused": 0,
        "corrupt": 0, "removed": 0, "evicted_misses": 0, "not_whole_misses": 0, "other_namespace_misses": 1,
        "never_stored_misses": 0,
    }  # fmt: skip


def test_the_counters_account_for_every_block(rig: Rig) -> None:
    namespace = rig.store.open(identity("m"))
    rig.put(namespace, *range(12))
    rig.put(namespace, 12)
    rig.store.remove(namespace, keys(0, 12, 99))
    rig.store.remove_corrupt(namespace, keys(5, 5), rig.store.hold(namespace, keys(5, 5)).slots)
    figures = rig.store.figures()["m"]
    assert (figures.evicted, figures.corrupt, figures.removed) == (1, 1, 2)
    assert figures.stored - figures.evicted - figures.corrupt - figures.removed == figures.blocks == 9
    for _ in rig.store.clear_in_slices(namespace):
        pass
    figures = rig.store.figures()["m"]
    assert (figures.removed, figures.blocks) == (11, 0)


def test_counters_outlive_a_namespace(rig: Rig) -> None:
    namespace = rig.store.open(identity("m"))
    rig.put(namespace, *range(12))
    rig.put(namespace, 12)
    rig.store.remove(namespace, keys(*range(13)))
    rig.store.leave(namespace)
    for name in "abc":
        rig.store.leave(rig.open(name))
    assert [one.identity.model for one in rig.store] == ["a", "b", "c"]
    figures = rig.store.figures()
    assert list(figures) == ["m", "a", "other"], "at most two models, and all others"
    assert (figures["m"].namespaces, figures["m"].stored, figures["m"].evicted) == (0, 13, 1)
    assert figures["other"].namespaces == 2
