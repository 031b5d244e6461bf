"""Metrics of the daemon itself: its build, its calls and connections, its restarts and its transfers."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric

from kvservice.kept.report import OUTCOMES, RestartReport
from kvservice.metrics.families import buckets, counter, counters, gauge, gauges, histogram
from kvservice.telemetry.calls import BUCKETS_S, Key
from kvservice.telemetry.figures import DIRECTIONS, ServerStats, TransferReading, TransferStats
from kvservice.telemetry.reading import Reading

CONFIG_LABELS = (
    "device", "dtype", "kv_cache_dtype", "block_size", "num_layers", "num_kv_heads", "head_size", "prefix_caching",
)  # fmt: skip


def about_metrics(info: Mapping[str, object]) -> Iterator[Metric]:
    version = {"version": str(info["version"]), "python": platform.python_version()}
    yield InfoMetricFamily(
        "kvservice_build", "Always 1; the labels are the versions of the daemon and of Python.", version
    )
    config = {name: str(info[name]).lower() for name in CONFIG_LABELS}
    yield InfoMetricFamily("kvservice_config", "Always 1; the labels are the device and the pool's shape.", config)


# ---- metrics of connections and refused calls


def access_metrics(server: ServerStats, http_refusals: Mapping[str, int], max_connections: int) -> Iterator[Metric]:
    """`http_refusals`: HTTP requests that were refused, by what they asked for."""
    connections = {"unix": server.open_unix_connections, "tcp": server.open_tcp_connections}
    yield gauges("connections", "Open gRPC connections, counted every 10 seconds.", "address", connections.items())
    yield gauge("capacity_connections", "Most gRPC connections of an address: max_connections.", max_connections)
    yield counter("tcp_connections", "Connections over TCP that a call was accepted on.", server.tcp_connections)
    yield counter(
        "tls_handshakes", "TLS handshakes that gRPC clients began, failed ones included.", server.tls_handshakes
    )
    closed = {
        "connections": server.closed_over_limit,
        "no_call": server.closed_without_call,
        "bytes": server.closed_for_bytes,
    }
    yield counters(
        "closed_connections",
        "gRPC connections that the daemon closed: their peer had too many, made no call in time, or sent much without "
        "one.",
        "cause",
        closed.items(),
    )
    causes = {
        "missing_token": server.missing_tokens,
        "malformed_token": server.malformed_tokens,
        "unknown_token": server.unknown_tokens,
        "foreign_session": server.foreign_sessions,
    }
    yield counters(
        "refused_calls",
        "Calls over TCP refused for a missing or wrong token, and calls refused for naming another's session.",
        "cause",
        causes.items(),
    )
    yield counters(
        "http_refused_requests",
        "HTTP requests refused for lack of a token or because of their Host header, by what they asked for.",
        "target",
        http_refusals.items(),
    )


# ---- metrics of call latency


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


# ---- metrics of restarts: how often the daemon was started, and what it took over


def restart_metrics(report: RestartReport) -> Iterator[Metric]:
    totals = report.totals
    yield gauge(
        "kept",
        "1 if a keeper or systemd keeps the memory, so that sequences and caches outlive the daemon's process.",
        report.is_kept,
    )
    yield counters(
        "restarts",
        "Restarts by the end of the process before: a signal, an exit status, a fault of the device, or an "
        "upgrade. They are counted as long as the memory is kept.",
        "cause",
        totals.by_cause.items(),
    )
    yield gauges(
        "last_start",
        "1 for what the latest start found: nothing (first start), state that it took over, or state that it refused.",
        "outcome",
        ((outcome.replace(" ", "_"), outcome == report.outcome) for outcome in OUTCOMES),
    )
    yield gauge(
        "last_restart_down_seconds",
        "Time from the end of the process before to the start of serving, 0 before the first restart.",
        report.down_s,
    )
    yield gauge(
        "last_restart_take_over_seconds", "The part of it that opened and checked the kept state.", report.take_over_s
    )
    yield gauges("restart_kept", "What the latest restart took over.", "what", asdict(report.kept).items())
    yield gauges(
        "restart_lost",
        "What the latest restart lost: sequences that an operation was changing, open steps, schedulers.",
        "what",
        asdict(report.lost).items(),
    )
    yield counter("restart_lost_sequences", "Sequences lost by all restarts.", totals.lost_sequences)


# ---- metrics of transfers between the daemon and clients on other hosts


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
