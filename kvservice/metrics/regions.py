"""Gauges of shared-memory regions, read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class RegionCollector(Collector):
    """Counts what is open: also what is unregistered and still in use."""

    def __init__(self, count: Callable[[], int], num_bytes: Callable[[], int]) -> None:
        self._count = count
        self._num_bytes = num_bytes

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("kvservice_regions", "Shared-memory regions of all sessions.", self._count())
        yield GaugeMetricFamily("kvservice_region_bytes", "Bytes of shared-memory regions.", self._num_bytes())
