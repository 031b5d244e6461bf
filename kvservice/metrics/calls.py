"""Metrics of call latency."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from prometheus_client.core import HistogramMetricFamily, Metric

from kvservice.metrics.families import buckets, counter, gauge, histogram
from kvservice.telemetry.calls import BUCKETS_S, Key
from kvservice.telemetry.reading import Reading


def call_metrics(reading: Reading, keys: Sequence[Key], lane_buckets_s: Sequence[float]) -> Iterator[Metric]:
    """`keys` are the keys of the rows of `reading.call_counts`."""
    yield _rpcs(reading, keys)
    server = reading.server
    yield gauge("calls_in_flight", "RPCs in flight.", server.calls_in_flight)
    yield counter("lane_errors", "Calls over lanes that ended in an error.", server.lane_errors)
    yield histogram(
        "lane_call_duration_seconds",
        "Time from taking a call from a lane's ring to its answer; calls over lanes are not RPCs.",
        lane_buckets_s,
        reading.lane_counts,
        server.lane_busy_s,
    )


def event_loop_metric(counts: Sequence[int], seconds: float) -> Metric:
    """`counts`: of the buckets of RPCs and above the last; `seconds`: their sum."""
    text = "Time until the daemon's event loop answers the observer, measured once a second."
    return histogram("event_loop_latency_seconds", text, BUCKETS_S, counts, seconds)


def _rpcs(reading: Reading, keys: Sequence[Key]) -> Metric:
    """Return the histogram of RPC durations, with the label combinations that have occurred."""
    family = HistogramMetricFamily(
        "kvservice_rpc_duration_seconds",
        "Time from a call's arrival to its answer, without the network.",
        labels=["method", "status", "transport"],
    )
    for row in np.flatnonzero(reading.call_counts.any(axis=1)).tolist():
        counts = reading.call_counts[row].tolist()
        family.add_metric(keys[row], buckets(BUCKETS_S, counts), float(reading.call_seconds[row]))
    return family
