"""Prometheus metrics, computed from each reading of the daemon's shared memory.

First those of the daemon itself: build, connections and refused callers, latency of calls, restarts, transfers. Then
the pool, who holds its blocks, and the schedulers. Then what lies below the pool: the block store, its tiers, and saved
blocks and sessions.
"""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from kvservice.blocks import BlocksStats
from kvservice.blocks.pool import BUCKETS_S as AGE_BUCKETS_S
from kvservice.blocks.pool import IDLE_BEFORE_EVICTION, LIFETIME, REUSE_GAP
from kvservice.kept.report import OUTCOMES, RestartReport
from kvservice.scheduler.stats import BUCKETS_S as TOKEN_BUCKETS_S
from kvservice.telemetry.reading import Reading, SessionReading
from kvservice.telemetry.tables import (
    BETWEEN_TOKENS,
    BUCKETS_S,
    DIRECTIONS,
    FIRST_TOKEN,
    NO_LIMIT,
    Key,
    SavedStats,
    ServerStats,
    TransferReading,
    TransferStats,
)
from kvservice.tiers.protocol import STATES, SpillStats, TierStats

# ---- families of prometheus-client

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


# ---- metrics of the daemon's build

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


def event_loop_metrics(counts: Sequence[int], seconds: float, silent_s: float) -> Iterator[Metric]:
    """`counts`: of the buckets of RPCs and above the last; `seconds`: their sum; `silent_s`: since the last answer."""
    text = "Time until the daemon's event loop answers the observer, measured once a second."
    yield histogram("event_loop_latency_seconds", text, BUCKETS_S, counts, seconds)
    text = "Seconds since the daemon's event loop last answered the observer; the other gauges are as old above 5."
    yield gauge("event_loop_silent_seconds", text, silent_s)


def _rpcs(reading: Reading, keys: Sequence[Key]) -> Metric:
    """Return the histogram of RPC durations, with the label combinations that have occurred."""
    family = HistogramMetricFamily(
        "kvservice_rpc_duration_seconds",
        "Time that a call takes, without the network and without the wait for earlier calls of its session.",
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


_TRANSFER_GAUGES = {
    "engines": ("transfer_engines", "Transfer engines that run. Each remote region has one until it fails."),
    "regions": ("transfer_regions", "Remote regions: memory of clients that engines read and write."),
    "region_bytes": ("transfer_region_bytes", "Memory of the daemon that carries the bytes of remote regions."),
}
_TRANSFER_COUNTERS = {
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
    for field, (name, text) in _TRANSFER_GAUGES.items():
        yield gauge(name, text, getattr(stats, field))
    running = ((direction, getattr(stats, f"running_{direction}")) for direction in DIRECTIONS)
    yield gauges("transfers_running", "Transfers in progress: in from clients, out to clients.", "direction", running)
    yield _ended(stats)
    num_bytes = ((direction, getattr(stats, f"bytes_{direction}")) for direction in DIRECTIONS)
    yield counters("transfer_bytes", "Bytes of the transfers that ended well.", "direction", num_bytes)
    yield _durations(reading.transfers)
    for field, (name, text) in _TRANSFER_COUNTERS.items():
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


# ---- metrics of the pool


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
    yield gauge(
        "quarantined_blocks",
        "Blocks, active or shared ones, that wait for the end of a process whose session was lost: it may still write "
        "them.",
        blocks.quarantined_blocks,
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
        yield histogram(name, text, AGE_BUCKETS_S, counts, seconds)


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


_SCHEDULER_COUNTERS = {
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
    for field, (name, text) in _SCHEDULER_COUNTERS.items():
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


# ---- metrics of the block store

_STORE_GAUGES = {
    "namespaces": "Namespaces of the block store, by model (beyond the first max_labels: other).",
    "blocks": "Blocks in the block store.",
    "leased": "Blocks of the block store under a lease or being read.",
    "reserved": "Blocks of the block store that are being written.",
    "quarantined": "Blocks of the block store that wait for the end of a process whose session was lost as it wrote.",
    "used_bytes": "Bytes of the blocks in the block store, of reserved ones too.",
    "quota_bytes": "Bytes that the blocks of namespaces may have: the sum of their quotas.",
}
_STORE_COUNTERS = {
    "hits": ("lookup_hits", "Blocks that counted lookups found in the block store."),
    "misses": ("lookup_misses", "Blocks that counted lookups did not find in the block store."),
    "read": ("blocks_read", "Blocks of the block store that were copied out, or leased by calls that count."),
    "read_bytes": ("read_bytes", "Bytes of the blocks that were copied out of the block store or leased."),
    "stored": ("blocks_stored", "Blocks that were stored in the block store."),
    "stored_bytes": ("stored_bytes", "Bytes of the blocks that were stored in the block store."),
    "evicted": ("evictions", "Blocks evicted from the block store to make room."),
    "refused": ("blocks_refused", "Blocks that the block store had no room for, because all others were in use."),
    "corrupt": ("blocks_corrupt", "Blocks removed from the block store because their checksum was wrong."),
    "removed": ("blocks_removed", "Blocks that clients removed from the block store."),
}

_MISSED = ("evicted", "not_whole", "other_namespace", "never_stored")


def store_metrics(reading: Reading) -> Iterator[Metric]:
    """Yield nothing if the daemon has no store."""
    if not reading.store_bytes:
        return
    yield gauge(
        "store_capacity_bytes", "Room for blocks in the block store, store_gib in whole slabs.", reading.store_bytes
    )
    text = "Room for blocks whose memory is there. After its start the daemon still allocates that of a large store."
    yield gauge("store_ready_bytes", text, reading.store_ready_bytes)
    models = reading.store_models
    for field, text in _STORE_GAUGES.items():
        yield gauges(f"store_{field}", text, "model", ((model, getattr(each, field)) for model, each in models.items()))
    for field, (name, text) in _STORE_COUNTERS.items():
        values = ((model, getattr(each, field)) for model, each in models.items())
        yield counters(f"store_{name}", text, "model", values)
    yield _reasons(reading)


def _reasons(reading: Reading) -> CounterMetricFamily:
    text = (
        "Counted lookups that missed a block, by why the first of the missing ones was not there: it was, and has left "
        "(evicted); other ranks or groups have their parts (not_whole); it is in another namespace (other_namespace), "
        "of another model configuration, vLLM or tenant; or none of these (never_stored)."
    )
    family = CounterMetricFamily("kvservice_store_lookups_missed", text, labels=["model", "reason"])
    for model, figures in reading.store_models.items():
        for reason in _MISSED:
            family.add_metric([model, reason], getattr(figures, f"{reason}_misses"))
    return family


# ---- metrics of the tiers below the block store, by tier


_UNKNOWN = "Missing for a tier that does not know its size."
# Gauges of tiers that know their size.
_CONTENTS = {
    "capacity_bytes": ("capacity_bytes", f"Room for values in the tier. {_UNKNOWN}"),
    "num_values": ("values", f"Values in the tier. {_UNKNOWN}"),
    "used_bytes": ("used_bytes", f"Bytes of the values in the tier. {_UNKNOWN}"),
}
_TIER_GAUGES = {
    "latency_s": ("latency_seconds", "Recent time from a read of the tier to its first byte."),
    "read_bytes_per_s": ("read_bytes_per_second", "Recent speed of the tier while it reads."),
    "write_bytes_per_s": ("write_bytes_per_second", "Recent speed of the tier while it writes."),
}
_TIER_COUNTERS = {
    "hits": ("lookup_hits", "Values that were looked up in the tier and found."),
    "misses": ("lookup_misses", "Values that were looked up in the tier and not found, also because it was suspended."),
    "read_values": ("values_read", "Values read from the tier into memory."),
    "read_bytes": ("read_bytes", "Bytes read from the tier into memory."),
    "read_s": ("read_seconds", "Time of the reads from the tier. Reads at one time each count."),
    "written_values": ("values_written", "Values written to the tier."),
    "written_bytes": ("written_bytes", "Bytes written to the tier."),
    "write_s": ("write_seconds", "Time of the writes to the tier. Writes at one time each count."),
    "evicted": ("evictions", "Values that the tier evicted to make room."),
    "removed": ("values_removed", "Values removed from the tier by clients."),
    "refused": ("values_refused", "Values that were not admitted to the tier, as they were not used often enough."),
    "dropped": (
        "values_dropped",
        "Values for which an open tier was too slow: full queue, or evicted first.",
    ),
    "corrupt": ("values_corrupt", "Values of the tier whose checksum was wrong. Each of them is a miss."),
    "errors": ("errors", "Operations that failed in the tier. For clients they are misses."),
    "suspensions": ("suspensions", "Times that the tier was left alone for a while, after failures."),
}


def tier_metrics(reading: Reading) -> Iterator[Metric]:
    """Yield nothing if the daemon has no such tier."""
    tiers = reading.tiers
    if not tiers:
        return
    yield _states(tiers)
    known = [tier for tier in tiers if tier.capacity_bytes]
    for field, (name, text) in _CONTENTS.items():
        yield gauges(f"tier_{name}", text, "tier", ((tier.name, getattr(tier, field)) for tier in known))
    for field, (name, text) in _TIER_GAUGES.items():
        yield gauges(f"tier_{name}", text, "tier", ((tier.name, getattr(tier, field)) for tier in tiers))
    for field, (name, text) in _TIER_COUNTERS.items():
        yield counters(f"tier_{name}", text, "tier", ((tier.name, getattr(tier, field)) for tier in tiers))


def _states(tiers: Sequence[TierStats]) -> GaugeMetricFamily:
    text = (
        "1 for the state of the tier: open; opening, while it recovers its index; suspended, while it is left alone "
        "after failures; failed."
    )
    family = GaugeMetricFamily("kvservice_tier_state", text, labels=["tier", "state"])
    for tier in tiers:
        for state in STATES:
            family.add_metric([tier.name, state], state == tier.state)
    return family


# ---- metrics of the blocks of the pool in the tiers below it, and of saved sessions


_SPILL_GAUGES = {
    "queued": ("spill_queued_blocks", "Blocks of the pool that wait to be saved in the block store."),
    "loading": ("spill_loading_blocks", "Blocks that are on their way into the pool."),
    "save_bytes_per_s": ("spill_save_bytes_per_second", "Recent speed of copies from the pool to the block store."),
    "load_bytes_per_s": ("spill_load_bytes_per_second", "Recent speed of copies from the block store to the pool."),
}
_SPILL_COUNTERS = {
    "saved_blocks": ("spill_blocks_saved", "Blocks of the pool that were saved in the block store."),
    "saved_bytes": ("spill_saved_bytes", "Bytes of the blocks that were saved."),
    "save_s": ("spill_save_seconds", "Time of the copies from the pool to the block store."),
    "loaded_blocks": ("spill_blocks_loaded", "Blocks that were loaded into the pool instead of being computed."),
    "loaded_bytes": ("spill_loaded_bytes", "Bytes of the blocks that were loaded."),
    "load_s": ("spill_load_seconds", "Time of the loads, from the block store or the tiers below it."),
    "hit_tokens": ("spill_hit_tokens", "Tokens of prompts that were found in loaded blocks."),
    "corrupt": ("spill_blocks_corrupt", "Blocks that were not loaded because their checksum was wrong."),
}
_NOT_SAVED = ("refused", "torn", "dropped")
_NOT_LOADED = ("slower", "crowded")
_SAVED_GAUGES = {
    "num_sessions": ("saved_sessions", "Sessions on the disk."),
    "used_bytes": ("saved_sessions_bytes", "Bytes of the sessions on the disk."),
    "capacity_bytes": ("saved_sessions_capacity_bytes", "Room for sessions on the disk: disk_sessions_gib."),
}
_SAVED_COUNTERS = {
    "saved": ("sessions_saved", "Sessions that were saved on the disk."),
    "restored": ("sessions_restored", "Sessions that were restored from the disk."),
    "expired": ("saved_sessions_expired", "Saved sessions whose time was over."),
    "damaged": ("saved_sessions_damaged", "Saved sessions whose file was damaged. They are not restored."),
    "errors": ("saved_sessions_errors", "Failures of the disk with the saved sessions, also because it was full."),
}


def spill_metrics(reading: Reading) -> Iterator[Metric]:
    """Yield nothing for what the daemon does not have."""
    if reading.spill is not None:
        yield from _spill(reading.spill)
    if reading.saved is not None:
        yield from _saved(reading.saved)


def _spill(spill: SpillStats) -> Iterator[Metric]:
    for field, (name, text) in _SPILL_GAUGES.items():
        yield gauge(name, text, getattr(spill, field))
    for field, (name, text) in _SPILL_COUNTERS.items():
        yield counter(name, text, getattr(spill, field))
    yield counters(
        "spill_blocks_not_saved",
        "Blocks that were to be saved: the block store had no room (refused), they left the pool meanwhile (torn), or "
        "the queue was full (dropped).",
        "reason",
        ((reason, getattr(spill, reason)) for reason in _NOT_SAVED),
    )
    yield counters(
        "spill_blocks_not_loaded",
        "Blocks in the tiers below that were computed again, as loading them would have taken longer (slower) or the "
        "pool had no room (crowded).",
        "reason",
        ((reason, getattr(spill, reason)) for reason in _NOT_LOADED),
    )


def _saved(saved: SavedStats) -> Iterator[Metric]:
    for field, (name, text) in _SAVED_GAUGES.items():
        yield gauge(name, text, getattr(saved, field))
    for field, (name, text) in _SAVED_COUNTERS.items():
        yield counter(name, text, getattr(saved, field))
