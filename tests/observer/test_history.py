"""Rates and quantiles over synthetic readings."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from observed_pool import ObservedPool

from kvservice.blocks import BlocksStats
from kvservice.observer.history import SAMPLES, WINDOW, History
from kvservice.scheduler import SchedulerFigures
from kvservice.store import ModelFigures
from kvservice.telemetry import (
    BUCKETS_S,
    WIDTH,
    Reading,
    ServerStats,
    SpillStats,
    TransferReading,
    TransferStats,
    keys,
    names_of,
)
from kvservice.tiers import TierStats
from kvservice.v1 import inspect_pb2

METHODS = ["append", "free", "fork"]
KEYS = list(keys(METHODS))
NO_SCHEDULERS = ObservedPool().reader.read().schedulers


def reading(time_s: float, calls: dict[tuple[str, str, str], dict[int, int]] | None = None, **stats: int) -> Reading:
    counts = np.zeros((len(KEYS), WIDTH), np.int64)
    for key, buckets in (calls or {}).items():
        for bucket, count in buckets.items():
            counts[KEYS.index(key), bucket] = count
    empty = np.zeros(0)
    blocks = {"num_blocks": 10} | {name: value for name, value in stats.items() if name in names_of(BlocksStats)}
    server = {name: value for name, value in stats.items() if name not in blocks}
    return Reading(
        time_s,
        BlocksStats(**blocks),
        ServerStats(**server),
        [],
        counts,
        empty,
        np.zeros(0, np.int64),
        empty,
        [],
        {},
        0,
        0,
        {},
        NO_SCHEDULERS,
    )


def test_quantiles_are_interpolated_within_their_bucket() -> None:
    # Bucket 0 ends at 50 µs, bucket 2 is from 100 to 200 µs, and the last is above all bounds.
    quantiles = {
        (25e-6, 49.5e-6): {0: 10},
        (50e-6, 198e-6): {0: 10, 2: 10},
        (150e-6, 199e-6): {2: 1000},
        (BUCKETS_S[-1], BUCKETS_S[-1]): {0: 10, 2: 10, WIDTH - 1: 10_000},
    }
    for (p50_s, p99_s), counts in quantiles.items():
        history = History(KEYS, block_bytes=1)
        history.add(reading(0.0), 0.0)
        history.add(reading(1.0, {("append", "OK", "stream"): counts}), 1.0)
        (append,) = history.calls()
        assert (append["p50_s"], append["p99_s"]) == (pytest.approx(p50_s), pytest.approx(p99_s))


def scheduling(time_s: float, first: dict[int, int], between: dict[int, int], **totals: int) -> Reading:
    """Return a reading with these tokens by bucket, and these figures of schedulers."""
    counts = np.zeros_like(NO_SCHEDULERS.token_counts)
    for row, buckets in enumerate((first, between)):
        for bucket, count in buckets.items():
            counts[row, bucket] = count
    schedulers = NO_SCHEDULERS._replace(totals=SchedulerFigures(**totals), token_counts=counts)
    return dataclasses.replace(reading(time_s), schedulers=schedulers)


def test_rates_of_schedulers_are_over_the_window() -> None:
    history = History(KEYS, block_bytes=100)
    history.add(scheduling(0.0, {0: 50}, {}, generated_tokens=100, waiting=9), 0.0)
    assert history.scheduling() == dict.fromkeys(
        ("generated_tokens_per_s", "finished_per_s", "preemptions_per_s", "recomputed_tokens_per_s"), 0.0
    )
    totals = {
        "generated_tokens": 140, "finished": 6, "recompute_preemptions": 3, "swap_preemptions": 1, "waiting": 2,
        "recomputed_tokens": 30, "proposed_tokens": 40, "accepted_tokens": 10, "running": 7,
    }  # fmt: skip
    history.add(scheduling(2.0, {0: 50, 1: 10}, {5: 100}, **totals), 2.0)
    found = history.scheduling()
    assert found == {
        "generated_tokens_per_s": 20, "finished_per_s": 3, "preemptions_per_s": 2, "recomputed_tokens_per_s": 15,
        "accepted_share": 0.25,
        "first_token_p50_s": pytest.approx(0.0015), "first_token_p99_s": pytest.approx(0.00199),
        "between_tokens_p50_s": pytest.approx(0.035), "between_tokens_p99_s": pytest.approx(0.0497),
    }  # fmt: skip
    inspect_pb2.SchedulingSnapshot(**found)  # has these fields
    sample = history.sample()
    assert sample is not None
    assert (sample["waiting"], sample["running"]) == (2, 7)
    assert (sample["first_token_s"], sample["between_tokens_s"]) == (pytest.approx(0.00199), pytest.approx(0.0497))


def test_rates_are_over_the_window() -> None:
    history = History(KEYS, block_bytes=100)
    for second in range(30):
        call = {("append", "OK", "stream"): {0: 7 * second}, ("free", "NOT_FOUND", "unary"): {1: 2 * second}}
        tokens = second if second < 20 else 20 + 5 * (second - 20)  # faster at the end
        swapped = {
            "swapped_out_blocks": 3 * second,
            "prefix_cache_query_tokens": 8 * second,
            "prefix_cache_hit_tokens": 2 * second,
        }
        history.add(reading(100 + second, call, computed_tokens=tokens, **swapped), time_s=1000 + second)
    rates = history.rates()
    assert rates["window_s"] == WINDOW
    assert rates["computed_tokens"] == pytest.approx((65 - 19) / 10)
    assert (rates["swapped_out_bytes"], rates["hit_share"]) == (300, 0.25)
    assert (rates["calls"], rates["errors"]) == (9, 2)
    append, free = history.calls()
    assert (append["method"], append["calls"], append["errors"], append["calls_per_s"]) == ("append", 7 * 29, 0, 7)
    assert (free["method"], free["calls"], free["errors"], free["calls_per_s"]) == ("free", 2 * 29, 2 * 29, 2)
    assert append["p50_s"] == pytest.approx(25e-6)
    assert append["p99_s"] == pytest.approx(49.5e-6)


def test_what_was_called_long_ago_has_no_quantiles() -> None:
    history = History(KEYS, block_bytes=1)
    for second in range(WINDOW + 3):
        history.add(reading(second, {("fork", "OK", "unary"): {0: 1}}), second)
    (fork,) = history.calls()
    assert (fork["calls"], fork["calls_per_s"]) == (1, 0)
    assert not {"p50_s", "p99_s"} & fork.keys()


def test_without_lookups_there_is_no_hit_share() -> None:
    history = History(KEYS, block_bytes=1)
    history.add(reading(0.0), 0.0)
    assert history.rates()["calls"] == 0
    history.add(reading(1.0), 1.0)
    assert "hit_share" not in history.rates()
    assert history.samples()["hit_share"] == [None]


def test_samples_are_columns_of_equal_length_and_bounded() -> None:
    history = History(KEYS, block_bytes=1)
    for second in range(SAMPLES + 50):
        call = {("fork", "OK", "unary"): {0: max(0, second - SAMPLES)}}
        now = reading(second, call, active_blocks=4, shared_blocks=1)
        disk = TierStats("disk", read_bytes=7 * second, written_bytes=9 * second)
        history.add(dataclasses.replace(now, tiers=(disk,) if second > SAMPLES else ()), second)
    samples = history.samples()
    assert samples["time_s"] == list(range(50, SAMPLES + 50))
    assert set(samples["usage"]) == {0.5}
    assert [len(column) for column in samples.values() if isinstance(column, list)] == [SAMPLES] * 10
    (fork,) = samples["p99_s"].values()
    assert len(fork) == SAMPLES
    assert fork[0] is None
    assert fork[-1] == pytest.approx(49.5e-6)
    assert (samples["up_bytes"]["disk"][-1], samples["down_bytes"]["disk"][-1]) == (7, 9)
    assert samples["up_bytes"]["disk"].count(None) == SAMPLES - 49


def stored(time_s: float, *tiers: TierStats, **figures: int) -> Reading:
    models = {"a": ModelFigures(**figures), "b": ModelFigures(**figures)}
    return dataclasses.replace(reading(time_s), tiers=tiers, store_models=models)


def test_rates_of_the_store_and_of_tiers_are_over_the_window() -> None:
    history = History(KEYS, block_bytes=100)
    disk = TierStats("disk", hits=10, misses=10, read_bytes=1000, written_bytes=5000)
    history.add(stored(0.0, disk, stored_bytes=50, hits=4), 0.0)
    none = {"up_bytes_per_s": 0.0, "down_bytes_per_s": 0.0}
    assert (history.store(), history.tiers()) == (none, {"disk": none})
    disk = dataclasses.replace(disk, hits=19, misses=11, read_bytes=1800, written_bytes=5400)
    history.add(stored(2.0, disk, TierStats("mooncake", hits=5), stored_bytes=70, read_bytes=10, hits=5, misses=3), 2.0)
    assert history.store() == {"up_bytes_per_s": 10.0, "down_bytes_per_s": 20.0, "hit_share": 0.25}
    assert history.tiers() == {
        "disk": {"up_bytes_per_s": 400.0, "down_bytes_per_s": 200.0, "hit_share": 0.9},
        "mooncake": none,
    }
    for second in range(3, 3 + WINDOW):
        history.add(stored(second, disk), second)
    assert history.tiers() == {"disk": none}, "the window has moved on"


def test_rates_of_transfers_are_over_the_window() -> None:
    def transferred(seconds: float, bucket: int, *figures: int) -> Reading:
        counts = np.zeros((2, WIDTH), np.int64)
        counts[1, bucket] = figures[0]
        names = ("done_out", "bytes_in", "bytes_out", "fallback_bytes")
        stats = TransferStats(**dict(zip(names, figures, strict=True)))
        return dataclasses.replace(reading(seconds), transfers=TransferReading(stats, counts, np.zeros(2)))

    history = History(KEYS, block_bytes=100)
    history.add(reading(0.0), 0.0)
    assert history.transfers() == {}
    history = History(KEYS, block_bytes=100)
    history.add(transferred(0.0, 3, 1, 100, 50, 10), 0.0)
    assert history.transfers() == {"in_bytes_per_s": 0, "out_bytes_per_s": 0, "fallback_bytes_per_s": 0}
    history.add(transferred(4.0, 3, 5, 140, 250, 18), 4.0)
    found = history.transfers()
    assert BUCKETS_S[2] < found.pop("p50_s") < found.pop("p99_s") < BUCKETS_S[3]
    assert found == {"in_bytes_per_s": 10, "out_bytes_per_s": 50, "fallback_bytes_per_s": 2}


def test_rates_of_spilled_blocks_are_over_the_window() -> None:
    history = History(KEYS, block_bytes=100)
    history.add(dataclasses.replace(reading(0.0), spill=SpillStats(saved_bytes=10, loaded_bytes=5)), 0.0)
    assert history.spill() == {"up_bytes_per_s": 0, "down_bytes_per_s": 0}
    history.add(dataclasses.replace(reading(4.0), spill=SpillStats(saved_bytes=50, loaded_bytes=9)), 4.0)
    assert history.spill() == {"up_bytes_per_s": 1, "down_bytes_per_s": 10}
