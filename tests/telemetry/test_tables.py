"""The tables of calls, sessions and tenants."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvservice.blocks import BlocksStats
from kvservice.errors import KVServiceError
from kvservice.telemetry import (
    ATTACHED,
    BUCKETS_S,
    LANE,
    REGION_BYTES,
    REGIONS,
    STATUSES,
    Arrays,
    CallTable,
    EngineTable,
    FiguresTable,
    Reader,
    SavedStats,
    SchedulerTable,
    ServerStats,
    SessionTable,
    SpillStats,
    StoreTable,
    TierTable,
    TransferTable,
    keys,
    names_of,
)


def test_calls_are_counted_where_they_belong() -> None:
    table = CallTable(["append", "free"], lambda _name, shape, dtype: np.zeros(shape, dtype))
    table.observe("free", "NOT_FOUND", "stream", BUCKETS_S[3])  # at a bound counts as below, as in Prometheus
    table.observe("free", "NOT_FOUND", "stream", BUCKETS_S[3] * 1.01)
    table.observe("append", "OK", "unary", 1e9)
    counted = {
        key: ({i: n for i, n in enumerate(counts) if n}, seconds)
        for key, counts, seconds in zip(
            keys(["append", "free"]), table.counts.tolist(), table.seconds.tolist(), strict=True
        )
        if any(counts)
    }
    assert counted == {
        ("free", "NOT_FOUND", "stream"): ({3: 1, 4: 1}, pytest.approx(2.01 * BUCKETS_S[3])),
        ("append", "OK", "unary"): ({len(BUCKETS_S): 1}, 1e9),
    }


def test_every_status_has_a_row() -> None:
    pending = [KVServiceError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        assert kind.status in STATUSES


# ---- sessions and tenants, as read by the observer


MAX_SESSIONS, MAX_TENANTS = 4, 2


class Both:
    """Return the daemon's and the observer's ends, over arrays of one process."""

    def __init__(self) -> None:
        self.arrays: Arrays = {
            "sequence_states": np.zeros((6, 8), np.int64),
            "block_stats": np.zeros(len(names_of(BlocksStats)), np.int64),
            "server_stats": np.zeros(len(names_of(ServerStats))),
            "lane_counts": np.zeros(2, np.int64),
            "call_counts": np.zeros((1, 1), np.int64),
            "call_seconds": np.zeros(1),
            "age_counts": np.zeros((1, 1), np.int64),
            "age_seconds": np.zeros(1),
        }
        self.table = SessionTable(MAX_SESSIONS, MAX_TENANTS, self._zeros)
        StoreTable(0, 1, self._zeros)
        TierTable(self._zeros)
        FiguresTable("spill", SpillStats, self._zeros)
        FiguresTable("saved", SavedStats, self._zeros)
        TransferTable(self._zeros)
        SchedulerTable(MAX_SESSIONS, self._zeros)
        EngineTable(MAX_SESSIONS, self._zeros)
        self.reader = Reader(self.arrays, [], 0.0)

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self.arrays[name] = np.zeros(shape, dtype)
        return self.arrays[name]


@pytest.fixture
def both() -> Both:
    return Both()


def test_a_session_is_read_with_all_that_is_set(both: Both) -> None:
    name = "\N{ROCKET}" * 64  # four bytes each
    row = both.table.open(7, name, "acme", 1500)
    for column, value in ((ATTACHED, 1), (LANE, 1), (REGIONS, 2), (REGION_BYTES, 8192)):
        row.set(column, value)
    row.counters[0] += 5
    row.counters[2] += 3
    # session row + 1, id, length, computed, blocks, swapped: see SequenceRows
    both.arrays["sequence_states"][2, :7] = (10, 8, 3, 0, 0, row.number + 1, 42)
    both.arrays["sequence_states"][5, :7] = (4, 4, 1, 0, 1, row.number + 1, 43)
    (session,) = both.reader.read().sessions
    assert (session.session_id, session.name, session.tenant, session.opened_s) == (7, name, "acme", 1.5)
    assert (session.attached, session.lane, session.regions, session.region_bytes) == (True, True, 2, 8192)
    assert (session.sequences, session.swapped_sequences, session.tokens, session.blocks) == (2, 1, 14, 4)
    assert (session.computed_tokens, session.query_tokens, session.hit_tokens) == (5, 0, 3)
    rows = both.reader.sequences()
    assert rows.ids.tolist() == [42, 43]
    assert both.reader.session(row.number) == (7, name)


def test_tenants_keep_the_tokens_of_sessions_that_ended(both: Both) -> None:
    for n in range(3):
        row = both.table.open(n + 1, "", "acme", 0)
        row.counters[1] += 10
        assert both.reader.read().tenants == {"acme": (0, 10 * (n + 1), 0)}
        both.table.close(row)
        assert both.reader.read().tenants == {"acme": (0, 10 * (n + 1), 0)}
        assert both.reader.read().sessions == []


def test_tenants_beyond_the_limit_are_one(both: Both) -> None:
    rows = [both.table.open(n + 1, "", tenant, 0) for n, tenant in enumerate(("a", "", "c", "d"))]
    for n, row in enumerate(rows):
        row.counters[0] += 10**n
    reading = both.reader.read()
    assert reading.tenants == {"a": (1, 0, 0), "": (10, 0, 0), "other": (1100, 0, 0)}
    assert [session.tenant for session in reading.sessions] == ["a", "", "other", "other"]


def test_a_session_that_has_ended_writes_nothing_into_the_row_of_the_next(both: Both) -> None:
    ended = both.table.open(1, "long name", "a", 0)
    both.table.close(ended)
    row = both.table.open(2, "n", "a", 0)
    assert row.number == ended.number
    ended.set(REGIONS, 9)
    (session,) = both.reader.read().sessions
    assert (session.name, session.regions) == ("n", 0)


def test_rows_are_recovered_with_their_tokens(both: Both) -> None:
    """The earlier process ended while it closed session 2 and opened another one."""
    kept, closing, opening = (both.table.open(n, name, tenant, 1000) for n, name, tenant in (
        (1, "one", "acme"), (2, "two", "zoo"), (3, "three", "new")
    ))  # fmt: skip
    for n, row in enumerate((kept, closing, opening)):
        row.counters[0] = 10**n
        row.set(ATTACHED, 1)
        row.set(LANE, 1)
    both.arrays["sessions_version"][0] += 1
    table = SessionTable(MAX_SESSIONS, MAX_TENANTS, lambda name, _shape, _dtype: both.arrays[name])
    rows = table.recover({kept.number: (1, "one", "acme")})
    (session,) = both.reader.read().sessions
    assert (session.session_id, session.name, session.tenant, session.opened_s) == (1, "one", "acme", 1.0)
    assert (session.attached, session.lane, session.computed_tokens) == (False, False, 1)
    assert both.reader.read().tenants == {"acme": (1, 0, 0), "zoo": (10, 0, 0), "other": (100, 0, 0)}
    assert both.arrays["sessions_version"][0] % 2 == 0
    rows[kept.number].counters[0] += 1
    numbers = {table.open(n, "", "zoo", 0).number for n in range(4, 7)}
    assert len(numbers | {kept.number}) == MAX_SESSIONS
    assert both.reader.read().tenants["acme"] == (2, 0, 0)
    with pytest.raises(IndexError):
        table.open(7, "", "", 0)
