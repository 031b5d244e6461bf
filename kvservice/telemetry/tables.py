"""The tables in the shared arrays: calls, sessions, and figures of the daemon's parts."""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlocksStats
from kvservice.blocks.plans import Zeros
from kvservice.blocks.state import NUM_COUNTERS
from kvservice.scheduler import Latencies, SchedulerFigures
from kvservice.scheduler.stats import WIDTH as TOKEN_WIDTH
from kvservice.store.namespaces import EngineFigures, ModelFigures
from kvservice.tiers.protocol import STATES, TierStats

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# ---- figures: a dataclass of numbers, in whose objects the daemon counts


T = TypeVar("T", bound="DataclassInstance")


def names_of(kind: type[DataclassInstance]) -> tuple[str, ...]:
    """Return the names of the figures, in the order of their declaration."""
    return tuple(one.name for one in fields(kind))


def values_of(figures: DataclassInstance) -> tuple[Any, ...]:
    """Return the figures in the order of their declaration. Unlike `astuple` it makes no deep copies, which would take
    long with many sessions."""
    return _values_of(type(figures))(figures)


@functools.cache
def _values_of(kind: type[DataclassInstance]) -> Callable[[DataclassInstance], tuple[Any, ...]]:
    return operator.attrgetter(*names_of(kind))


# ---- latency of calls: one histogram per method, status and transport, updated in place


BUCKETS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
WIDTH = len(BUCKETS_S) + 1
TRANSPORTS = ("unary", "stream")
# gRPC's names of the status codes with which a call can end.
STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip

Key = tuple[str, str, str]


def keys(methods: Sequence[str]) -> Iterator[Key]:
    """Return (method, status, transport) in the order of the rows."""
    return product(methods, STATUSES, TRANSPORTS)


class CallTable:
    """Histograms of call latency: `counts` int64[methods * statuses * transports, buckets + 1], and `seconds`, the sum
    over the calls of each row, float64[rows]."""

    def __init__(self, methods: Sequence[str], zeros: Zeros) -> None:
        self._rows = {key: row for row, key in enumerate(keys(methods))}
        self.counts: npt.NDArray[np.int64] = zeros("call_counts", (len(self._rows), WIDTH), np.int64)
        self.seconds: npt.NDArray[np.float64] = zeros("call_seconds", (len(self._rows),), np.float64)
        # Updating an element of a memoryview takes a quarter of NumPy's time.
        self._counts: Any = self.counts.reshape(-1).data
        self._seconds: Any = self.seconds.data

    def observe(self, method: str, status: str, transport: str, seconds: float) -> None:
        row = self._rows[method, status, transport]
        self._counts[row * WIDTH + bisect_left(BUCKETS_S, seconds)] += 1
        self._seconds[row] += seconds


# ---- open sessions, and tenants

# Columns of a session row, after the token counters of its namespace.
SESSION_ID, ATTACHED, OPENED_MS, REGIONS, REGION_BYTES, LANE, TENANT = range(NUM_COUNTERS, NUM_COUNTERS + 7)
NUM_COLUMNS = NUM_COUNTERS + 7
# Column of a tenant row, after its token counters.
IN_USE = NUM_COUNTERS
# Names are UTF-8, have at most 64 characters, and are padded with zeros.
NAME_BYTES = 256
OTHER_TENANTS = "other"


class SessionTable:
    """Shared arrays of sessions and tenants.

    sessions int64[max_sessions, columns], with SESSION_ID 0 in free rows; session_names uint8[max_sessions, 256].
    Tenants get rows in the order of their first session. After `max_tenants` of them, all others share the last row.
    tenant_names uint8[max_tenants + 1, 256]; tenants int64[max_tenants + 1, 4]: the tokens of their closed sessions,
    and whether the row is in use. sessions_version int64[1] is odd while tokens move from a session to its tenant.
    """

    def __init__(self, max_sessions: int, max_tenants: int, zeros: Zeros) -> None:
        """`zeros` allocates the arrays. They may have the rows of an earlier process, see `recover`."""
        self._rows: npt.NDArray[np.int64] = zeros("sessions", (max_sessions, NUM_COLUMNS), np.int64)
        self._names: npt.NDArray[np.uint8] = zeros("session_names", (max_sessions, NAME_BYTES), np.uint8)
        self._tenant_names: npt.NDArray[np.uint8] = zeros("tenant_names", (max_tenants + 1, NAME_BYTES), np.uint8)
        self._tenants: npt.NDArray[np.int64] = zeros("tenants", (max_tenants + 1, NUM_COUNTERS + 1), np.int64)
        self._version: npt.NDArray[np.int64] = zeros("sessions_version", (1,), np.int64)
        self._free = list(range(max_sessions - 1, -1, -1))
        self._numbers: dict[str, int] = {}
        self._max_tenants = max_tenants

    def open(self, session_id: int, name: str, tenant: str, opened_ms: int) -> SessionRow:
        number = self._free.pop()
        row = self._rows[number]
        _put_name(self._names[number], name)
        row[:] = 0
        row[OPENED_MS], row[TENANT] = opened_ms, self._tenant(tenant)
        row[SESSION_ID] = session_id  # set last, because it marks the row as used
        return SessionRow(number, row)

    def recover(self, sessions: Mapping[int, tuple[int, str, str]]) -> dict[int, SessionRow]:
        """Resume the sessions of an earlier process: (session id, name, tenant) by row number. The earlier process did
        not end all others that have rows; they end now. Returns the rows of the sessions, which keep their tokens."""
        self._version[0] += self._version[0] & 1
        used = np.flatnonzero(self._tenants[: self._max_tenants, IN_USE]).tolist()
        self._numbers = {get_name(self._tenant_names[number]): number for number in used}
        for number in set(np.flatnonzero(self._rows[:, SESSION_ID]).tolist()).difference(sessions):
            self._end(self._rows[number])
        for number, (session_id, name, tenant) in sessions.items():
            row = self._rows[number]
            _put_name(self._names[number], name)
            row[[ATTACHED, REGIONS, REGION_BYTES, LANE]] = 0
            row[TENANT] = self._tenant(tenant)
            row[SESSION_ID] = session_id
        self._free = [number for number in reversed(range(len(self._rows))) if number not in sessions]
        return {number: SessionRow(number, self._rows[number]) for number in sessions}

    def close(self, row: SessionRow) -> None:
        columns = self._rows[row.number]
        row.leave()
        self._end(columns)
        self._free.append(row.number)

    def _end(self, columns: npt.NDArray[np.int64]) -> None:
        """Move the tokens of a session to its tenant, and clear the session's row."""
        self._version[0] += 1
        self._tenants[columns[TENANT], :NUM_COUNTERS] += columns[:NUM_COUNTERS]
        columns[:] = 0
        self._version[0] += 1

    def _tenant(self, name: str) -> int:
        number = self._numbers.get(name, len(self._numbers))
        if number == self._max_tenants or name == OTHER_TENANTS:
            number, name = self._max_tenants, OTHER_TENANTS
        else:
            self._numbers[name] = number
        _put_name(self._tenant_names[number], name)
        self._tenants[number, IN_USE] = 1
        return number


class SessionRow:
    """The row of one session. `counters` are the counters of its namespace; other columns are set when they change."""

    def __init__(self, number: int, columns: npt.NDArray[np.int64]) -> None:
        self.number = number
        # Updating an element of a memoryview takes a quarter of NumPy's time.
        self._columns: Any = columns.data
        self.counters: Any = self._columns[:NUM_COUNTERS]

    def set(self, column: int, value: int) -> None:
        self._columns[column] = value

    def leave(self) -> None:
        """Detach from the row, which another session may reuse. Later changes have no effect on the shared row."""
        self._columns = [0] * NUM_COLUMNS


def _put_name(place: npt.NDArray[np.uint8], name: str) -> None:
    place[:] = np.frombuffer(name.encode().ljust(NAME_BYTES, b"\0"), np.uint8)


def get_name(place: npt.NDArray[np.uint8]) -> str:
    """Return a name from `SessionTable`. During a concurrent change, bytes that cannot be decoded are replaced."""
    return place.tobytes().rstrip(b"\0").decode(errors="replace")


# ---- gauges and counters of the daemon. They and the tables below are written when the observer asks for them


@dataclass(slots=True)
class ServerStats:
    """Figures of the daemon beside those of the block manager: gauges, followed by counters since the start. Fields
    `..._s` are in seconds."""

    sessions: float = 0
    regions: float = 0
    region_bytes: float = 0
    lanes: float = 0
    event_streams: float = 0
    calls_in_flight: float = 0
    draining: float = 0
    open_unix_connections: float = 0
    open_tcp_connections: float = 0

    swap_out_busy_s: float = 0
    swap_in_busy_s: float = 0
    out_of_blocks: float = 0
    sessions_opened: float = 0
    sessions_closed: float = 0
    sessions_lost: float = 0
    stored_events: float = 0
    removed_events: float = 0
    cleared_events: float = 0
    lane_calls: float = 0
    lane_errors: float = 0
    lane_busy_s: float = 0
    tcp_connections: float = 0
    tls_handshakes: float = 0
    missing_tokens: float = 0
    malformed_tokens: float = 0
    unknown_tokens: float = 0
    foreign_sessions: float = 0
    integrity_checks: float = 0
    integrity_failures: float = 0
    closed_over_limit: float = 0
    closed_without_call: float = 0
    closed_for_bytes: float = 0


class DaemonStatsTable:
    """Shared arrays: block_stats int64 and server_stats float64, in the order of the fields of `BlocksStats` and of
    `ServerStats`, and lane_counts int64[buckets + 1], the latency histogram of lanes."""

    def __init__(self, num_lane_buckets: int, zeros: Zeros) -> None:
        self._blocks: npt.NDArray[np.int64] = zeros("block_stats", (len(fields(BlocksStats)),), np.int64)
        self._server: npt.NDArray[np.float64] = zeros("server_stats", (len(fields(ServerStats)),), np.float64)
        self._lane_counts: npt.NDArray[np.int64] = zeros("lane_counts", (num_lane_buckets,), np.int64)

    def write(self, blocks: BlocksStats, server: ServerStats, lane_counts: list[int]) -> None:
        self._blocks[:] = values_of(blocks)
        self._server[:] = values_of(server)
        self._lane_counts[:] = lane_counts


# ---- figures of a part that a daemon may lack


@dataclass(slots=True)
class SavedStats:
    """Sessions on the disk: how many there are, their bytes and the room for them; counters since the start of sessions
    that were saved and restored, of files whose time was over, of damaged ones, and of failures of the disk."""

    num_sessions: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    saved: int = 0
    restored: int = 0
    expired: int = 0
    damaged: int = 0
    errors: int = 0


class FiguresTable:
    """A shared array float64[1 + numbers]: 1 if the daemon has the part, then the numbers in the order of the fields.
    Integers are exact up to 2**53."""

    def __init__(self, name: str, kind: type[DataclassInstance], zeros: Zeros) -> None:
        self._figures: npt.NDArray[np.float64] = zeros(name, (1 + len(fields(kind)),), np.float64)

    def write(self, figures: DataclassInstance) -> None:
        self._figures[:] = 1, *values_of(figures)


def read_figures(arrays: Mapping[str, npt.NDArray[Any]], name: str, kind: type[T]) -> T | None:
    """Return the figures, or None if the daemon does not have the part."""
    has_part, *numbers = arrays[name].tolist()
    if not has_part:
        return None
    values = (type(default)(number) for default, number in zip(values_of(kind()), numbers, strict=True))
    return kind(*values)


# ---- schedulers


_NUM_FIGURES = len(fields(SchedulerFigures))
# Rows of the histograms.
FIRST_TOKEN, BETWEEN_TOKENS = range(2)


class SchedulerTable:
    """Writes shared arrays in the order of the fields of `SchedulerFigures`.

    schedulers int64[max_sessions, 1 + figures] are in the rows of their sessions, with 0 in the first column if the
    session has none. scheduler_totals int64[figures] are over open and closed schedulers. token_counts
    int64[2, buckets + 1] and token_seconds float64[2] are the histograms of `Latencies`.
    """

    def __init__(self, max_sessions: int, zeros: Zeros) -> None:
        self._rows: npt.NDArray[np.int64] = zeros("schedulers", (max_sessions, 1 + _NUM_FIGURES), np.int64)
        self._totals: npt.NDArray[np.int64] = zeros("scheduler_totals", (_NUM_FIGURES,), np.int64)
        self._counts: npt.NDArray[np.int64] = zeros("token_counts", (2, TOKEN_WIDTH), np.int64)
        self._seconds: npt.NDArray[np.float64] = zeros("token_seconds", (2,), np.float64)
        self._written: set[int] = set()

    def write(self, figures: Mapping[int, SchedulerFigures], totals: SchedulerFigures, latencies: Latencies) -> None:
        """Write the figures of the schedulers by the rows of their sessions."""
        for row in self._written - figures.keys():
            self._rows[row, 0] = 0
        for row, values in figures.items():
            self._rows[row] = 1, *values_of(values)
        self._written = set(figures)
        self._totals[:] = values_of(totals)
        for row, histogram in ((FIRST_TOKEN, latencies.first_token), (BETWEEN_TOKENS, latencies.between_tokens)):
            self._counts[row] = histogram.counts
            self._seconds[row] = histogram.seconds


class SchedulerReading(NamedTuple):
    """A reading of the shared arrays: `totals` over open and closed schedulers, and the number of open ones.
    `token_counts` int64[2, buckets + 1] and `token_seconds` float64[2] are as in `SchedulerTable`."""

    num_open: int
    totals: SchedulerFigures
    token_counts: npt.NDArray[np.int64]
    token_seconds: npt.NDArray[np.float64]


def read_schedulers(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[dict[int, SchedulerFigures], SchedulerReading]:
    """Return the figures by the rows of the sessions, and the figures of all schedulers together."""
    table = arrays["schedulers"]
    rows = np.flatnonzero(table[:, 0]).tolist()
    figures = {row: SchedulerFigures(*values[1:]) for row, values in zip(rows, table[rows].tolist(), strict=True)}
    totals = SchedulerFigures(*arrays["scheduler_totals"].tolist())
    counts, seconds = arrays["token_counts"].copy(), arrays["token_seconds"].copy()
    return figures, SchedulerReading(len(figures), totals, counts, seconds)


# ---- engines with K/V in the block store


class EngineTable:
    """A shared array: engines int64[max_sessions, 1 + figures] are in the rows of their sessions, in the order of the
    fields of `EngineFigures`, with 0 in the first column if the session has reported none."""

    def __init__(self, max_sessions: int, zeros: Zeros) -> None:
        self._rows: npt.NDArray[np.int64] = zeros("engines", (max_sessions, 1 + len(EngineFigures._fields)), np.int64)
        self._written: set[int] = set()

    def write(self, figures: Mapping[int, EngineFigures]) -> None:
        """Write the figures of the engines by the rows of their sessions."""
        for row in self._written - figures.keys():
            self._rows[row, 0] = 0
        for row, values in figures.items():
            self._rows[row] = 1, *values
        self._written = set(figures)


def read_engines(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[int, EngineFigures]:
    """Return the figures by the rows of the sessions."""
    table = arrays["engines"]
    rows = np.flatnonzero(table[:, 0]).tolist()
    return {row: EngineFigures(*values[1:]) for row, values in zip(rows, table[rows].tolist(), strict=True)}


# ---- the block store by model


# Names are UTF-8, have at most 256 characters, and are padded with zeros.
_MODEL_BYTES = 1024


class StoreTable:
    """Shared arrays: store_bytes int64[2], the size of the store, 0 if there is none, and how much of it is there;
    store_models uint8[max_models, 1024] and store_figures int64[max_models, columns], in the order of the fields of
    `ModelFigures`; store_count int64[1], the number of rows in use."""

    def __init__(self, num_bytes: int, max_models: int, zeros: Zeros) -> None:
        self._bytes: npt.NDArray[np.int64] = zeros("store_bytes", (2,), np.int64)
        self._bytes[:] = num_bytes
        self._count: npt.NDArray[np.int64] = zeros("store_count", (1,), np.int64)
        self._names: npt.NDArray[np.uint8] = zeros("store_models", (max_models, _MODEL_BYTES), np.uint8)
        self._figures: npt.NDArray[np.int64] = zeros("store_figures", (max_models, len(fields(ModelFigures))), np.int64)

    def write(self, figures: Mapping[str, ModelFigures], ready_bytes: int | None = None) -> None:
        """`ready_bytes` are there, without it all."""
        self._bytes[1] = self._bytes[0] if ready_bytes is None else ready_bytes
        for row, (model, values) in enumerate(figures.items()):
            self._names[row] = np.frombuffer(model.encode().ljust(_MODEL_BYTES, b"\0"), np.uint8)
            self._figures[row] = values_of(values)
        self._count[0] = len(figures)


def read_store(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, int, dict[str, ModelFigures]]:
    """Return the size of the store in bytes, how much of it is there, and the figures by model."""
    count = int(arrays["store_count"][0])
    names, figures = arrays["store_models"][:count], arrays["store_figures"][:count].tolist()
    models = (name.tobytes().rstrip(b"\0").decode(errors="replace") for name in names)
    by_model = {model: ModelFigures(*values) for model, values in zip(models, figures, strict=True)}
    num_bytes, ready_bytes = arrays["store_bytes"].tolist()
    return num_bytes, ready_bytes, by_model


# ---- the tiers below the block store


MAX_TIERS = 4
_TIER_BYTES = 64
_NUMBERS = names_of(TierStats)[2:]  # the fields after the name and the state
_KINDS = tuple(map(type, values_of(TierStats(""))[2:]))


class TierTable:
    """Shared arrays with a row for each tier, fastest first: tier_names uint8[MAX_TIERS, 64], in UTF-8 and padded with
    zeros; tier_figures float64[MAX_TIERS, 1 + numbers], with the index of the state in `STATES`, then the numbers in
    the order of the fields of `TierStats`; tier_count int64[1], the number of rows in use. Integers are exact up to
    2**53."""

    def __init__(self, zeros: Zeros) -> None:
        self._count: npt.NDArray[np.int64] = zeros("tier_count", (1,), np.int64)
        self._names: npt.NDArray[np.uint8] = zeros("tier_names", (MAX_TIERS, _TIER_BYTES), np.uint8)
        self._figures: npt.NDArray[np.float64] = zeros("tier_figures", (MAX_TIERS, 1 + len(_NUMBERS)), np.float64)

    def write(self, tiers: Sequence[TierStats]) -> None:
        assert len(tiers) <= MAX_TIERS, "a daemon has one tier of each kind"
        for row, (name, state, *numbers) in enumerate(map(values_of, tiers)):
            self._names[row] = np.frombuffer(name.encode().ljust(_TIER_BYTES, b"\0"), np.uint8)
            self._figures[row] = STATES.index(state), *numbers
        self._count[0] = len(tiers)


def read_tiers(arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[TierStats, ...]:
    count = int(arrays["tier_count"][0])
    return tuple(map(_read_tier, arrays["tier_names"][:count], arrays["tier_figures"][:count].tolist()))


def _read_tier(name: npt.NDArray[np.uint8], figures: Sequence[float]) -> TierStats:
    state, *numbers = figures
    values: list[Any] = [kind(number) for kind, number in zip(_KINDS, numbers, strict=True)]
    return TierStats(name.tobytes().rstrip(b"\0").decode(errors="replace"), STATES[int(state)], *values)


# ---- tenants and their quotas


# What a tenant has a quota of, in the order of the columns.
TENANT_LIMITS: Final = (
    "sessions", "detached_sessions", "streams", "sequences", "blocks", "guaranteed_blocks", "pins", "regions",
    "store_bytes", "store_namespaces", "disk_bytes", "calls_per_s",
)  # fmt: skip
NO_LIMIT: Final = -1.0
_TENANT_BYTES = 64


class QuotaUse(NamedTuple):
    """What a tenant uses of one quota, the quota or NO_LIMIT, and how many calls were refused because of it."""

    used: float = 0
    limit: float = NO_LIMIT
    refused: float = 0


class TenantTable:
    """Shared arrays with a row for each tenant: tenant_quota_names uint8[max_tenants, 64], in UTF-8 and padded with
    zeros; tenant_quotas float64[max_tenants, limits, 3], the fields of `QuotaUse` of each of TENANT_LIMITS;
    tenant_quota_count int64[1], the number of rows in use."""

    def __init__(self, max_tenants: int, zeros: Zeros) -> None:
        self._count: npt.NDArray[np.int64] = zeros("tenant_quota_count", (1,), np.int64)
        self._names: npt.NDArray[np.uint8] = zeros("tenant_quota_names", (max_tenants, _TENANT_BYTES), np.uint8)
        shape = (max_tenants, len(TENANT_LIMITS), len(QuotaUse._fields))
        self._uses: npt.NDArray[np.float64] = zeros("tenant_quotas", shape, np.float64)

    def write(self, uses: Mapping[str, Sequence[QuotaUse]]) -> None:
        for row, (name, values) in enumerate(uses.items()):
            self._names[row] = np.frombuffer(name.encode().ljust(_TENANT_BYTES, b"\0"), np.uint8)
            self._uses[row] = values
        self._count[0] = len(uses)


def read_tenant_quotas(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, dict[str, QuotaUse]]:
    """Return the quotas by tenant and by limit. Empty if the daemon has one tenant, and no such arrays."""
    if "tenant_quotas" not in arrays:
        return {}
    count = int(arrays["tenant_quota_count"][0])
    names, rows = arrays["tenant_quota_names"][:count], arrays["tenant_quotas"][:count].tolist()
    return {
        name.tobytes().rstrip(b"\0").decode(errors="replace"): {
            limit: QuotaUse(*use) for limit, use in zip(TENANT_LIMITS, row, strict=True)
        }
        for name, row in zip(names, rows, strict=True)
    }


# ---- transfers between hosts


# Rows of the histogram: from clients to the daemon, and from the daemon to clients.
DIRECTIONS: Final = ("in", "out")


@dataclass(slots=True)
class TransferStats:
    """Engines that run, remote regions and the daemon's memory for them, transfers in progress; counters since the
    start of transfers that ended well and that failed, of their bytes, of engines that did not start, of blocks that
    arrived damaged, and of calls whose blocks came in messages instead, with their bytes."""

    engines: int = 0
    regions: int = 0
    region_bytes: int = 0
    running_in: int = 0
    running_out: int = 0
    done_in: int = 0
    done_out: int = 0
    failed_in: int = 0
    failed_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    engine_failures: int = 0
    damaged_blocks: int = 0
    fallbacks: int = 0
    fallback_bytes: int = 0


class TransferTable:
    """Shared arrays: the figures, as in `FiguresTable`; transfer_counts int64[2, buckets + 1] and transfer_seconds
    float64[2], the histograms of the durations in the order of `DIRECTIONS`, with the buckets of calls."""

    def __init__(self, zeros: Zeros) -> None:
        self._figures = FiguresTable("transfers", TransferStats, zeros)
        shape = (len(DIRECTIONS), WIDTH)
        self._counts: npt.NDArray[np.int64] = zeros("transfer_counts", shape, np.int64)
        self._seconds: npt.NDArray[np.float64] = zeros("transfer_seconds", shape[:1], np.float64)

    def write(self, stats: TransferStats, counts: npt.NDArray[np.int64], seconds: npt.NDArray[np.float64]) -> None:
        self._figures.write(stats)
        self._counts[:] = counts
        self._seconds[:] = seconds


class TransferReading(NamedTuple):
    """A reading of the shared arrays, which are as in `TransferTable`."""

    stats: TransferStats
    counts: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]


def read_transfers(arrays: Mapping[str, npt.NDArray[Any]]) -> TransferReading | None:
    """Return the figures, or None if the daemon has no transfers."""
    stats = read_figures(arrays, "transfers", TransferStats)
    if stats is None:
        return None
    return TransferReading(stats, arrays["transfer_counts"].copy(), arrays["transfer_seconds"].copy())
