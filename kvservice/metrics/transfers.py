"""Metrics of transfers between the daemon and clients on other hosts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from kvservice.metrics.families import buckets, counter, counters, gauge, gauges
from kvservice.telemetry.calls import BUCKETS_S
from kvservice.telemetry.reading import Reading
from kvservice.telemetry.transfers import DIRECTIONS, TransferReading, TransferStats

_GAUGES = {
    "engines": ("transfer_engines", "Transfer engines that run. Each remote region has one until it fails."),
    "regions": ("transfer_regions", "Remote regions: memory of clients that engines read and write."),
    "region_bytes": ("transfer_region_bytes", "Memory of the daemon that carries the bytes of remote regions."),
}
_COUNTERS = {
    "engine_failures": ("transfer_engine_failures", "Transfer engines that did not start."),
    "damaged_blocks": (
        "transfer_blocks_damaged",
        "Blocks of clients that arrived with another checksum. They are not stored.",
    ),
    "fallbacks": (
        "transfer_fallbacks",
        "Calls of clients over TCP that carried 1 MiB of blocks or K/V, or more, in messages: their engine or the "
        "daemon's has failed, or they have none.",
    ),
    "fallback_bytes": ("transfer_fallback_bytes", "Bytes of the blocks in these messages."),
}


def transfer_metrics(reading: Reading) -> Iterator[Metric]:
    """Yield nothing if the daemon has no transfer engines."""
    if reading.transfers is None:
        return
    stats = reading.transfers.stats
    for field, (name, text) in _GAUGES.items():
        yield gauge(name, text, getattr(stats, field))
    running = ((direction, getattr(stats, f"running_{direction}")) for direction in DIRECTIONS)
    yield gauges("transfers_running", "Transfers in progress: in from clients, out to clients.", "direction", running)
    yield _ended(stats)
    num_bytes = ((direction, getattr(stats, f"bytes_{direction}")) for direction in DIRECTIONS)
    yield counters("transfer_bytes", "Bytes of the transfers that ended well.", "direction", num_bytes)
    yield _durations(reading.transfers)
    for field, (name, text) in _COUNTERS.items():
        yield counter(name, text, getattr(stats, field))


def _ended(stats: TransferStats) -> Metric:
    text = "Transfers that have ended, each of the blocks of one call: done, or failed."
    family = CounterMetricFamily("kvservice_transfers", text, labels=["direction", "outcome"])
    for direction in DIRECTIONS:
        for outcome in ("done", "failed"):
            family.add_metric([direction, outcome], getattr(stats, f"{outcome}_{direction}"))
    return family


def _durations(transfers: TransferReading) -> Metric:
    text = "Time of the transfers that ended well, with the copies between the engine's memory and the daemon's."
    family = HistogramMetricFamily("kvservice_transfer_duration_seconds", text, labels=["direction"])
    rows = zip(DIRECTIONS, transfers.counts.tolist(), transfers.seconds.tolist(), strict=True)
    for direction, counts, seconds in rows:
        family.add_metric([direction], buckets(BUCKETS_S, counts), seconds)
    return family
