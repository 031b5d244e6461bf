"""The figures of the tiers below the block store, from the daemon to the metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from observed_pool import ObservedPool

from kvservice.metrics.spill import spill_metrics
from kvservice.metrics.tiers import tier_metrics
from kvservice.telemetry.figures import FiguresTable, SavedStats, read_figures
from kvservice.telemetry.tiers import MAX_TIERS, TierTable, read_tiers
from kvservice.tiers.protocol import STATES, TierStats
from kvservice.tiers.spill_stats import SpillStats

NUMBERS = TierStats._fields[2:]
DISK = TierStats("disk", "open", *range(100, 100 + len(NUMBERS)))
MOONCAKE = TierStats("mooncake", "suspended", num_values=3)


def arrays_of(*tiers: TierStats) -> dict[str, npt.NDArray[Any]]:
    arrays: dict[str, npt.NDArray[Any]] = {}

    def zeros(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        arrays[name] = np.zeros(shape, dtype)
        return arrays[name]

    table = TierTable(zeros)
    table.write([DISK] * MAX_TIERS)
    table.write(tiers)
    return arrays


def test_the_shared_arrays_have_every_figure() -> None:
    assert read_tiers(arrays_of(DISK, MOONCAKE)) == (DISK, MOONCAKE)
    assert read_tiers(arrays_of()) == ()
    most = tuple(TierStats(f"tier {state}", state) for state in STATES)
    assert len(most) == MAX_TIERS
    assert read_tiers(arrays_of(*most)) == most
    (read,) = read_tiers(arrays_of(DISK._replace(used_bytes=(1 << 53) - 1, read_s=0.25)))
    assert (read.used_bytes, read.read_s) == ((1 << 53) - 1, 0.25)
    assert [type(value) for value in read] == [type(default) for default in ("", *TierStats._field_defaults.values())]


def samples(*tiers: TierStats) -> list[Any]:
    reading = dataclasses.replace(ObservedPool().reader.read(), tiers=tiers)
    each = (sample for family in tier_metrics(reading) for sample in family.samples)
    return [(sample.name, sample.labels, sample.value) for sample in each]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_metrics_show_every_figure(name: str) -> None:
    figures: dict[str, Any] = {name: 999}
    changed, before = samples(DISK._replace(**figures), MOONCAKE), samples(DISK, MOONCAKE)
    ((_, labels, value),) = [now for now, then in zip(changed, before, strict=True) if now != then]
    assert (labels, value) == ({"tier": "disk"}, 999)


@pytest.mark.parametrize("state", STATES)
def test_one_state_is_1_and_the_others_are_0(state: str) -> None:
    found = {labels["state"]: value for name, labels, value in samples(DISK._replace(state=state)) if "state" in name}
    assert found == {other: other == state for other in STATES}


def test_a_tier_that_does_not_know_its_size_has_no_capacity() -> None:
    bounded = [labels["tier"] for name, labels, _ in samples(DISK, MOONCAKE) if name.endswith("capacity_bytes")]
    assert bounded == ["disk"]


def test_a_daemon_without_tiers_has_no_metrics_of_them() -> None:
    assert samples() == []


SPILL = SpillStats(*range(100, 100 + len(SpillStats._fields)))
SAVED = SavedStats(*range(200, 200 + len(SavedStats._fields)))


@pytest.mark.parametrize("figures", [SPILL, SAVED], ids=["spill", "saved"])
def test_a_part_is_there_once_it_has_been_written(figures: Any) -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}

    def zeros(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        arrays[name] = np.zeros(shape, dtype)
        return arrays[name]

    table = FiguresTable("part", type(figures), zeros)
    assert read_figures(arrays, "part", type(figures)) is None
    table.write(figures)
    read: Any = read_figures(arrays, "part", type(figures))
    assert read == figures
    assert [type(value) for value in read] == [type(value) for value in type(figures)()]


def spill_samples(spill: SpillStats | None, saved: SavedStats | None) -> list[Any]:
    reading = dataclasses.replace(ObservedPool().reader.read(), spill=spill, saved=saved)
    each = (sample for family in spill_metrics(reading) for sample in family.samples)
    return [(sample.name, sample.labels, sample.value) for sample in each]


@pytest.mark.parametrize("name", [*SpillStats._fields, *SavedStats._fields])
def test_the_metrics_show_every_figure_of_spilled_blocks_and_saved_sessions(name: str) -> None:
    figures: dict[str, Any] = {name: 999}
    spill = SPILL._replace(**figures) if name in SpillStats._fields else SPILL
    saved = SAVED._replace(**figures) if name in SavedStats._fields else SAVED
    changed, before = spill_samples(spill, saved), spill_samples(SPILL, SAVED)
    ((_, labels, value),) = [now for now, then in zip(changed, before, strict=True) if now != then]
    assert value == 999
    assert set(labels.values()) <= {name}


def test_a_daemon_without_these_parts_has_no_metrics_of_them() -> None:
    assert spill_samples(None, None) == []
    assert all("spill" in name for name, *_ in spill_samples(SPILL, None))
    assert all("sessions" in name for name, *_ in spill_samples(None, SAVED))
