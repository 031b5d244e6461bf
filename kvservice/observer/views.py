"""Data of the page: snapshots, the map, blocks, sequences. All of it is read from the daemon's shared memory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvservice.errors import InvalidArgumentError, UnknownSequenceError
from kvservice.kept.report import RestartReport
from kvservice.observer.history import History
from kvservice.store.namespaces import ModelFigures
from kvservice.telemetry.arrays import Arrays
from kvservice.telemetry.link import ShownPart
from kvservice.telemetry.reading import IntArray, Reader, Reading, SequenceRows, SessionReading
from kvservice.telemetry.tables import NO_LIMIT, names_of
from kvservice.tiers.protocol import SpillStats
from kvservice.v1 import inspect_pb2

# ---- states of blocks, and the pool map


MAX_CELLS = 4096
DEVICE, SWAP = "device", "swap"
STATES = ("free", "active", "shared", "cached", "pinned")
FREE, ACTIVE, SHARED, CACHED, PINNED = range(5)

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PoolMap:
    """Map of both tiers, in cells of `group` and `group_swap` blocks. The last cell of a tier may have fewer blocks.

    `device` has five bytes per cell: the share of its blocks in each of STATES, as a fraction of 255. `swap` has two
    bytes per cell: free and held.
    """

    group: int
    group_swap: int
    device: bytes
    swap: bytes


class Blocks:
    """Reference counts and states of the blocks of both tiers."""

    def __init__(self, arrays: Arrays) -> None:
        self._ref_counts = {DEVICE: arrays["device_ref_count"], SWAP: arrays["swap_ref_count"]}
        self._indexed, self._pinned = arrays["indexed"], arrays["pinned"]

    def num_blocks(self, tier: str) -> int:
        return len(self._ref_counts[tier])

    def check_tier(self, tier: str) -> None:
        if tier not in self._ref_counts:
            raise InvalidArgumentError(f"{tier!r} is neither {DEVICE} nor {SWAP}", field="tier")

    def ref_counts(self, tier: str, blocks: Any) -> Any:
        """Return the reference counts of blocks, given as a slice, an array or a number."""
        return self._ref_counts[tier][blocks]

    def states(self, tier: str, blocks: Any = slice(None)) -> Bytes:
        """Return uint8[n], indices into STATES. A block of the swap tier is free, active or shared."""
        states: Bytes = np.minimum(self._ref_counts[tier][blocks], SHARED).astype(np.uint8)
        if tier == DEVICE:
            cached = (states == FREE) & self._indexed[blocks]
            states[cached] = CACHED
            states[cached & self._pinned[blocks]] = PINNED
        return states

    def map(self) -> PoolMap:
        group, device = self._cells(DEVICE, len(STATES))
        group_swap, swap = self._cells(SWAP, 2)
        return PoolMap(group, group_swap, device, swap)

    def _cells(self, tier: str, num_states: int) -> tuple[int, bytes]:
        states = np.minimum(self.states(tier), num_states - 1)
        group = max(1, -(-len(states) // MAX_CELLS))
        starts = np.arange(0, len(states), group)
        if not len(starts):
            return group, b""
        sizes = np.minimum(group, len(states) - starts)
        shares = np.empty((len(starts), num_states), np.uint8)
        for state in range(num_states):
            counts = np.add.reduceat(states == state, starts, dtype=np.int64)
            shares[:, state] = counts * 255 // sizes
        return group, shares.tobytes()


# ---- all views


# Limits on the reported holders of a block and blocks of a sequence.
MAX_HOLDERS = 100
MAX_TABLE = 16384


class Views:
    """Data of the page, as dicts for JSON. `info` never changes; see `configuration` of
    kvservice.server.watching.observing.

    Methods raise InvalidArgumentError for invalid arguments and UnknownSequenceError for unknown sequences.
    """

    def __init__(
        self,
        arrays: Arrays,
        reader: Reader,
        history: History,
        info: dict[str, Any],
        read: Callable[[], Awaitable[Reading]],
        block_hash: Callable[[int], Awaitable[bytes]],
    ) -> None:
        self.info = info
        self._arrays = arrays
        self._reader = reader
        self._history = history
        self._read = read
        self._blocks = Blocks(arrays)
        self._block_hash = block_hash

    async def snapshot(
        self,
        max_sessions: int = 100,
        max_sequences: int = 100,
        search: str = "",
        part: ShownPart | None = None,
    ) -> dict[str, Any]:
        """Return a current snapshot, of a part or of everything. It is consistent with the other data read
        at the same moment."""
        latest = await self._read()
        return take_snapshot(self._reader, self._history, latest, max_sessions, max_sequences, search, part)

    def history(self) -> dict[str, Any]:
        """Return the samples as columns."""
        return self._history.samples()

    def sample(self) -> dict[str, Any] | None:
        """Return the latest sample, or None before the first."""
        return self._history.sample()

    def map(self) -> PoolMap:
        return self._blocks.map()

    def blocks(self, tier: str, start: int, count: int) -> dict[str, Any]:
        """Return states and reference counts of `count` blocks from `start` on."""
        self._blocks.check_tier(tier)
        if not 0 <= start < self._blocks.num_blocks(tier):
            raise InvalidArgumentError("is not a block of the tier", field="start")
        if not 0 < count <= MAX_CELLS:
            raise InvalidArgumentError(f"is not from 1 to {MAX_CELLS}", field="count")
        chosen = slice(start, start + count)
        return {"start": start, **self._describe(tier, chosen)}

    def _describe(self, tier: str, blocks: Any) -> dict[str, Any]:
        states = self._blocks.states(tier, blocks).tolist()
        return {
            "states": [STATES[state] for state in states],
            "ref_counts": self._blocks.ref_counts(tier, blocks).tolist(),
        }

    async def block(self, tier: str, block_id: int) -> dict[str, Any]:
        """Describe a block and the sequences that hold it. Only device blocks in use have ages."""
        self._blocks.check_tier(tier)
        if not 0 <= block_id < self._blocks.num_blocks(tier):
            raise InvalidArgumentError("is not a block of the tier", field="id")
        state = int(self._blocks.states(tier, slice(block_id, block_id + 1))[0])
        holders = self._holders(tier, block_id)
        chain_hash = await self._block_hash(block_id) if tier == DEVICE else b""
        return {
            "tier": tier,
            "block_id": block_id,
            "state": STATES[state],
            "ref_count": int(self._blocks.ref_counts(tier, block_id)),
            "hash": chain_hash.hex() or None,
            **self._ages(tier, block_id, state),
            "sequences": holders[:MAX_HOLDERS],
            "sequences_left_out": max(0, len(holders) - MAX_HOLDERS),
        }

    def _ages(self, tier: str, block_id: int, state: int) -> dict[str, float | None]:
        if tier == SWAP or STATES[state] == "free":
            return {"age_s": None, "idle_s": None}
        now = time.monotonic()
        idle_s = now - float(self._arrays["released_at"][block_id]) if state in (CACHED, PINNED) else None
        return {"age_s": now - float(self._arrays["allocated_at"][block_id]), "idle_s": idle_s}

    def _holders(self, tier: str, block_id: int) -> list[dict[str, Any]]:
        rows, tables = self._reader.sequences(), self._arrays["block_tables"]
        holders = []
        for i in np.flatnonzero((rows.swapped != 0) == (tier == SWAP)).tolist():
            entries = np.flatnonzero(tables[rows.numbers[i], : rows.blocks[i]] == block_id)
            if len(entries):
                session_id, name = self._reader.session(int(rows.sessions[i]))
                holders.append(
                    {
                        "session_id": session_id,
                        "session_name": name,
                        "sequence_id": int(rows.ids[i]),
                        "position": int(entries[0]),
                    }
                )
        return holders

    def sequence(self, session_id: int, sequence_id: int) -> dict[str, Any]:
        """Describe a sequence and its block table."""
        rows = self._reader.sequences()
        for i in np.flatnonzero(rows.ids == sequence_id).tolist():
            owner, name = self._reader.session(int(rows.sessions[i]))
            if owner == session_id:
                break
        else:
            raise UnknownSequenceError(f"session {session_id} has no sequence {sequence_id}", field="sequence_id")
        tier = SWAP if rows.swapped[i] else DEVICE
        table = self._table(tier, int(rows.numbers[i]), int(rows.blocks[i]))
        return {
            "session_id": session_id,
            "session_name": name,
            "sequence_id": sequence_id,
            "length": int(rows.lengths[i]),
            "computed": int(rows.computed[i]),
            "swapped": bool(rows.swapped[i]),
            "tier": tier,
            "block_ids": table.tolist(),
            "blocks_left_out": int(rows.blocks[i]) - len(table),
            **self._describe(tier, table),
        }

    def _table(self, tier: str, row: int, num_blocks: int) -> IntArray:
        """Return a copy of a block table. If the sequence is swapped at this moment, entries outside the tier are
        dropped."""
        table = self._arrays["block_tables"][row, : min(num_blocks, MAX_TABLE)].astype(np.int64)
        return table[table < self._blocks.num_blocks(tier)]


# ---- snapshots for `kvservice top` and the page: the state as rows and rates. Rows are dicts with the fields of the
# contract


# The fields of `PoolSnapshot` have the names of `BlocksStats` and `ServerStats`.
_POOL = tuple(inspect_pb2.PoolSnapshot.DESCRIPTOR.fields_by_name)
# These fields of `SpillSnapshot` have the names of `SpillStats`.
_SPILL = tuple(name for name in inspect_pb2.SpillSnapshot.DESCRIPTOR.fields_by_name if name in names_of(SpillStats))
# These fields of `StoreSnapshot` have the names of `ModelFigures`.
_STORE = tuple(name for name in inspect_pb2.StoreSnapshot.DESCRIPTOR.fields_by_name if name in names_of(ModelFigures))


def take_snapshot(
    reader: Reader,
    history: History,
    latest: Reading,
    max_sessions: int,
    max_sequences: int,
    search: str,
    part: ShownPart | None = None,
) -> dict[str, Any]:
    """Return the fields of `Snapshot` for the latest reading, with rates from the history. GetSnapshotRequest describes
    `search`. With `part`, the rows are those of its tenant alone."""
    search = search.lower()
    shown = [one for one in latest.sessions if part is None or one.session_id in part.session_ids]
    sessions = [session for session in shown if _fits(session, search)]
    sessions.sort(key=lambda session: (-session.blocks, session.session_id))
    found = {session.session_id for session in sessions}
    sequences, num_sequences = _sequences(reader, found, max_sequences, search, part)
    return (
        {
            "time_s": time.time(),
            "uptime_s": latest.time_s - reader.started_s,
            "pool": _pool(latest),
            "rates": history.rates(),
            "calls": history.calls(),
            "sessions": [_session(session, latest.time_s) for session in sessions[:max_sessions]],
            "sequences": sequences,
            "num_sessions": len(sessions),
            "num_sequences": num_sequences,
            "restart": _restart(reader.restart),
            "tiers": _tiers(latest, history),
        }
        | _store(latest, history)
        | _spill(latest, history)
        | _transfers(latest, history)
        | _scheduling(latest, history)
        | {"tenants": _tenants(latest, part)}
    )


def _fits(session: SessionReading, search: str) -> bool:
    return search in session.name.lower() or search in session.tenant.lower() or search == str(session.session_id)


def _pool(latest: Reading) -> dict[str, Any]:
    figures = asdict(latest.blocks) | asdict(latest.server)
    return {name: int(figures[name]) for name in _POOL} | {"draining": bool(latest.server.draining)}


def _restart(report: RestartReport) -> dict[str, Any]:
    shown = {name: value for name, value in report.to_json().items() if name not in ("totals", "missing")}
    return shown | {"summary": report.summary}


def _store(latest: Reading, history: History) -> dict[str, Any]:
    """Return the sums over all models, or nothing if the daemon has no store."""
    if not latest.store_bytes:
        return {}
    models = latest.store_models.values()
    sums = {name: sum(getattr(model, name) for model in models) for name in _STORE}
    sizes = {"num_bytes": latest.store_bytes, "ready_bytes": latest.store_ready_bytes}
    return {"store": sizes | sums | history.store()}


def _tiers(latest: Reading, history: History) -> list[dict[str, Any]]:
    rates = history.tiers()
    return [asdict(tier) | rates.get(tier.name, {}) for tier in latest.tiers]


def _spill(latest: Reading, history: History) -> dict[str, Any]:
    """Return the figures of spilled blocks and of saved sessions, if the daemon has them."""
    found: dict[str, Any] = {}
    if latest.spill is not None:
        figures = asdict(latest.spill)
        found["spill"] = {name: figures[name] for name in _SPILL} | history.spill()
    if latest.saved is not None:
        found["saved"] = asdict(latest.saved)
    return found


def _transfers(latest: Reading, history: History) -> dict[str, Any]:
    """Return the figures of transfers between hosts, or nothing if the daemon has no transfer engines."""
    if latest.transfers is None:
        return {}
    return {"transfers": asdict(latest.transfers.stats) | history.transfers()}


def _scheduling(latest: Reading, history: History) -> dict[str, Any]:
    """Return the figures of all schedulers, or nothing before the first request."""
    totals = latest.schedulers.totals
    if not totals.added + totals.refused:
        return {}
    return {"scheduling": {"totals": asdict(totals)} | history.scheduling()}


def _tenants(latest: Reading, part: ShownPart | None) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "quotas": [
                {"limit": limit, "used": use.used, "refused": int(use.refused)}
                | ({} if use.limit == NO_LIMIT else {"value": use.limit})
                for limit, use in quotas.items()
            ],
        }
        for name, quotas in latest.tenant_quotas.items()
        if part is None or name == part.tenant
    ]


def _session(session: SessionReading, now_s: float) -> dict[str, Any]:
    scheduler = {} if session.scheduler is None else {"scheduler": asdict(session.scheduler)}
    engine = {} if session.engine is None else {"engine": session.engine._asdict()}
    return (
        scheduler
        | engine
        | {
            "session_id": session.session_id,
            "name": session.name,
            "tenant": session.tenant,
            "attached": session.attached,
            "age_s": now_s - session.opened_s,
            "sequences": session.sequences,
            "swapped_sequences": session.swapped_sequences,
            "tokens": session.tokens,
            "blocks": session.blocks,
            "regions": session.regions,
            "region_bytes": session.region_bytes,
            "lane": session.lane,
            "computed_tokens": session.computed_tokens,
            "query_tokens": session.query_tokens,
            "hit_tokens": session.hit_tokens,
        }
    )


def _sequences(
    reader: Reader, found: set[int], max_sequences: int, search: str, part: ShownPart | None
) -> tuple[list[dict[str, Any]], int]:
    """Return the largest sequences that match the search, and the number of matches. A sequence matches if its session
    is one of `found` or if its id contains the search text. With `part`, its session is one of that."""
    rows = reader.sequences()
    owners = {number: reader.session(number) for number in np.unique(rows.sessions).tolist()}
    if search or part is not None:
        chosen = []
        for i, (owner, sequence_id) in enumerate(zip(rows.sessions.tolist(), rows.ids.tolist(), strict=True)):
            session_id = owners[owner][0]
            if session_id in found or (search in str(sequence_id) and (part is None or session_id in part.session_ids)):
                chosen.append(i)
        fitting = np.array(chosen, np.int64)
    else:
        fitting = np.arange(len(rows.ids))
    order = fitting[np.argsort(-rows.blocks[fitting], kind="stable")][:max_sequences]
    return [_sequence(rows, i, *owners[int(rows.sessions[i])]) for i in order.tolist()], len(fitting)


def _sequence(rows: SequenceRows, i: int, session_id: int, session_name: str) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "session_name": session_name,
        "sequence_id": int(rows.ids[i]),
        "length": int(rows.lengths[i]),
        "computed": int(rows.computed[i]),
        "blocks": int(rows.blocks[i]),
        "swapped": bool(rows.swapped[i]),
    }
