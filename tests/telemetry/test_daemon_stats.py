"""Each figure of BlocksStats and ServerStats reaches everything that is made from them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from no_schedulers import NO_SCHEDULERS
from prometheus_client import generate_latest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from kvservice.blocks import BlocksStats
from kvservice.blocks.stats import BlockCounters
from kvservice.metrics.access import access_metrics
from kvservice.metrics.calls import call_metrics
from kvservice.metrics.holders import holder_metrics
from kvservice.metrics.pool import pool_metrics
from kvservice.server.codec import stats_response
from kvservice.telemetry.daemon_stats import DaemonStatsTable, ServerStats
from kvservice.telemetry.reading import Reading
from kvservice.v1 import inspect_pb2, pool_pb2

BLOCKS = BlocksStats(*range(100, 100 + len(BlocksStats._fields)))
SERVER = ServerStats(*range(200, 200 + len(ServerStats._fields)))
# The histogram of calls over lanes counts them.
NO_METRIC = {"lane_calls"}


def test_the_counters_are_in_the_list() -> None:
    assert {field.name for field in dataclasses.fields(BlockCounters)} < set(BlocksStats._fields)


def test_the_response_has_every_figure_that_it_names() -> None:
    response = stats_response(BLOCKS, 7)
    expected = BLOCKS._asdict() | {"sessions": 7}
    for name in pool_pb2.GetStatsResponse.DESCRIPTOR.fields_by_name:
        assert getattr(response, name) == expected[name], name


def test_a_snapshot_names_figures_that_exist() -> None:
    assert set(inspect_pb2.PoolSnapshot.DESCRIPTOR.fields_by_name) <= {*BlocksStats._fields, *ServerStats._fields}
    assert not set(BlocksStats._fields) & set(ServerStats._fields)


def test_the_shared_arrays_have_every_figure() -> None:
    arrays: dict[str, npt.NDArray[Any]] = {}

    def zeros(name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        arrays[name] = np.zeros(shape, dtype)
        return arrays[name]

    DaemonStatsTable(2, zeros).write(BLOCKS, SERVER, [1, 2])
    assert BlocksStats(*arrays["block_stats"].tolist()) == BLOCKS
    assert ServerStats(*arrays["server_stats"].tolist()) == SERVER
    assert arrays["lane_counts"].tolist() == [1, 2]


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def exposition(blocks: BlocksStats, server: ServerStats) -> bytes:
    """Return the metrics page of these figures."""
    none = np.zeros((3, 20), np.int64)
    reading = Reading(0.0, blocks, server, [0, 0], none, np.zeros(3), none, np.zeros(3), [], {}, 0, {}, NO_SCHEDULERS)
    metrics = [
        *pool_metrics(reading, 16, {}),
        *holder_metrics(reading, 1, 0, 0),
        *access_metrics(server, {}, 0),
        *call_metrics(reading, [], [1.0]),
    ]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(metrics))
    return generate_latest(registry)


@pytest.mark.parametrize("name", [*BlocksStats._fields, *sorted(set(ServerStats._fields) - NO_METRIC)])
def test_the_metrics_show_every_figure(name: str) -> None:
    changed = BLOCKS._replace(**{name: 999}) if name in BlocksStats._fields else BLOCKS
    server = SERVER if name in BlocksStats._fields else SERVER._replace(**{name: 999})
    assert exposition(changed, server) != exposition(BLOCKS, SERVER)
