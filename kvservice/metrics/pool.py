"""Metrics of the pool, of who holds its blocks, and of the schedulers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvservice.blocks import BlocksStats
from kvservice.blocks.pool import BUCKETS_S, IDLE_BEFORE_EVICTION, LIFETIME, REUSE_GAP
from kvservice.metrics.families import counter, counters, gauge, gauges, histogram
from kvservice.scheduler.stats import BUCKETS_S as TOKEN_BUCKETS_S
from kvservice.telemetry.figures import BETWEEN_TOKENS, FIRST_TOKEN, NO_LIMIT, ServerStats
from kvservice.telemetry.reading import Reading, SessionReading


def pool_metrics(reading: Reading, block_bytes: int, memory_bytes: Mapping[str, int]) -> Iterator[Metric]:
    """`memory_bytes` are the bytes that the daemon allocated at the start, by use."""
    blocks, server = reading.blocks, reading.server
    yield from _blocks(blocks)
    yield gauge("block_size_bytes", "Size of one block over all layers.", block_bytes)
    yield gauges(
        "memory_bytes",
        "Memory taken at the start, by use; workspaces on a GPU only, store only with a block store.",
        "use",
        memory_bytes.items(),
    )
    yield gauge("tokens", "Tokens of all sequences.", blocks.tokens)
    yield from _prefix_cache(blocks, server)
    yield from _swap(blocks, server, block_bytes)
    yield from _ages(reading)
    yield from _integrity(server)


def _blocks(blocks: BlocksStats) -> Iterator[Metric]:
    states = {
        "free": blocks.free_blocks,
        "active": blocks.active_blocks,
        "shared": blocks.shared_blocks,
        "cached": blocks.cached_blocks,
        "pinned": blocks.pinned_blocks,
        "swapped": blocks.used_swap_blocks,
    }
    yield gauges(
        "blocks",
        "Blocks by state: free; active, in one block table; shared, in several; cached, in none but found by its hash; "
        "pinned, cached and protected from eviction; swapped, in the swap tier.",
        "state",
        states.items(),
    )
    held = blocks.active_blocks + blocks.shared_blocks
    yield gauge("block_usage_ratio", "Share of the pool's blocks that sequences hold.", held / blocks.num_blocks)
    capacity = {"device": blocks.num_blocks, "swap": blocks.num_swap_blocks}
    yield gauges("capacity_blocks", "Blocks of a tier.", "tier", capacity.items())
    tiers = {"device": blocks.sequences - blocks.swapped_sequences, "swap": blocks.swapped_sequences}
    yield gauges("sequences", "Sequences by the tier that their blocks are in.", "tier", tiers.items())


def _prefix_cache(blocks: BlocksStats, server: ServerStats) -> Iterator[Metric]:
    yield counter("computed_tokens", "Tokens whose K/V were written in all layers.", blocks.computed_tokens)
    yield counter(
        "prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache.", blocks.prefix_cache_query_tokens
    )
    yield counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.", blocks.prefix_cache_hit_tokens)
    yield counter(
        "cow_copies", "Shared blocks copied because one of their sequences wrote (copy-on-write).", blocks.cow_copies
    )
    yield counter("evictions", "Cached blocks evicted to make room.", blocks.evicted_blocks)
    yield counter("out_of_blocks", "Calls refused because the pool had too few blocks.", server.out_of_blocks)
    events = {"stored": server.stored_events, "removed": server.removed_events, "cleared": server.cleared_events}
    yield counters(
        "block_events",
        "Blocks that entered the prefix cache (stored) and left it (removed), and times that it was emptied (cleared).",
        "event",
        events.items(),
    )
    yield gauge("event_streams", "Subscribers to block events.", server.event_streams)


def _swap(blocks: BlocksStats, server: ServerStats, block_bytes: int) -> Iterator[Metric]:
    swapped = {"out": blocks.swapped_out_blocks, "in": blocks.swapped_in_blocks}
    yield counters("swap_blocks", "Blocks swapped out of the pool and back in.", "direction", swapped.items())
    num_bytes = ((direction, value * block_bytes) for direction, value in swapped.items())
    yield counters("swap_bytes", "Bytes swapped out of the pool and back in.", "direction", num_bytes)
    sequences = {"out": blocks.swapped_out_sequences, "in": blocks.swapped_in_sequences}
    yield counters(
        "swapped_sequences", "Sequences swapped out of the pool and back in.", "direction", sequences.items()
    )
    busy = {"out": server.swap_out_busy_s, "in": server.swap_in_busy_s}
    yield counters(
        "swap_busy_seconds",
        "Time during which swap copies ran: a rate of 1 means that the link is saturated.",
        "direction",
        busy.items(),
    )


def _integrity(server: ServerStats) -> Iterator[Metric]:
    checks, failures = server.integrity_checks, server.integrity_failures
    yield counter(
        "integrity_checks", "Integrity checks of the block tables that passed; see integrity_interval_s.", checks
    )
    yield counter(
        "integrity_failures",
        "Integrity checks of the block tables that failed: see the log; health is NOT_SERVING from then on.",
        failures,
    )


def _ages(reading: Reading) -> Iterator[Metric]:
    for which, name, text in (
        (LIFETIME, "block_lifetime_seconds", "Time from allocating a block to freeing or evicting it."),
        (
            IDLE_BEFORE_EVICTION,
            "block_idle_before_eviction_seconds",
            "Time that an evicted block had been in no block table.",
        ),
        (
            REUSE_GAP,
            "block_reuse_gap_seconds",
            "Time that a cached block was in no block table until a prompt found it.",
        ),
    ):
        counts, seconds = reading.age_counts[which].tolist(), float(reading.age_seconds[which])
        yield histogram(name, text, BUCKETS_S, counts, seconds)


# ---- metrics of sessions, tenants, regions and lanes
#
# The number of label values is bounded.


OTHER = "other"
_HELD = {
    "sequences": "Sequences held by {}.",
    "tokens": "Tokens of the sequences held by {}.",
    "blocks": "Block-table entries held by {}; a block in two tables counts twice.",
}


def holder_metrics(reading: Reading, max_labels: int, max_sessions: int, max_sequences: int) -> Iterator[Metric]:
    server = reading.server
    yield gauge("sessions", "Open sessions.", server.sessions)
    yield gauge("capacity_sessions", "Most sessions that may be open: max_sessions.", max_sessions)
    yield gauge(
        "capacity_sequences", "Most sequences that may exist, swapped ones included: max_sequences.", max_sequences
    )
    yield counter("sessions_opened", "Sessions opened.", server.sessions_opened)
    closed = {"closed": server.sessions_closed - server.sessions_lost, "lost": server.sessions_lost}
    yield counters(
        "sessions_closed",
        "Sessions that ended: closed by request, or lost because no client came back in time.",
        "reason",
        closed.items(),
    )
    yield gauge("draining", "1 while the daemon is shutting down.", server.draining)
    yield gauge("regions", "Shared-memory regions of all sessions.", server.regions)
    yield gauge("region_bytes", "Bytes of shared-memory regions.", server.region_bytes)
    yield gauge("lanes", "Open lanes of all sessions.", server.lanes)
    names = _labels(reading.sessions, max_labels)
    yield from _held(
        "session", "all sessions of a name (names beyond the first max_labels: other)", reading.sessions, names
    )
    yield from _queues(reading.sessions, names)
    tenants = {each.session_id: each.tenant for each in reading.sessions}
    yield from _held("tenant", "a tenant (beyond the first max_labels: other)", reading.sessions, tenants)
    yield from _tenant_tokens(reading)
    yield from _tenant_quotas(reading, max_labels)


def _labels(sessions: list[SessionReading], limit: int) -> dict[int, str]:
    """Return the label of each session: its name if it is among the first `limit` names of open sessions, else
    OTHER."""
    known: set[str] = set()
    labels = {}
    for session in sorted(sessions, key=lambda each: each.session_id):
        if len(known) < limit:
            known.add(session.name)
        labels[session.session_id] = session.name if session.name in known else OTHER
    return labels


def _held(label: str, whose: str, sessions: list[SessionReading], labels: Mapping[int, str]) -> Iterator[Metric]:
    for held, text in _HELD.items():
        sums: Counter[str] = Counter()
        for session in sessions:
            sums[labels[session.session_id]] += getattr(session, held)
        yield gauges(f"{label}_{held}", text.format(whose), label, sums.items())


def _queues(sessions: list[SessionReading], labels: Mapping[int, str]) -> Iterator[Metric]:
    """Yield the queues of the sessions that have a scheduler."""
    for state in ("waiting", "running"):
        sums: Counter[str] = Counter()
        for session in sessions:
            if session.scheduler is not None:
                sums[labels[session.session_id]] += getattr(session.scheduler, state)
        text = f"Requests that are {state}, by the name of their session (names beyond the first max_labels: other)."
        yield gauges(f"session_{state}_requests", text, "session", sums.items())


def _tenant_tokens(reading: Reading) -> Iterator[Metric]:
    for column, name, text in (
        (0, "computed_tokens", "Tokens whose K/V the sessions of a tenant have written in all layers."),
        (1, "prefix_cache_query_tokens", "Prompt tokens of a tenant looked up in the prefix cache."),
        (2, "prefix_cache_hit_tokens", "Prompt tokens of a tenant found in the prefix cache."),
    ):
        values = ((tenant, tokens[column]) for tenant, tokens in reading.tenants.items())
        yield counters(f"tenant_{name}", text, "tenant", values)


def _tenant_quotas(reading: Reading, max_labels: int) -> Iterator[Metric]:
    """Yield the quotas of the first `max_labels` tenants of the configuration."""
    labels = ("tenant", "limit")
    used = GaugeMetricFamily(
        "kvservice_tenant_quota_used", "What a tenant uses of what there are quotas of.", labels=labels
    )
    quota = GaugeMetricFamily("kvservice_tenant_quota", "The quotas of tenants.", labels=labels)
    refused = CounterMetricFamily(
        "kvservice_tenant_refused_calls", "Calls that were refused because of a tenant's quota.", labels=labels
    )
    for tenant, uses in itertools.islice(reading.tenant_quotas.items(), max_labels):
        for limit, use in uses.items():
            used.add_metric([tenant, limit], use.used)
            if use.limit != NO_LIMIT:
                quota.add_metric([tenant, limit], use.limit)
                refused.add_metric([tenant, limit], use.refused)
    if reading.tenant_quotas:
        yield from (used, quota, refused)


# ---- metrics of the schedulers: queues, preemptions, tokens, and their latencies


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
        yield histogram(f"scheduler_{name}", text, TOKEN_BUCKETS_S, counts, seconds)
