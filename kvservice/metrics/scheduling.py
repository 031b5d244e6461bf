"""Metrics of the schedulers: queues, preemptions, tokens, and their latencies."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvservice.metrics.families import counter, counters, gauge, gauges, histogram
from kvservice.scheduler.stats import BUCKETS_S
from kvservice.telemetry.reading import Reading
from kvservice.telemetry.scheduling import BETWEEN_TOKENS, FIRST_TOKEN

_COUNTERS = {
    "steps": ("steps", "Steps that schedulers opened."),
    "added": ("requests_added", "Requests added to schedulers."),
    "refused": ("requests_refused", "Requests that a scheduler refused when they were added."),
    "stalls": ("stalls", "Steps that running sequences missed for want of a block; each sequence counts."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "cached_tokens": ("cached_tokens", "Prompt tokens of admitted requests that the prefix cache had."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed again after preemptions."),
    "generated_tokens": ("generated_tokens", "Tokens that engines sampled, accepted proposals included."),
    "proposed_tokens": ("proposed_tokens", "Draft tokens that engines verified (speculative decoding)."),
    "accepted_tokens": ("accepted_tokens", "Draft tokens that turned out to be right."),
}
_LATENCIES = (
    (FIRST_TOKEN, "first_token_seconds", "Time from adding a request to the report of a sample's first token."),
    (
        BETWEEN_TOKENS,
        "between_tokens_seconds",
        "Time from report to report of a sequence's tokens, also over a preemption. A report may bring several.",
    ),
)


def scheduler_metrics(reading: Reading) -> Iterator[Metric]:
    """Yield the metrics of all schedulers. `holder_metrics` has the metrics of a session."""
    schedulers = reading.schedulers
    totals = schedulers.totals
    yield gauge("schedulers", "Sessions with a scheduler.", schedulers.num_open)
    states = {state: getattr(totals, state) for state in ("waiting", "running", "swapped", "stalled")}
    yield gauges(
        "scheduler_requests",
        "Requests of all schedulers by state: waiting for their first tokens or after a preemption; running; swapped "
        "out; stalled, running ones that the latest batch left out for want of a block. Each sample "
        "counts, but those of a waiting request count once.",
        "state",
        states.items(),
    )
    for field, (name, text) in _COUNTERS.items():
        yield counter(f"scheduler_{name}", text, getattr(totals, field))
    ended = {"finished": totals.finished, "aborted": totals.aborted}
    yield counters("scheduler_requests_ended", "Requests that finished or were aborted.", "reason", ended.items())
    preempted = {"recompute": totals.recompute_preemptions, "swap": totals.swap_preemptions}
    yield counters(
        "scheduler_preemptions",
        "Running requests that lost their place, to be computed again or swapped back in.",
        "kind",
        preempted.items(),
    )
    for row, name, text in _LATENCIES:
        counts, seconds = schedulers.token_counts[row].tolist(), float(schedulers.token_seconds[row])
        yield histogram(f"scheduler_{name}", text, BUCKETS_S, counts, seconds)
