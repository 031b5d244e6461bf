"""Metrics of the blocks of the pool in the tiers below it, and of saved sessions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvservice.metrics.families import counter, counters, gauge
from kvservice.telemetry.figures import SavedStats
from kvservice.telemetry.reading import Reading
from kvservice.tiers.spill_stats import SpillStats

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
