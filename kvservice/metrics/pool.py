"""Metrics of the pool: blocks, tokens, prefix cache, swap."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from kvservice.blocks import BlocksStats
from kvservice.blocks.pool import BUCKETS_S, IDLE_BEFORE_EVICTION, LIFETIME, REUSE_GAP
from kvservice.metrics.families import counter, counters, gauge, gauges, histogram
from kvservice.telemetry.daemon_stats import ServerStats
from kvservice.telemetry.reading import Reading


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
