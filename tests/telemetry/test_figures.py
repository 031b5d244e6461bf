"""Every figure that the daemon writes is read by the observer and shown in the metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from observed_pool import ObservedPool, OpenSession
from prometheus_client.core import Metric

from kvservice.blocks import BlocksStats
from kvservice.metrics import (
    access_metrics,
    call_metrics,
    holder_metrics,
    pool_metrics,
    scheduler_metrics,
    spill_metrics,
    store_metrics,
    tier_metrics,
    transfer_metrics,
)
from kvservice.scheduler import EngineScheduler, Latencies, Report, Request, SchedulerFigures
from kvservice.store import ModelFigures
from kvservice.telemetry import (
    BUCKETS_S,
    WIDTH,
    Reading,
    SavedStats,
    ServerStats,
    SpillStats,
    TransferReading,
    TransferStats,
    names_of,
)
from kvservice.tiers import TierStats
from kvservice.v1 import inspect_pb2

BLOCKS = BlocksStats(*range(100, 100 + len(names_of(BlocksStats))))
SERVER = ServerStats(*range(200, 200 + len(names_of(ServerStats))))
STORE = ModelFigures(*range(100, 100 + len(names_of(ModelFigures))))
SCHEDULERS = SchedulerFigures(*range(100, 100 + len(names_of(SchedulerFigures))))
NUMBERS_OF_A_TIER = names_of(TierStats)[2:]
DISK = TierStats("disk", "open", *range(100, 100 + len(NUMBERS_OF_A_TIER)))
MOONCAKE = TierStats("mooncake", "suspended", num_values=3)
SPILL = SpillStats(*range(100, 100 + len(names_of(SpillStats))))
SAVED = SavedStats(*range(200, 200 + len(names_of(SavedStats))))
TRANSFERS = TransferStats(*range(100, 100 + len(names_of(TransferStats))))
COUNTS, SECONDS = np.arange(2 * WIDTH).reshape(2, WIDTH), np.array([0.25, 0.5])
# The states of a tier, in the order of their numbers in the shared arrays.
TIER_STATES = ("open", "opening", "suspended", "failed")
Sample = tuple[str, dict[str, str], float]


@pytest.fixture
def pool() -> ObservedPool:
    return ObservedPool(store_bytes=7)


@pytest.fixture
def empty(pool: ObservedPool) -> Reading:
    """A reading before anything was written."""
    return pool.reader.read()


def samples(metrics: Iterator[Metric]) -> list[Sample]:
    return [(sample.name, sample.labels, sample.value) for family in metrics for sample in family.samples]


def changed(before: list[Sample], after: list[Sample]) -> list[Sample]:
    return [now for then, now in zip(before, after, strict=True) if now != then]


def test_a_reading_has_every_figure(pool: ObservedPool, empty: Reading) -> None:
    assert (empty.store_bytes, empty.store_ready_bytes, empty.store_models, empty.tiers) == (7, 7, {}, ())
    assert (empty.spill, empty.saved, empty.transfers) == (None, None, None), "they have not been written"
    models = {"ü" * 256: STORE, "": ModelFigures(), "other": STORE}
    latencies = Latencies()
    latencies.first_token.observe(0.003, 2)
    latencies.between_tokens.observe(300.0, 5)
    pool.stats.write(BLOCKS, SERVER, [1, 2])
    pool.store_table.write(models, 5)
    pool.scheduler_table.write({}, SCHEDULERS, latencies)
    pool.tier_table.write([MOONCAKE] * len(TIER_STATES))
    pool.tier_table.write([DISK, MOONCAKE])
    pool.spill_table.write(SPILL)
    pool.saved_table.write(SAVED)
    pool.transfer_table.write(TRANSFERS, COUNTS, SECONDS)
    reading = pool.reader.read()
    assert (reading.blocks, reading.server, reading.lane_counts) == (BLOCKS, SERVER, [1, 2])
    assert (reading.store_bytes, reading.store_ready_bytes, reading.store_models) == (7, 5, models)
    assert reading.tiers == (DISK, MOONCAKE)
    assert (reading.spill, reading.saved) == (SPILL, SAVED)
    for read, written in ((reading.spill, SPILL), (reading.saved, SAVED), (reading.tiers[0], DISK)):
        assert read is not None
        declared = type(written)(*dataclasses.astuple(written)[:2])
        assert [*map(type, dataclasses.astuple(read))] == [*map(type, dataclasses.astuple(declared))]
    assert reading.schedulers.totals == SCHEDULERS
    assert (reading.schedulers.token_counts[0, 2], reading.schedulers.token_counts[1, -1]) == (2, 5)
    assert reading.schedulers.token_counts.sum() == 7
    assert reading.schedulers.token_seconds.tolist() == [0.006, 1500.0]
    assert reading.transfers is not None
    assert reading.transfers.stats == TRANSFERS
    np.testing.assert_array_equal(reading.transfers.counts, COUNTS)
    np.testing.assert_array_equal(reading.transfers.seconds, SECONDS)
    pool.transfer_table.write(TransferStats(), 0 * COUNTS, 0 * SECONDS)
    pool.scheduler_table.write({}, SCHEDULERS, Latencies())
    assert reading.transfers.counts.any(), "a reading is a copy"
    assert reading.schedulers.token_counts.any()


def test_large_numbers_and_every_state_of_a_tier_are_read(pool: ObservedPool) -> None:
    tiers = tuple(TierStats(f"tier {state}", state, used_bytes=(1 << 53) - 1, read_s=0.25) for state in TIER_STATES)
    pool.tier_table.write(tiers)
    assert pool.reader.read().tiers == tiers
    pool.tier_table.write([])
    assert pool.reader.read().tiers == ()


def test_the_metrics_show_every_figure_of_the_daemon(pool: ObservedPool, empty: Reading) -> None:
    # The histogram of calls over lanes counts them.
    no_metric = {"lane_calls"}

    def shown(blocks: BlocksStats, server: ServerStats) -> list[Sample]:
        reading = dataclasses.replace(empty, blocks=blocks, server=server)
        metrics = [pool_metrics(reading, 16, {}), holder_metrics(reading, 1, 0, 0), access_metrics(server, {}, 0)]
        metrics.append(call_metrics(reading, pool.reader.call_keys, [1.0]))
        return [sample for families in metrics for sample in samples(families)]

    before = shown(BLOCKS, SERVER)
    for name in names_of(BlocksStats):
        assert changed(before, shown(dataclasses.replace(BLOCKS, **{name: 999}), SERVER)), name
    for name in set(names_of(ServerStats)) - no_metric:
        assert changed(before, shown(BLOCKS, dataclasses.replace(SERVER, **{name: 999}))), name


def test_the_metrics_show_every_figure_of_the_parts(empty: Reading) -> None:
    """Each figure is one sample, with the labels that it should have."""

    def of_store(figures: ModelFigures) -> list[Sample]:
        return samples(store_metrics(dataclasses.replace(empty, store_bytes=1, store_models={"m": figures})))

    def of_tiers(disk: TierStats) -> list[Sample]:
        return samples(tier_metrics(dataclasses.replace(empty, tiers=(disk, MOONCAKE))))

    def of_spill(spill: SpillStats) -> list[Sample]:
        return samples(spill_metrics(dataclasses.replace(empty, spill=spill, saved=SAVED)))

    def of_saved(saved: SavedStats) -> list[Sample]:
        return samples(spill_metrics(dataclasses.replace(empty, spill=SPILL, saved=saved)))

    def of_schedulers(figures: SchedulerFigures) -> list[Sample]:
        return samples(
            scheduler_metrics(dataclasses.replace(empty, schedulers=empty.schedulers._replace(totals=figures)))
        )

    def reason_of(name: str) -> dict[str, str]:
        return {"reason": name.removesuffix("_misses")} if name.endswith("_misses") else {}

    parts: list[tuple[Any, Any, Any]] = [
        (of_store, STORE, lambda labels, name: labels == {"model": "m"} | reason_of(name)),
        (of_tiers, DISK, lambda labels, name: labels == {"tier": "disk"}),
        (of_spill, SPILL, lambda labels, name: set(labels.values()) <= {name}),
        (of_saved, SAVED, lambda labels, name: set(labels.values()) <= {name}),
        (of_schedulers, SCHEDULERS, lambda labels, name: True),
        (of_transfers, TRANSFERS, lambda labels, name: set(labels.values()) <= set(name.split("_"))),
    ]
    with each_row() as row:
        for shown, figures, has_its_labels in parts:
            before = shown(figures)
            for name in NUMBERS_OF_A_TIER if figures is DISK else names_of(type(figures)):
                with row(f"{type(figures).__name__}.{name}"):
                    ((_, labels, value),) = changed(before, shown(dataclasses.replace(figures, **{name: 999})))
                    assert value == 999
                    assert has_its_labels(labels, name), labels


def of_transfers(stats: TransferStats) -> list[Sample]:
    reading = ObservedPool().reader.read()
    return samples(transfer_metrics(dataclasses.replace(reading, transfers=TransferReading(stats, COUNTS, SECONDS))))


def test_a_daemon_without_a_part_has_no_metrics_of_it(empty: Reading) -> None:
    without_store = dataclasses.replace(empty, store_bytes=0, store_models={"m": STORE})
    assert [*store_metrics(without_store)] == []
    for metrics in (tier_metrics, spill_metrics, transfer_metrics):
        assert samples(metrics(empty)) == []
    spill = samples(spill_metrics(dataclasses.replace(empty, spill=SPILL)))
    saved = samples(spill_metrics(dataclasses.replace(empty, saved=SAVED)))
    assert all("spill" in name for name, *_ in spill)
    assert all("sessions" in name for name, *_ in saved)


def test_one_state_of_a_tier_is_1_and_the_others_are_0(empty: Reading) -> None:
    for state in TIER_STATES:
        tiers = dataclasses.replace(DISK, state=state), MOONCAKE
        found = samples(tier_metrics(dataclasses.replace(empty, tiers=tiers)))
        states = {
            labels["state"]: value for name, labels, value in found if "state" in name and labels["tier"] == "disk"
        }
        assert states == {other: other == state for other in TIER_STATES}


def test_a_tier_that_does_not_know_its_size_has_no_capacity(empty: Reading) -> None:
    found = samples(tier_metrics(dataclasses.replace(empty, tiers=(DISK, MOONCAKE))))
    assert [labels["tier"] for name, labels, _ in found if name.endswith("capacity_bytes")] == ["disk"]


def test_durations_of_transfers_are_a_histogram_for_each_direction() -> None:
    rows = [row for row in of_transfers(TRANSFERS) if row[0].startswith("kvservice_transfer_duration_seconds")]
    for row, direction in enumerate(("in", "out")):
        own = {(name, labels.get("le")): value for name, labels, value in rows if labels["direction"] == direction}
        assert own["kvservice_transfer_duration_seconds_sum", None] == SECONDS[row]
        assert own["kvservice_transfer_duration_seconds_count", None] == COUNTS[row].sum()
        assert own["kvservice_transfer_duration_seconds_bucket", str(BUCKETS_S[1])] == COUNTS[row, :2].sum()


def test_a_snapshot_names_figures_that_exist() -> None:
    assert set(inspect_pb2.PoolSnapshot.DESCRIPTOR.fields_by_name) <= {*names_of(BlocksStats), *names_of(ServerStats)}
    assert not set(names_of(BlocksStats)) & set(names_of(ServerStats))


def play(engine: EngineScheduler, pool: ObservedPool, session: OpenSession) -> None:
    """Compute the requests that wait, up to their first token, which is reported after three seconds."""
    batch = engine.schedule(1.0)
    assert batch.step is not None
    pool.manager.mark_all_layers(session.space, batch.step.step_id)
    engine.update(Report(batch.number, [7] * len(batch.sampled)), 4.0)


def test_a_reading_has_the_schedulers_of_the_sessions(pool: ObservedPool) -> None:
    pool.open("without")
    sessions = [pool.open("chat"), pool.open("batch")]
    engines = [pool.schedulers.open_engine(session.space) for session in sessions]
    for count, engine in enumerate(engines, start=1):
        for number in range(count):
            engine.add(Request(number, [number] * 6, max_tokens=5), 1.0)
    play(engines[1], pool, sessions[1])
    engines[1].add(Request(9, [9] * 3, max_tokens=5), 4.0)
    pool.read()
    reading = pool.history.latest
    found = {session.name: session.scheduler for session in reading.sessions}
    assert found == {"without": None, "chat": engines[0].figures(), "batch": engines[1].figures()}
    assert (engines[1].figures().waiting, engines[1].figures().running) == (1, 2)
    held = samples(holder_metrics(reading, 8, 0, 0))
    assert by_label(held, "session_waiting_requests", "session") == {"chat": 1, "batch": 1}
    assert by_label(held, "session_running_requests", "session") == {"chat": 0, "batch": 2}
    shown = samples(scheduler_metrics(reading))
    states = {"waiting": 2, "running": 2, "swapped": 0, "stalled": 0}
    assert by_label(shown, "scheduler_requests", "state") == states
    assert ("kvservice_schedulers", {}, 2) in shown
    buckets = by_label(shown, "scheduler_first_token_seconds_bucket", "le")
    assert (buckets["2.0"], buckets["5.0"], buckets["+Inf"]) == (0, 2, 2)

    pool.schedulers.close_engine(sessions[1].space)
    pool.close(sessions[1])
    pool.read()
    after = pool.history.latest
    assert {session.name: session.scheduler for session in after.sessions}["chat"] == engines[0].figures()
    totals = after.schedulers.totals
    assert (after.schedulers.num_open, totals.running, totals.generated_tokens, totals.added) == (1, 0, 2, 4)


def by_label(found: list[Sample], name: str, label: str) -> dict[str, float]:
    return {labels[label]: value for of, labels, value in found if of == f"kvservice_{name}"}
