"""Metrics of restarts: how often the daemon was started, and what it took over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import Metric

from kvservice.kept.report import OUTCOMES, RestartReport
from kvservice.metrics.families import counter, counters, gauge, gauges


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
