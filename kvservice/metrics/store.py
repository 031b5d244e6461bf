"""Metrics of what lies below the pool: the block store, its tiers, and the blocks of the pool that are saved there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvservice.metrics.families import counter, counters, gauge, gauges
from kvservice.telemetry.figures import SavedStats
from kvservice.telemetry.reading import Reading
from kvservice.tiers.protocol import STATES, SpillStats, TierStats

_GAUGES = {
    "namespaces": "Namespaces of the block store, by model (beyond the first max_labels: other).",
    "blocks": "Blocks in the block store.",
    "leased": "Blocks of the block store under a lease or being read.",
    "reserved": "Blocks of the block store that are being written.",
    "quarantined": "Blocks of the block store that wait for the end of a process whose session was lost as it wrote.",
    "used_bytes": "Bytes of the blocks in the block store, of reserved ones too.",
    "quota_bytes": "Bytes that the blocks of namespaces may have: the sum of their quotas.",
}
_COUNTERS = {
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
    for field, text in _GAUGES.items():
        yield gauges(f"store_{field}", text, "model", ((model, getattr(each, field)) for model, each in models.items()))
    for field, (name, text) in _COUNTERS.items():
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
    "dropped": ("values_dropped", "Values that were not written because the queue of the tier was full."),
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
