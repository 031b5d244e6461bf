"""The reader of the shared arrays. It returns their content as plain values."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlocksStats
from kvservice.blocks.state import (
    COMPUTED_TOKENS,
    HIT_TOKENS,
    LENGTH,
    NAMESPACE,
    NUM_BLOCKS,
    NUM_COMPUTED,
    NUM_COUNTERS,
    QUERY_TOKENS,
    SEQUENCE_ID,
    SWAPPED,
)
from kvservice.kept.report import RestartReport
from kvservice.scheduler import SchedulerFigures
from kvservice.store.namespaces import EngineFigures, ModelFigures
from kvservice.telemetry.arrays import Arrays
from kvservice.telemetry.tables import (
    ATTACHED,
    IN_USE,
    LANE,
    OPENED_MS,
    REGION_BYTES,
    REGIONS,
    SESSION_ID,
    TENANT,
    Key,
    QuotaUse,
    SavedStats,
    SchedulerReading,
    ServerStats,
    TransferReading,
    get_name,
    keys,
    read_engines,
    read_figures,
    read_schedulers,
    read_store,
    read_tenant_quotas,
    read_tiers,
    read_transfers,
)
from kvservice.tiers.protocol import SpillStats, TierStats

# Retries for data that is being changed. A change takes microseconds unless the daemon is descheduled.
_MAX_TRIES, _RETRY_S = 100, 0.001

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


class SessionReading(NamedTuple):
    """An open session, with sums over its sequences. `blocks` counts the entries of its block tables. `scheduler` is
    None if it has none, `engine` if it has reported none."""

    session_id: int
    name: str
    tenant: str
    attached: bool
    opened_s: float
    sequences: int
    swapped_sequences: int
    tokens: int
    blocks: int
    regions: int
    region_bytes: int
    lane: bool
    computed_tokens: int
    query_tokens: int
    hit_tokens: int
    scheduler: SchedulerFigures | None = None
    engine: EngineFigures | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """Live sequences, int64[n] each: row numbers, rows of their sessions, sequence ids, and the state in the rows."""

    numbers: IntArray
    sessions: IntArray
    ids: IntArray
    lengths: IntArray
    computed: IntArray
    blocks: IntArray
    swapped: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """All data except blocks and tables, approximately at one moment. `time_s` is monotonic.

    `call_counts` int64[rows, buckets + 1] and `call_seconds` float64[rows] come from `CallTable`, `age_counts` and
    `age_seconds` from `BlockAges`. `tenants` maps each tenant to its computed, queried and hit tokens since the start.
    `store_bytes` is the size of the block store, 0 if there is none; `store_ready_bytes` of it are there. `tiers` are
    those below it, fastest first. `spill` is None if blocks of the pool are not saved, `saved` if sessions are not,
    `transfers` if there are no transfer engines. `tenant_quotas` are by tenant and by limit, and empty if the daemon
    has one tenant.
    """

    time_s: float
    blocks: BlocksStats
    server: ServerStats
    lane_counts: list[int]
    call_counts: IntArray
    call_seconds: FloatArray
    age_counts: IntArray
    age_seconds: FloatArray
    sessions: list[SessionReading]
    tenants: dict[str, tuple[int, ...]]
    store_bytes: int
    store_ready_bytes: int
    store_models: dict[str, ModelFigures]
    schedulers: SchedulerReading
    tiers: tuple[TierStats, ...] = ()
    spill: SpillStats | None = None
    saved: SavedStats | None = None
    transfers: TransferReading | None = None
    tenant_quotas: Mapping[str, Mapping[str, QuotaUse]] = field(default_factory=dict)


class Reader:
    """Reads the arrays of a daemon that has these RPC methods and started at `started_s` (monotonic). `restart` says
    what the daemon took over then."""

    def __init__(
        self, arrays: Arrays, methods: Sequence[str], started_s: float, restart: RestartReport | None = None
    ) -> None:
        self.arrays = arrays
        self.started_s = started_s
        self.restart = restart or RestartReport()
        self.call_keys: list[Key] = list(keys(methods))

    def read(self) -> Reading:
        """Read all data. The gauges are those that the daemon wrote last."""
        arrays = self.arrays
        session_rows, tenants = self._sessions()
        figures, schedulers = read_schedulers(arrays)
        return Reading(
            time.monotonic(),
            BlocksStats(*arrays["block_stats"].tolist()),
            ServerStats(*arrays["server_stats"].tolist()),
            arrays["lane_counts"].tolist(),
            arrays["call_counts"].copy(),
            arrays["call_seconds"].copy(),
            arrays["age_counts"].copy(),
            arrays["age_seconds"].copy(),
            list(self._describe(session_rows, figures, read_engines(arrays))),
            tenants,
            *read_store(arrays),
            schedulers,
            read_tiers(arrays),
            read_figures(arrays, "spill", SpillStats),
            read_figures(arrays, "saved", SavedStats),
            read_transfers(arrays),
            read_tenant_quotas(arrays),
        )

    def sequences(self) -> SequenceRows:
        states = self.arrays["sequence_states"]
        numbers = np.flatnonzero(states[:, NAMESPACE])
        rows = states[numbers]
        if not (live := rows[:, NAMESPACE] != 0).all():  # a sequence was freed between the two reads
            numbers, rows = numbers[live], rows[live]
        wanted = (SEQUENCE_ID, LENGTH, NUM_COMPUTED, NUM_BLOCKS, SWAPPED)
        return SequenceRows(numbers, rows[:, NAMESPACE] - 1, *(rows[:, column] for column in wanted))

    def session(self, row: int) -> tuple[int, str]:
        """Return id and name of the session in a row. The id is 0 if the row is free."""
        return int(self.arrays["sessions"][row, SESSION_ID]), get_name(self.arrays["session_names"][row])

    def _sessions(self) -> tuple[IntArray, dict[str, tuple[int, ...]]]:
        """Return a copy of the session rows, and the tokens of the tenants at the same moment, so that the tokens of a
        session that ends are counted exactly once."""
        arrays = self.arrays
        version = arrays["sessions_version"]
        for _ in range(_MAX_TRIES):  # bounded, because a daemon that is killed during a change never completes it
            before = int(version[0])
            rows, tenants = arrays["sessions"].copy(), arrays["tenants"].copy()
            if before % 2 == 0 and before == int(version[0]):
                break
            time.sleep(_RETRY_S)
        live = rows[rows[:, SESSION_ID] != 0]
        np.add.at(tenants[:, :NUM_COUNTERS], live[:, TENANT], live[:, :NUM_COUNTERS])
        names = arrays["tenant_names"]
        tokens = {
            get_name(names[i]): tuple(tenants[i, :NUM_COUNTERS].tolist()) for i in np.flatnonzero(tenants[:, IN_USE])
        }
        return rows, tokens

    def _describe(
        self, rows: IntArray, schedulers: Mapping[int, SchedulerFigures], engines: Mapping[int, EngineFigures]
    ) -> Iterator[SessionReading]:
        sequences = self.sequences()
        count = len(rows)

        def sums(weights: Any = None) -> list[float]:
            return np.bincount(sequences.sessions, weights, minlength=count).tolist()  # type: ignore[no-any-return]

        held, swapped = sums(), sums(sequences.swapped)
        tokens, blocks = sums(sequences.lengths), sums(sequences.blocks)
        tenants = self.arrays["tenant_names"]
        for number in np.flatnonzero(rows[:, SESSION_ID]).tolist():
            row = rows[number].tolist()
            yield SessionReading(
                row[SESSION_ID],
                get_name(self.arrays["session_names"][number]),
                get_name(tenants[row[TENANT]]),
                bool(row[ATTACHED]),
                row[OPENED_MS] / 1e3,
                int(held[number]),
                int(swapped[number]),
                int(tokens[number]),
                int(blocks[number]),
                row[REGIONS],
                row[REGION_BYTES],
                bool(row[LANE]),
                row[COMPUTED_TOKENS],
                row[QUERY_TOKENS],
                row[HIT_TOKENS],
                schedulers.get(number),
                engines.get(number),
            )
