"""Data of the page: snapshots, the map, blocks, sequences. All of it is read from the daemon's shared memory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from kvservice.errors import InvalidArgumentError, UnknownSequenceError
from kvservice.observer.blocks import CACHED, DEVICE, MAX_CELLS, PINNED, STATES, SWAP, Blocks, PoolMap
from kvservice.observer.history import History
from kvservice.observer.snapshot import take_snapshot
from kvservice.telemetry.arrays import Arrays
from kvservice.telemetry.link import ShownPart
from kvservice.telemetry.reading import IntArray, Reader, Reading

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
