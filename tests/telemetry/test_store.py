"""The figures of the block store, from the store to the metrics."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from blocks_rig import BLOCK_BYTES, Rig, identity, keys, make
from manual_clock import ManualClock
from no_schedulers import NO_SCHEDULERS

from kvservice.blocks import BlocksStats
from kvservice.blocks.slices import finish
from kvservice.metrics.store import store_metrics
from kvservice.store.figures import ModelFigures
from kvservice.telemetry.daemon_stats import ServerStats
from kvservice.telemetry.reading import Reading
from kvservice.telemetry.store import StoreTable, read_store

FIGURES = ModelFigures(*range(100, 100 + len(ModelFigures._fields)))


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
    assert figures._asdict() == {
        "namespaces": 2, "blocks": 3, "leased": 1, "reserved": 1, "quarantined": 0, "used_bytes": 4 * BLOCK_BYTES,
        "quota_bytes": 8 * 16384, "hits": 1, "misses": 1,
        "read": 1, "read_bytes": BLOCK_BYTES, "stored": 3, "stored_bytes": 3 * BLOCK_BYTES, "evicted": 0, "refused": 0,
        "corrupt": 0, "removed": 0,
    }  # fmt: skip


def test_the_counters_account_for_every_block(rig: Rig) -> None:
    namespace = rig.store.open(identity("m"))
    rig.put(namespace, *range(12))
    rig.put(namespace, 12)
    rig.store.remove(namespace, keys(0, 12, 99))
    rig.store.remove_corrupt(namespace, keys(5, 5))
    figures = rig.store.figures()["m"]
    assert (figures.evicted, figures.corrupt, figures.removed) == (1, 1, 2)
    assert figures.stored - figures.evicted - figures.corrupt - figures.removed == figures.blocks == 9
    finish(rig.store.clear_in_slices(namespace))
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


def arrays_of(num_bytes: int, figures: dict[str, ModelFigures]) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}

    def zeros(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        arrays[name] = np.zeros(shape, dtype)
        return arrays[name]

    StoreTable(num_bytes, 3, zeros).write(figures)
    return arrays


def test_the_shared_arrays_have_every_figure() -> None:
    written = {"ü" * 256: FIGURES, "": ModelFigures(), "other": FIGURES}
    assert read_store(arrays_of(7, written)) == (7, written)
    assert read_store(arrays_of(0, {})) == (0, {})


def samples(num_bytes: int, figures: ModelFigures) -> list[Any]:
    none = np.zeros((3, 20), np.int64)
    models = {"m": figures}
    reading = Reading(
        0.0,
        BlocksStats(),
        ServerStats(),
        [0, 0],
        none,
        np.zeros(3),
        none,
        np.zeros(3),
        [],
        {},
        num_bytes,
        models,
        NO_SCHEDULERS,
    )
    each = (sample for family in store_metrics(reading) for sample in family.samples)
    return [(sample.name, sample.labels, sample.value) for sample in each]


@pytest.mark.parametrize("name", ModelFigures._fields)
def test_the_metrics_show_every_figure(name: str) -> None:
    changed = [now for now, before in zip(samples(1, FIGURES._replace(**{name: 999})), samples(1, FIGURES), strict=True)
               if now != before]  # fmt: skip
    ((_, labels, value),) = changed
    assert (labels, value) == ({"model": "m"}, 999)


def test_a_daemon_without_a_store_has_no_metrics_of_it() -> None:
    assert samples(0, FIGURES) == []
