"""Short ways to prometheus-client's metric families."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

# One label's values, and what each of them has.
Labelled = Iterable[tuple[str, float]]


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvservice_{name}", text, value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """Without `_total`, which is added."""
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
    """Cumulative, as Prometheus has them, from calls in each bucket and above the last bound."""
    names = [*(str(bound) for bound in bounds_s), "+Inf"]
    return list(zip(names, itertools.accumulate(counts), strict=True))


def histogram(
    name: str, text: str, bounds_s: Iterable[float], counts: Sequence[int], seconds: float
) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"kvservice_{name}", text, buckets(bounds_s, counts), seconds)
