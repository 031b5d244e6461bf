"""Helpers that build prometheus-client's metric families."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

# Pairs of (label value, metric value) for one label.
Labelled = Iterable[tuple[str, float]]


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvservice_{name}", text, value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """Return a counter. `name` is without `_total`, which prometheus-client appends."""
    return CounterMetricFamily(f"kvservice_{name}", text, value)


def gauges(name: str, text: str, label: str, values: Labelled) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"kvservice_{name}", text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def counters(name: str, text: str, label: str, values: Labelled) -> CounterMetricFamily:
    family = CounterMetricFamily(f"kvservice_{name}", text, labels=[label])
    for key, value in values:
        family.add_metric([key], value)
    return family


def buckets(bounds_s: Iterable[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return Prometheus's cumulative buckets. `counts` has the calls per bucket, the last one above all bounds."""
    names = [*(str(bound) for bound in bounds_s), "+Inf"]
    return list(zip(names, itertools.accumulate(counts), strict=True))


def histogram(
    name: str, text: str, bounds_s: Iterable[float], counts: Sequence[int], seconds: float
) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"kvservice_{name}", text, buckets(bounds_s, counts), seconds)
