"""Metrics of the block store, by model."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from kvservice.metrics.families import counters, gauge, gauges
from kvservice.telemetry.reading import Reading

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


def store_metrics(reading: Reading) -> Iterator[Metric]:
    """Yield nothing if the daemon has no store."""
    if not reading.store_bytes:
        return
    yield gauge(
        "store_capacity_bytes", "Room for blocks in the block store, store_gib in whole slabs.", reading.store_bytes
    )
    models = reading.store_models
    for field, text in _GAUGES.items():
        yield gauges(f"store_{field}", text, "model", ((model, getattr(each, field)) for model, each in models.items()))
    for field, (name, text) in _COUNTERS.items():
        values = ((model, getattr(each, field)) for model, each in models.items())
        yield counters(f"store_{name}", text, "model", values)
