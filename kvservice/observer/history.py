"""Samples of the last minutes, one per second, and rates and quantiles over the latest readings."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from kvservice.scheduler import SchedulerFigures
from kvservice.scheduler.stats import BUCKETS_S as TOKEN_BUCKETS_S
from kvservice.telemetry.reading import IntArray, Reading
from kvservice.telemetry.tables import BETWEEN_TOKENS, BUCKETS_S, FIRST_TOKEN, Key, TransferStats, values_of
from kvservice.tiers.protocol import SpillStats, TierStats

SAMPLES = 600
# Rates and quantiles are over this many samples.
WINDOW = 10


def quantile(counts: Sequence[int] | IntArray, share: float, bounds_s: Sequence[float] = BUCKETS_S) -> float | None:
    """Return the quantile `share` of a latency in seconds, by linear interpolation within a bucket, as in Prometheus.
    It is None without counts, and the last bound for quantiles above it."""
    total = int(np.sum(counts))
    if total == 0:
        return None
    below = np.cumsum(counts)
    bucket = int(np.searchsorted(below, share * total))
    if bucket == len(bounds_s):
        return bounds_s[-1]
    lower = bounds_s[bucket - 1] if bucket else 0.0
    before = int(below[bucket - 1]) if bucket else 0
    return float(lower + (bounds_s[bucket] - lower) * (share * total - before) / int(counts[bucket]))


class History:
    """The readings of the latest seconds, and one sample per earlier reading."""

    def __init__(self, keys: Sequence[Key], block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._methods = list(dict.fromkeys(method for method, _, _ in keys))
        self._ok = np.array([status == "OK" for _, status, _ in keys])
        # The rows of one method are adjacent.
        self._rows_of_method = len(keys) // len(self._methods)
        self._window: deque[Reading] = deque(maxlen=WINDOW + 1)
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES)

    def add(self, reading: Reading, time_s: float) -> None:
        """Add a reading. `time_s` is in seconds since 1970."""
        if self._window:
            self._samples.append(self._sample(self._window[-1], reading, time_s))
        self._window.append(reading)

    @property
    def latest(self) -> Reading:
        return self._window[-1]

    def rates(self) -> dict[str, Any]:
        """Return the fields of `Rates`."""
        return self._rates(self._window[0], self._window[-1])

    def scheduling(self) -> dict[str, Any]:
        """Return the rates and quantiles of `SchedulingSnapshot`."""
        first, last = self._window[0], self._window[-1]
        seconds, before, now = _seconds(first, last), first.schedulers.totals, last.schedulers.totals
        grown = SchedulerFigures(*map(operator.sub, values_of(now), values_of(before)))
        preemptions = grown.recompute_preemptions + grown.swap_preemptions
        rates = {
            "generated_tokens_per_s": grown.generated_tokens / seconds,
            "finished_per_s": grown.finished / seconds,
            "preemptions_per_s": preemptions / seconds,
            "recomputed_tokens_per_s": grown.recomputed_tokens / seconds,
        }
        if grown.proposed_tokens:
            rates["accepted_share"] = grown.accepted_tokens / grown.proposed_tokens
        recent = last.schedulers.token_counts - first.schedulers.token_counts
        for row, name in ((FIRST_TOKEN, "first_token"), (BETWEEN_TOKENS, "between_tokens")):
            quantiles = _quantiles(recent[row], TOKEN_BUCKETS_S)
            rates |= {f"{name}_{quantile}": value for quantile, value in quantiles.items()}
        return rates

    def store(self) -> dict[str, float]:
        """Return the rates of `StoreSnapshot`."""
        first, last = self._window[0], self._window[-1]
        before, now = _store_flow(first), _store_flow(last)
        return _flow_rates(before, now, _seconds(first, last))

    def spill(self) -> dict[str, float]:
        """Return the rates of `SpillSnapshot`."""
        first, last = self._window[0], self._window[-1]
        now = last.spill or SpillStats()
        before, seconds = first.spill or now, _seconds(first, last)
        return {
            "up_bytes_per_s": (now.loaded_bytes - before.loaded_bytes) / seconds,
            "down_bytes_per_s": (now.saved_bytes - before.saved_bytes) / seconds,
        }

    def transfers(self) -> dict[str, float]:
        """Return the rates and quantiles of `TransferSnapshot`."""
        first, last = self._window[0], self._window[-1]
        if last.transfers is None or first.transfers is None:
            return {}
        grown = TransferStats(*map(operator.sub, values_of(last.transfers.stats), values_of(first.transfers.stats)))
        seconds, recent = _seconds(first, last), last.transfers.counts - first.transfers.counts
        rates = {
            "in_bytes_per_s": grown.bytes_in / seconds,
            "out_bytes_per_s": grown.bytes_out / seconds,
            "fallback_bytes_per_s": grown.fallback_bytes / seconds,
        }
        return {**rates, **_quantiles(recent.sum(axis=0))}

    def tiers(self) -> dict[str, dict[str, float]]:
        """Return the rates of `TierSnapshot` for each tier of the latest reading, by name."""
        return _tier_rates(self._window[0], self._window[-1])

    def calls(self) -> list[dict[str, Any]]:
        """Return the fields of `CallSnapshot` for each method that was called."""
        first, last = self._window[0], self._window[-1]
        seconds = _seconds(first, last)
        totals, errors = self._by_method(last.call_counts)
        recent, _ = self._by_method(last.call_counts - first.call_counts)
        return [
            {
                "method": method,
                "calls": int(totals[i].sum()),
                "errors": int(errors[i]),
                "calls_per_s": int(recent[i].sum()) / seconds,
                **_quantiles(recent[i]),
            }
            for i, method in enumerate(self._methods)
            if totals[i].any()
        ]

    def sample(self) -> dict[str, Any] | None:
        return self._samples[-1] if self._samples else None

    def samples(self) -> dict[str, Any]:
        """Return the samples as columns, oldest first. `p99_s` has the methods that were called, `up_bytes` and
        `down_bytes` have the tiers."""
        names = (
            "time_s", "usage", "hit_share", "computed_tokens", "swapped_out_bytes", "swapped_in_bytes",
            "waiting", "running", "first_token_s", "between_tokens_s",
        )  # fmt: skip
        columns: dict[str, Any] = {name: [sample[name] for sample in self._samples] for name in names}
        for name in ("p99_s", "up_bytes", "down_bytes"):
            keys = dict.fromkeys(key for sample in self._samples for key in sample[name])
            columns[name] = {key: [sample[name].get(key) for sample in self._samples] for key in keys}
        return columns

    def _sample(self, before: Reading, now: Reading, time_s: float) -> dict[str, Any]:
        rates = self._rates(before, now)
        recent, _ = self._by_method(now.call_counts - before.call_counts)
        blocks = now.blocks
        called = np.flatnonzero(recent.any(axis=1)).tolist()
        tokens = now.schedulers.token_counts - before.schedulers.token_counts
        tiers = _tier_rates(before, now)
        return {
            "time_s": time_s,
            "usage": (blocks.active_blocks + blocks.shared_blocks) / blocks.num_blocks,
            "hit_share": rates.get("hit_share"),
            "computed_tokens": rates["computed_tokens"],
            "swapped_out_bytes": rates["swapped_out_bytes"],
            "swapped_in_bytes": rates["swapped_in_bytes"],
            "waiting": now.schedulers.totals.waiting,
            "running": now.schedulers.totals.running,
            "first_token_s": quantile(tokens[FIRST_TOKEN], 0.99, TOKEN_BUCKETS_S),
            "between_tokens_s": quantile(tokens[BETWEEN_TOKENS], 0.99, TOKEN_BUCKETS_S),
            "p99_s": {self._methods[i]: quantile(recent[i], 0.99) for i in called},
            "up_bytes": {name: rates["up_bytes_per_s"] for name, rates in tiers.items()},
            "down_bytes": {name: rates["down_bytes_per_s"] for name, rates in tiers.items()},
        }

    def _rates(self, first: Reading, last: Reading) -> dict[str, Any]:
        seconds = _seconds(first, last)
        grown = _growth(first, last, seconds)
        calls = last.call_counts - first.call_counts
        num_calls = int(calls.sum())
        rates = {
            "window_s": seconds,
            "computed_tokens": grown["computed_tokens"],
            "query_tokens": grown["prefix_cache_query_tokens"],
            "hit_tokens": grown["prefix_cache_hit_tokens"],
            "evicted_blocks": grown["evicted_blocks"],
            "cow_copies": grown["cow_copies"],
            "swapped_out_bytes": grown["swapped_out_blocks"] * self._block_bytes,
            "swapped_in_bytes": grown["swapped_in_blocks"] * self._block_bytes,
            "out_of_blocks": grown["out_of_blocks"],
            "calls": num_calls / seconds,
            "errors": (num_calls - int(calls[self._ok].sum())) / seconds,
            "lane_calls": grown["lane_calls"],
        }
        if grown["prefix_cache_query_tokens"]:
            rates["hit_share"] = grown["prefix_cache_hit_tokens"] / grown["prefix_cache_query_tokens"]
        return rates

    def _by_method(self, counts: IntArray) -> tuple[IntArray, IntArray]:
        """Return the histograms of all calls, int64[methods, buckets + 1], and the failed calls, int64[methods]."""
        shape = len(self._methods), self._rows_of_method
        failed = np.where(self._ok, 0, counts.sum(axis=1)).reshape(shape).sum(axis=1)
        return counts.reshape(*shape, -1).sum(axis=1), failed


def _seconds(first: Reading, last: Reading) -> float:
    """Return the length of a window in seconds, or 1.0 if it has only one reading."""
    return (last.time_s - first.time_s) or 1.0


def _growth(first: Reading, last: Reading, seconds: float) -> dict[str, float]:
    """Return the growth per second of every gauge and counter, by name."""
    before = asdict(first.blocks) | asdict(first.server)
    now = asdict(last.blocks) | asdict(last.server)
    return {name: (now[name] - before[name]) / seconds for name in now}


class _Flow(NamedTuple):
    """Counters of a tier: bytes that went up into faster memory, bytes that came down, hits and misses of lookups."""

    up_bytes: int
    down_bytes: int
    hits: int
    misses: int


def _store_flow(reading: Reading) -> _Flow:
    models = reading.store_models.values()
    sums = (sum(getattr(model, name) for model in models) for name in ("read_bytes", "stored_bytes", "hits", "misses"))
    return _Flow(*sums)


def _tier_flow(tier: TierStats) -> _Flow:
    return _Flow(tier.read_bytes, tier.written_bytes, tier.hits, tier.misses)


def _tier_rates(first: Reading, last: Reading) -> dict[str, dict[str, float]]:
    before, seconds = {tier.name: tier for tier in first.tiers}, _seconds(first, last)
    return {
        tier.name: _flow_rates(_tier_flow(before.get(tier.name, tier)), _tier_flow(tier), seconds)
        for tier in last.tiers
    }


def _flow_rates(before: _Flow, now: _Flow, seconds: float) -> dict[str, float]:
    """Return bytes per second in both directions, and the hit share unless there were no lookups."""
    grown = _Flow(*map(operator.sub, now, before))
    rates = {"up_bytes_per_s": grown.up_bytes / seconds, "down_bytes_per_s": grown.down_bytes / seconds}
    lookups = grown.hits + grown.misses
    return rates | ({"hit_share": grown.hits / lookups} if lookups else {})


def _quantiles(counts: IntArray, bounds_s: Sequence[float] = BUCKETS_S) -> Mapping[str, float]:
    quantiles = {"p50_s": quantile(counts, 0.5, bounds_s), "p99_s": quantile(counts, 0.99, bounds_s)}
    return {name: value for name, value in quantiles.items() if value is not None}
