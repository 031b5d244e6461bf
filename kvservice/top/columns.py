"""Columns of the tables, and the order of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.text import Text

from kvservice.top import format as fmt
from kvservice.v1.inspect_pb2 import SessionSnapshot, Snapshot


@dataclass(frozen=True)
class Column:
    """A column. `value(row)` is the sort key, or None if the row has none; `text(value)` is the displayed text."""

    key: str
    title: str
    width: int
    value: Callable[[Any], Any]
    text: Callable[[Any], str] = fmt.count
    is_number: bool = True

    @property
    def justify(self) -> Literal["left", "right"]:
        return "right" if self.is_number else "left"

    def shown(self, row: Any) -> str:
        return self.text(self.value(row))

    def cell(self, shown: str) -> Text:
        return Text(shown, no_wrap=True, overflow="ellipsis", justify=self.justify)


@dataclass(frozen=True)
class Table:
    """A table. `rows` selects the rows of a snapshot; `total` is their number including rows that it left out.
    `is_shown` says whether a snapshot has anything for the table."""

    name: str
    columns: tuple[Column, ...]
    default_sort: str
    rows: Callable[[Snapshot], Sequence[Any]]
    total: Callable[[Snapshot], int]
    is_shown: Callable[[Snapshot], bool] = lambda _: True

    def column(self, key: str) -> Column:
        """Return the column with this key, or the default sort column if there is none."""
        found = {column.key: column for column in self.columns}
        return found.get(key, found[self.default_sort])

    def ordered(self, snapshot: Snapshot, key: str, reverse: bool) -> list[Any]:
        """Return the rows in order: largest numbers first, texts from A to Z, or reversed. Rows without a value are
        last.

        Rows with equal values are ordered by the first column, so that they keep their places between updates.
        """
        column = self.column(key)
        by_first = sorted(self.rows(snapshot), key=self.columns[0].value)
        rows = [row for row in by_first if column.value(row) is not None]
        without = [row for row in by_first if column.value(row) is None]
        return sorted(rows, key=column.value, reverse=column.is_number != reverse) + without


def _text(key: str, title: str, width: int, value: Callable[[Any], str]) -> Column:
    return Column(key, title, width, value, fmt.printable, is_number=False)


def _hit_share(row: Any) -> float | None:
    return row.hit_tokens / row.query_tokens if row.query_tokens else None


def _p50_s(row: Any) -> float | None:
    return row.p50_s if row.HasField("p50_s") else None


def _p99_s(row: Any) -> float | None:
    return row.p99_s if row.HasField("p99_s") else None


CALLS = Table(
    "Calls",
    (
        _text("method", "METHOD", 28, lambda row: row.method),
        Column("rate", "CALLS/s", 9, lambda row: row.calls_per_s, fmt.rate),
        Column("p50", "p50", 9, _p50_s, fmt.latency),
        Column("p99", "p99", 9, _p99_s, fmt.latency),
        Column("calls", "CALLS", 11, lambda row: row.calls),
        Column("errors", "ERRORS", 9, lambda row: row.errors),
    ),
    "rate",
    lambda snapshot: snapshot.calls,
    lambda snapshot: len(snapshot.calls),
)

SESSIONS = Table(
    "Sessions",
    (
        Column("session", "ID", 8, lambda row: row.session_id, str),
        _text("name", "NAME", 18, lambda row: row.name),
        _text("tenant", "TENANT", 12, lambda row: row.tenant),
        Column("blocks", "BLOCKS", 9, lambda row: row.blocks),
        Column("tokens", "TOKENS", 9, lambda row: row.tokens),
        Column("sequences", "SEQS", 7, lambda row: row.sequences),
        Column("swapped", "SWAPPED", 8, lambda row: row.swapped_sequences),
        Column("hits", "HITS", 7, _hit_share, fmt.share),
        Column("computed", "COMPUTED", 9, lambda row: row.computed_tokens),
        Column("regions", "REGIONS", 8, lambda row: row.region_bytes, fmt.size),
        _text("lane", "LANE", 5, lambda row: "lane" if row.lane else ""),
        _text("state", "STATE", 8, lambda row: "" if row.attached else "detached"),
        Column("age", "AGE", 8, lambda row: row.age_s, fmt.age),
    ),
    "blocks",
    lambda snapshot: snapshot.sessions,
    lambda snapshot: snapshot.num_sessions,
)

SEQUENCES = Table(
    "Sequences",
    (
        Column("sequence", "SEQUENCE", 20, lambda row: row.sequence_id, str),
        Column("session", "SESSION", 8, lambda row: row.session_id, str),
        _text("name", "NAME", 18, lambda row: row.session_name),
        Column("blocks", "BLOCKS", 9, lambda row: row.blocks),
        Column("length", "LENGTH", 9, lambda row: row.length),
        Column("computed", "COMPUTED", 9, lambda row: row.computed),
        _text("tier", "TIER", 6, lambda row: "swap" if row.swapped else "device"),
    ),
    "blocks",
    lambda snapshot: snapshot.sequences,
    lambda snapshot: snapshot.num_sequences,
)


def _scheduling_sessions(snapshot: Snapshot) -> list[SessionSnapshot]:
    return [session for session in snapshot.sessions if session.HasField("scheduler")]


def _cached_share(row: SessionSnapshot) -> float | None:
    scheduler = row.scheduler
    return scheduler.cached_tokens / scheduler.prompt_tokens if scheduler.prompt_tokens else None


def _accepted_share(row: SessionSnapshot) -> float | None:
    scheduler = row.scheduler
    return scheduler.accepted_tokens / scheduler.proposed_tokens if scheduler.proposed_tokens else None


def _preemptions(row: SessionSnapshot) -> int:
    return row.scheduler.recompute_preemptions + row.scheduler.swap_preemptions


SCHEDULERS = Table(
    "Schedulers",
    (
        Column("session", "SESSION", 8, lambda row: row.session_id, str),
        _text("name", "NAME", 18, lambda row: row.name),
        Column("waiting", "WAITING", 8, lambda row: row.scheduler.waiting),
        Column("running", "RUNNING", 8, lambda row: row.scheduler.running),
        Column("swapped", "SWAPPED", 8, lambda row: row.scheduler.swapped),
        Column("stalled", "STALLED", 8, lambda row: row.scheduler.stalled),
        Column("finished", "FINISHED", 9, lambda row: row.scheduler.finished),
        Column("generated", "GENERATED", 10, lambda row: row.scheduler.generated_tokens),
        Column("cached", "CACHED", 7, _cached_share, fmt.share),
        Column("preempted", "PREEMPTED", 10, _preemptions),
        Column("recomputed", "RECOMPUTED", 11, lambda row: row.scheduler.recomputed_tokens),
        Column("accepted", "ACCEPTED", 9, _accepted_share, fmt.share),
    ),
    "waiting",
    _scheduling_sessions,
    lambda snapshot: len(_scheduling_sessions(snapshot)),
    lambda snapshot: snapshot.HasField("scheduling"),
)


def _engine_sessions(snapshot: Snapshot) -> list[SessionSnapshot]:
    return [session for session in snapshot.sessions if session.HasField("engine")]


def _found_share(row: SessionSnapshot) -> float | None:
    return row.engine.found_tokens / row.engine.prompt_tokens if row.engine.prompt_tokens else None


ENGINES = Table(
    "Engines",
    (
        Column("session", "SESSION", 8, lambda row: row.session_id, str),
        _text("name", "NAME", 26, lambda row: row.name),
        Column("found", "FOUND", 8, _found_share, fmt.share),
        Column("found_tokens", "OF TOKENS", 11, lambda row: row.engine.prompt_tokens),
        Column("loading", "LOADING", 8, lambda row: row.engine.loads_in_flight),
        Column("loaded", "LOADED", 9, lambda row: row.engine.blocks_loaded),
        Column("not_loaded", "NOT LOADED", 11, lambda row: row.engine.blocks_not_loaded),
        Column("saved", "SAVED", 9, lambda row: row.engine.blocks_saved),
        Column("not_saved", "NOT SAVED", 10, lambda row: row.engine.blocks_not_saved),
        Column("skipped", "SKIPPED", 9, lambda row: row.engine.blocks_skipped),
    ),
    "found_tokens",
    _engine_sessions,
    lambda snapshot: len(_engine_sessions(snapshot)),
    lambda snapshot: bool(_engine_sessions(snapshot)),
)

TABLES = (CALLS, SESSIONS, SCHEDULERS, ENGINES, SEQUENCES)
SORT_KEYS = tuple(dict.fromkeys(column.key for table in TABLES for column in table.columns))
