"""Lanes and the calls that they carried, read when Prometheus asks: the threads that serve them count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

# Calls, those of them that ended in an error, calls in each bucket of seconds and above the last, seconds of all.
LaneStats = tuple[int, int, list[int], float]


class LaneCollector(Collector):
    def __init__(self, count: Callable[[], int], stats: Callable[[], LaneStats], buckets_s: Sequence[float]) -> None:
        self._count = count
        self._stats = stats
        self._bounds = [*(str(bound) for bound in buckets_s), "+Inf"]

    def collect(self) -> Iterator[Metric]:
        _, errors, counts, seconds = self._stats()
        yield GaugeMetricFamily("kvservice_lanes", "Open lanes of all sessions.", self._count())
        yield CounterMetricFamily("kvservice_lane_errors", "Calls over lanes that ended in an error.", errors)
        yield HistogramMetricFamily(
            "kvservice_lane_call_duration_seconds",
            "Time from taking a call from a lane's ring to its answer.",
            list(zip(self._bounds, itertools.accumulate(counts), strict=True)),
            seconds,
        )
