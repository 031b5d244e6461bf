"""Metrics of the tiers below the block store, by tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from kvservice.metrics.families import counters, gauges
from kvservice.telemetry.reading import Reading
from kvservice.tiers.protocol import STATES, TierStats

_UNKNOWN = "Missing for a tier that does not know its size."
# Gauges of tiers that know their size.
_CONTENTS = {
    "capacity_bytes": ("capacity_bytes", f"Room for values in the tier. {_UNKNOWN}"),
    "num_values": ("values", f"Values in the tier. {_UNKNOWN}"),
    "used_bytes": ("used_bytes", f"Bytes of the values in the tier. {_UNKNOWN}"),
}
_GAUGES = {
    "latency_s": ("latency_seconds", "Recent time from a read of the tier to its first byte."),
    "read_bytes_per_s": ("read_bytes_per_second", "Recent speed of the tier while it reads."),
    "write_bytes_per_s": ("write_bytes_per_second", "Recent speed of the tier while it writes."),
}
_COUNTERS = {
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
    for field, (name, text) in _GAUGES.items():
        yield gauges(f"tier_{name}", text, "tier", ((tier.name, getattr(tier, field)) for tier in tiers))
    for field, (name, text) in _COUNTERS.items():
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
