"""Snapshots, compared with the bookkeeping of each session, and readings during concurrent changes."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from observed_pool import MAX_TENANTS, ObservedPool, RandomOperations

from kvservice.blocks import BlocksStats, SequenceSnapshot
from kvservice.kept import RestartReport
from kvservice.scheduler import Request, SchedulerFigures
from kvservice.store import EngineFigures, ModelFigures
from kvservice.telemetry import (
    ATTACHED,
    LANE,
    REGION_BYTES,
    REGIONS,
    WIDTH,
    Reading,
    SavedStats,
    ServerStats,
    SpillStats,
    TransferStats,
    names_of,
)
from kvservice.tiers import TierStats
from kvservice.v1 import inspect_pb2, store_pb2

POOL_FIELDS = [field.name for field in inspect_pb2.PoolSnapshot.DESCRIPTOR.fields]


def test_the_store_is_summed_up_over_its_models() -> None:
    assert "store" not in snapshot_of(ObservedPool())
    pool = ObservedPool(store_bytes=4096)
    reasons = ("evicted", "not_whole", "other_namespace", "never_stored")
    missed = {f"{reason}_misses": number for number, reason in enumerate(reasons)}
    one = ModelFigures(blocks=3, leased=2, reserved=1, quarantined=4, used_bytes=100, hits=7, misses=5, **missed)
    pool.store_table.write({"a": one, "b": one}, 1024)
    found = snapshot_of(pool)
    expected = {"blocks": 6, "leased": 4, "reserved": 2, "used_bytes": 200, "hits": 14, "misses": 10, "quarantined": 8}
    expected |= {name: 2 * number for name, number in missed.items()}
    rates = {"up_bytes_per_s": 0, "down_bytes_per_s": 0}
    assert found["store"] == expected | {"num_bytes": 4096, "ready_bytes": 1024} | rates
    assert inspect_pb2.Snapshot(store=found["store"]).store.hits == 14


def test_tiers_are_in_the_snapshot_with_their_rates() -> None:
    assert snapshot_of(ObservedPool())["tiers"] == []
    pool = ObservedPool()
    disk = TierStats("disk", num_values=7, capacity_bytes=1 << 40, hits=3, misses=1, read_bytes=100, latency_s=0.5)
    pool.tier_table.write([disk, TierStats("mooncake", "failed")])
    pool.read()
    disk = replace(disk, hits=6, misses=2, read_bytes=400, written_bytes=1000)
    pool.tier_table.write([disk, TierStats("mooncake", "failed")])
    pool.read()
    found = snapshot_of(pool)
    assert found["tiers"][0] == asdict(disk) | pool.history.tiers()["disk"]
    first, second = inspect_pb2.Snapshot(**found).tiers
    assert (first.name, first.state, first.capacity_bytes, first.hit_share) == ("disk", "open", 1 << 40, 0.75)
    assert first.down_bytes_per_s > first.up_bytes_per_s > 0
    assert (second.state, second.HasField("hit_share")) == ("failed", False)


def test_spilled_blocks_and_saved_sessions_are_in_the_snapshot() -> None:
    assert not {"spill", "saved"} & snapshot_of(ObservedPool()).keys()
    pool = ObservedPool()
    for saved_bytes in (100, 700):
        pool.spill_table.write(SpillStats(saved_blocks=3, saved_bytes=saved_bytes, hit_tokens=16))
        pool.saved_table.write(SavedStats(num_sessions=2, used_bytes=50))
        pool.read()
    decoded = inspect_pb2.Snapshot(**snapshot_of(pool))
    assert (decoded.spill.saved_blocks, decoded.spill.hit_tokens) == (3, 16)
    assert decoded.spill.down_bytes_per_s > decoded.spill.up_bytes_per_s == 0
    assert (decoded.saved.num_sessions, decoded.saved.used_bytes) == (2, 50)
    assert list(names_of(SavedStats)) == list(inspect_pb2.SavedSnapshot.DESCRIPTOR.fields_by_name)


def test_transfers_are_in_the_snapshot_with_their_rates() -> None:
    assert "transfers" not in snapshot_of(ObservedPool())
    pool = ObservedPool()
    counts = np.zeros((2, WIDTH), np.int64)
    for bytes_out in (100, 700):
        counts[1, 3] += 1
        pool.transfer_table.write(TransferStats(engines=2, failed_in=3, bytes_out=bytes_out), counts, np.zeros(2))
        pool.read()
    decoded = inspect_pb2.Snapshot(**snapshot_of(pool)).transfers
    assert (decoded.engines, decoded.failed_in, decoded.bytes_out) == (2, 3, 700)
    assert decoded.out_bytes_per_s > decoded.in_bytes_per_s == 0
    assert 0 < decoded.p50_s < decoded.p99_s


def test_schedulers_are_with_their_sessions_and_summed_up() -> None:
    pool = ObservedPool()
    pool.open("without")
    assert "scheduling" not in snapshot_of(pool)
    engine = pool.schedulers.open_engine(pool.open("engine").space)
    assert "scheduling" not in snapshot_of(pool), "before the first request"
    engine.add(Request(1, [1, 2], max_tokens=3))
    engine.schedule()
    found = snapshot_of(pool)
    assert {row["name"]: row.get("scheduler") for row in found["sessions"]} == {
        "without": None, "engine": asdict(engine.figures()),
    }  # fmt: skip
    assert found["scheduling"] == {"totals": asdict(engine.figures())} | pool.history.scheduling()
    decoded = inspect_pb2.Snapshot(**found)
    assert [session.HasField("scheduler") for session in decoded.sessions] == [True, False]
    assert decoded.scheduling.totals.running == 1
    assert list(names_of(SchedulerFigures)) == list(inspect_pb2.SchedulerSnapshot.DESCRIPTOR.fields_by_name)


def test_engines_are_with_their_sessions() -> None:
    pool = ObservedPool()
    row = pool.open("engine").row.number
    pool.open("without")
    figures = EngineFigures(1, 2, 3, 4, 5, 6, 7, 1 << 53)
    pool.engine_table.write({row: figures})
    found = snapshot_of(pool)
    assert [session.get("engine") for session in found["sessions"]] == [figures._asdict(), None]
    decoded = inspect_pb2.Snapshot(**found)
    assert [session.HasField("engine") for session in decoded.sessions] == [True, False]
    assert list(EngineFigures._fields) == list(store_pb2.EngineReport.DESCRIPTOR.fields_by_name)
    pool.engine_table.write({})
    assert [session.get("engine") for session in snapshot_of(pool)["sessions"]] == [None, None]


def test_what_was_taken_over_is_in_the_snapshot() -> None:
    pool = ObservedPool()
    first = inspect_pb2.Snapshot(**snapshot_of(pool)).restart
    assert (first.outcome, first.is_kept) == ("first start", False)
    assert first.summary.startswith("nothing is kept")
    values = RestartReport("taken over", True, "signal 9", "", 5, 1.5, 0.25).to_json()
    values["kept"] |= {"sessions": 1, "sequences": 2, "cached_blocks": 3}
    values["lost"] |= {"sequences": 4}
    pool.reader.restart = RestartReport.from_json(values)
    found = snapshot_of(pool)["restart"]
    decoded = inspect_pb2.Snapshot(restart=found).restart
    assert (decoded.outcome, decoded.ended, decoded.num_restarts) == ("taken over", "signal 9", 5)
    assert (decoded.down_s, decoded.take_over_s, decoded.summary) == (1.5, 0.25, pool.reader.restart.summary)
    assert (found["kept"], found["lost"]) == (values["kept"], values["lost"])
    for part, message in (("kept", inspect_pb2.KeptSnapshot), ("lost", inspect_pb2.LostSnapshot)):
        assert list(values[part]) == list(message.DESCRIPTOR.fields_by_name)


def snapshot_of(
    pool: ObservedPool, max_sessions: int = 100, max_sequences: int = 100, search: str = ""
) -> dict[str, Any]:
    pool.read()
    return current(pool, max_sessions, max_sequences, search)


def current(pool: ObservedPool, max_sessions: int = 100, max_sequences: int = 100, search: str = "") -> dict[str, Any]:
    """Return the snapshot of the latest reading."""
    return asyncio.run(pool.views.snapshot(max_sessions, max_sequences, search))


def assert_sessions(pool: ObservedPool, found: dict[str, Any]) -> None:
    rows = {row["session_id"]: row for row in found["sessions"]}
    assert set(rows) == {session.session_id for session in pool.sessions}
    for session in pool.sessions:
        row, infos = rows[session.session_id], pool.manager.describe(session.space)
        assert row["name"] == session.name
        assert row["sequences"] == len(infos)
        assert row["swapped_sequences"] == sum(info.swapped for info in infos)
        assert row["tokens"] == sum(info.length for info in infos)
        assert row["blocks"] == sum(info.num_blocks for info in infos)
    blocks = [row["blocks"] for row in found["sessions"]]
    assert blocks == sorted(blocks, reverse=True)


def assert_sequences(pool: ObservedPool, found: dict[str, Any]) -> None:
    expected = [
        sequence_row(session.session_id, session.name, info)
        for session in pool.sessions
        for info in pool.manager.describe(session.space)
    ]
    by_id = {(row["session_id"], row["sequence_id"]): row for row in found["sequences"]}
    assert by_id == {(row["session_id"], row["sequence_id"]): row for row in expected}
    assert len(found["sequences"]) == len(expected) == found["num_sequences"]
    blocks = [row["blocks"] for row in found["sequences"]]
    assert blocks == sorted(blocks, reverse=True)


def sequence_row(session_id: int, session_name: str, info: SequenceSnapshot) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "session_name": session_name,
        "sequence_id": info.sequence_id,
        "length": info.length,
        "computed": info.num_computed,
        "blocks": info.num_blocks,
        "swapped": info.swapped,
    }


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_rows_agree_with_the_bookkeeping_after_each_operation(seed: int) -> None:
    pool = ObservedPool()
    operations = RandomOperations(pool, seed)
    most: Counter[str] = Counter()
    for _ in range(300):
        operations.step()
        found = snapshot_of(pool)
        assert_sessions(pool, found)
        assert_sequences(pool, found)
        tenants = pool.reader.read().tenants
        assert len(tenants) <= MAX_TENANTS + 1
        counted = [sum(of) for of in zip(*tenants.values(), strict=True)]
        stats = pool.manager.stats()
        assert counted == [stats.computed_tokens, stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens]
        for column, name in enumerate(("computed_tokens", "query_tokens", "hit_tokens")):
            by_sessions = sum(row[name] for row in found["sessions"])
            assert by_sessions <= counted[column]
            most[name] = max(most[name], by_sessions)
        inspect_pb2.Snapshot(**found)  # has these fields, of these types
    assert min(most.values()) > 0


def test_the_pools_figures_are_the_gauges() -> None:
    pool = ObservedPool()
    names = (*names_of(BlocksStats), *names_of(ServerStats))
    gauges = {name: 100 + n for n, name in enumerate(names)} | {"draining": 1}
    pool.read(**gauges)
    found = current(pool)["pool"]
    assert found == {name: gauges[name] for name in POOL_FIELDS}
    assert found["draining"] is True
    assert snapshot_of(pool)["pool"]["draining"] is False


def test_a_session_is_shown_with_what_it_shares_and_whether_it_waits() -> None:
    pool = ObservedPool()
    before = time.monotonic()
    session = pool.open("\N{SNOWMAN}" * 64, "acme")
    (row,) = snapshot_of(pool)["sessions"]
    assert (row["session_id"], row["name"], row["tenant"]) == (1, "\N{SNOWMAN}" * 64, "acme")
    assert (row["attached"], row["lane"], row["regions"], row["region_bytes"]) == (False, False, 0, 0)
    assert 0 <= row["age_s"] <= time.monotonic() - before + 0.001  # the opening time is in whole milliseconds
    for column, number in ((ATTACHED, 1), (LANE, 1), (REGIONS, 3), (REGION_BYTES, 1 << 40)):
        session.row.set(column, number)
    (row,) = snapshot_of(pool)["sessions"]
    assert (row["attached"], row["lane"], row["regions"], row["region_bytes"]) == (True, True, 3, 1 << 40)


def test_rates_and_calls_are_the_historys() -> None:
    pool = ObservedPool()
    pool.read()
    pool.calls.observe("allocate", "OK", "stream", 1e-3)
    pool.calls.observe("allocate", "RESOURCE_EXHAUSTED", "unary", 1e-3)
    pool.read(computed_tokens=50, out_of_blocks=2)
    found = current(pool)
    assert found["rates"] == pool.history.rates()
    assert found["rates"]["computed_tokens"] > 0
    (calls,) = found["calls"]
    assert (calls["method"], calls["calls"], calls["errors"]) == ("allocate", 2, 1)


def small_pool() -> ObservedPool:
    """Three sessions; the second has the most blocks."""
    pool = ObservedPool()
    for name, tenant, lengths in (("Engine", "acme", (4, 8)), ("batch", "Zeta", (30,)), ("", "acme", (12, 5))):
        session = pool.open(name, tenant)
        for length in lengths:
            pool.compute(session, 700_000 + length, [length] * length)
    return pool


def rows(pool: ObservedPool, **request: Any) -> tuple[list[int], list[int], int, int]:
    found = snapshot_of(pool, **request)
    sessions = [row["session_id"] for row in found["sessions"]]
    return sessions, [row["length"] for row in found["sequences"]], found["num_sessions"], found["num_sequences"]


def test_the_largest_come_first_and_the_others_are_counted() -> None:
    pool = small_pool()
    everything = ([2, 3, 1], [30, 12, 8, 5, 4], 3, 5)
    assert rows(pool) == everything
    for count in range(7):
        expected = everything[0][:count], everything[1][:count], 3, 5
        assert rows(pool, max_sessions=count, max_sequences=count) == expected


def test_search() -> None:
    everything = ([2, 3, 1], [30, 12, 8, 5, 4], 3, 5)
    searches = {
        "": everything,
        "eng": ([1], [8, 4], 1, 2),
        "NGIN": ([1], [8, 4], 1, 2),
        "acme": ([3, 1], [12, 8, 5, 4], 2, 4),
        "zeta": ([2], [30], 1, 1),
        "2": ([2], [30, 12], 1, 2),  # a session id, which is also part of sequence ids
        "700": ([], [30, 12, 8, 5, 4], 0, 5),
        "700005": ([], [5], 0, 1),
        "%": ([], [], 0, 0),
    }
    pool = small_pool()
    assert {search: rows(pool, search=search) for search in searches} == searches


class Interrupting(np.ndarray[Any, Any]):
    """An array that calls a function before it is copied or read by row numbers for the first time."""

    def __array_finalize__(self, _: object) -> None:
        self.interrupt: Callable[[], object] | None = None

    def interrupted(self) -> None:
        if self.interrupt is not None:
            interrupt, self.interrupt = self.interrupt, None
            interrupt()

    def copy(self, *_: Any) -> Any:
        copied = np.array(self)
        self.interrupted()
        return copied

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, np.ndarray):
            self.interrupted()
        return super().__getitem__(key)


def interrupted(pool: ObservedPool, name: str, interrupt: Callable[[], object]) -> None:
    array = pool.reader.arrays[name].view(Interrupting)
    array.interrupt = interrupt
    pool.reader.arrays[name] = array


def test_a_sequence_that_is_freed_while_it_is_read_is_left_out() -> None:
    """It is freed after the rows in use were found, and before they are read."""
    pool = ObservedPool()
    for number in range(3):
        pool.compute(pool.open(f"{number}"), 1, [1])
    freed = pool.sessions[1]
    interrupted(pool, "sequence_states", lambda: pool.manager.free(freed.space, [1]))
    assert pool.reader.sequences().sessions.tolist() == [0, 2]
    assert not freed.space.sequence_ids()
    interrupted(pool, "sequence_states", lambda: pool.manager.free(pool.sessions[2].space, [1]))
    assert [session.sequences for session in pool.reader.read().sessions] == [1, 0, 0]


def test_tokens_of_a_session_that_ends_are_neither_missed_nor_counted_twice() -> None:
    """The session ends after one of the two arrays has been read."""
    for half in ("sessions", "tenants"):
        pool = ObservedPool()
        session = pool.open("", "acme")
        session.row.counters[0] += 1000
        interrupted(pool, half, functools.partial(pool.close, session))
        assert pool.reader.read().tenants == {"acme": (1000, 0, 0)}, half
        assert not pool.sessions


def test_a_change_that_was_never_finished_does_not_hold_the_reader() -> None:
    """The writer was killed during a change."""
    pool = ObservedPool()
    pool.compute(pool.open("name"), 1, [1])
    # The number is odd during a change.
    pool.reader.arrays["sessions_version"] = np.array([1])
    found: list[Reading] = []
    reading = threading.Thread(target=lambda: found.append(pool.reader.read()), daemon=True)
    reading.start()
    reading.join(20)
    assert [session.name for session in found[0].sessions] == ["name"]


def test_a_reading_is_a_copy() -> None:
    pool = ObservedPool()
    pool.compute(pool.open("name"), 1, [1])
    reading = pool.reader.read()
    pool.calls.observe("free", "OK", "unary", 1.0)
    pool.manager.device.ages.counts += 1
    pool.manager.device.ages.seconds += 1
    assert not np.any(reading.call_counts)
    assert not np.any(reading.call_seconds)
    assert not np.any(reading.age_counts)
    assert not np.any(reading.age_seconds)
    for array in pool.reader.arrays.values():
        assert not array.flags.writeable
