"""The figures of transfers between hosts, from the daemon to the metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from observed_pool import ObservedPool

from kvservice.metrics.transfers import transfer_metrics
from kvservice.telemetry.calls import BUCKETS_S, WIDTH
from kvservice.telemetry.transfers import (
    DIRECTIONS,
    TransferReading,
    TransferStats,
    TransferTable,
    read_transfers,
)

STATS = TransferStats(*range(100, 100 + len(TransferStats._fields)))
COUNTS = np.arange(2 * WIDTH).reshape(2, WIDTH)
SECONDS = np.array([0.25, 0.5])


def test_the_shared_arrays_have_every_figure() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}

    def zeros(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        arrays[name] = np.zeros(shape, dtype)
        return arrays[name]

    table = TransferTable(zeros)
    assert read_transfers(arrays) is None
    table.write(STATS, COUNTS, SECONDS)
    found = read_transfers(arrays)
    assert found is not None
    assert found.stats == STATS
    np.testing.assert_array_equal(found.counts, COUNTS)
    np.testing.assert_array_equal(found.seconds, SECONDS)
    table.write(TransferStats(), 0 * COUNTS, 0 * SECONDS)
    assert found.counts.any(), "a reading is a copy"


def samples(stats: TransferStats | None) -> list[Any]:
    transfers = None if stats is None else TransferReading(stats, COUNTS, SECONDS)
    reading = dataclasses.replace(ObservedPool().reader.read(), transfers=transfers)
    each = (sample for family in transfer_metrics(reading) for sample in family.samples)
    return [(sample.name, sample.labels, sample.value) for sample in each]


@pytest.mark.parametrize("name", TransferStats._fields)
def test_the_metrics_show_every_figure(name: str) -> None:
    figures: dict[str, Any] = {name: 999}
    changed, before = samples(STATS._replace(**figures)), samples(STATS)
    ((_, labels, value),) = [now for now, then in zip(changed, before, strict=True) if now != then]
    assert value == 999
    assert set(labels.values()) <= set(name.split("_"))


def test_durations_are_a_histogram_for_each_direction() -> None:
    rows = [row for row in samples(STATS) if row[0].startswith("kvservice_transfer_duration_seconds")]
    for row, direction in enumerate(DIRECTIONS):
        own = {(name, labels.get("le")): value for name, labels, value in rows if labels["direction"] == direction}
        assert own["kvservice_transfer_duration_seconds_sum", None] == SECONDS[row]
        assert own["kvservice_transfer_duration_seconds_count", None] == COUNTS[row].sum()
        assert own["kvservice_transfer_duration_seconds_bucket", str(BUCKETS_S[1])] == COUNTS[row, :2].sum()


def test_a_daemon_without_engines_has_no_metrics_of_them() -> None:
    assert samples(None) == []
