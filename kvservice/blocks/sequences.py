"""Sequence slots: one row of block tables and one row of sequence states per sequence. A fork copies both."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final, cast

import numpy as np

from kvservice._ext import shared_entries, slot_mapping
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.kept import pack_extra_keys, unpack_extra_keys
from kvservice.blocks.namespaces import NO_STEP, SessionNamespace, distinct_steps
from kvservice.blocks.plans import ArrayMemory, BoolArray, Int32Array, Int64Array, item_view
from kvservice.blocks.ranges import ragged
from kvservice.errors import QuotaExceededError, SequenceSwappedError

LENGTH, NUM_COMPUTED, NUM_BLOCKS, STEP, SWAPPED, NAMESPACE, SEQUENCE_ID, FLAGS = range(8)
STATE_COLUMNS = 8
# Bit of FLAGS: a scheduler made the sequence. The other bits number the sequences in the order of their creation.
SCHEDULED: Final = 1
_ORDER_BITS: Final = 1
_LINE_ENTRIES = 16


class SequenceSlots:
    """Block tables int32[max_sequences, >= max_blocks_per_sequence] and sequence states int64[max_sequences, 8].

    The width of a table is an odd number of cache lines, so that one column of many tables does not map to a few sets
    of the CPU caches.
    `lengths`, `num_computed`, `num_blocks` and `steps` are columns of `states`, and `items` is a flat view of it. STEP
    is the newest step of the sequence, in its namespace, or NO_STEP. SWAPPED is 1 while the table names blocks of the
    swap tier. NAMESPACE is the number of the sequence's namespace, or 0 if the row is free or about to be. SEQUENCE_ID
    is its id there. FLAGS says how and when the sequence was created.
    """

    def __init__(self, config: BlocksConfig, memory: ArrayMemory, kept_extra_keys: MutableMapping[int, bytes]) -> None:
        lines = config.max_blocks_per_sequence // _LINE_ENTRIES + 1
        shape = (config.max_sequences, (lines | 1) * _LINE_ENTRIES)
        self.block_tables = cast(Int32Array, memory.kept("block_tables", shape, np.int32))
        if not self.block_tables.flags.c_contiguous:
            raise ValueError("memory gave an array that is not contiguous: a view of it would be a copy")
        self.flat_tables = self.block_tables.reshape(-1)
        self.states = cast(Int64Array, memory.kept("sequence_states", (config.max_sequences, STATE_COLUMNS), np.int64))
        self.items = item_view(self.states)
        self.lengths = self.states[:, LENGTH]
        self.num_computed = self.states[:, NUM_COMPUTED]
        self.num_blocks = self.states[:, NUM_BLOCKS]
        self.steps = self.states[:, STEP]
        self.free_rows = list(range(config.max_sequences - 1, -1, -1))
        # Rows without a sequence id whose blocks are not released yet.
        self.ending: set[int] = set()
        self.extra_keys: dict[int, dict[int, bytes]] = {}
        self._kept_extra_keys = kept_extra_keys
        self._num_created = 0
        self.num_tokens = 0
        self.num_swapped = 0
        self._config = config
        self._shift = config.block_shift

    def require_free_rows(self, count: int, field: str) -> None:
        """Raise QuotaExceededError if there is no room for `count` more sequences."""
        if count > len(self.free_rows):
            raise QuotaExceededError(
                f"there is room for {len(self.free_rows)} more sequences, not {count}",
                field=field, limit="max_sequences", value=self._config.max_sequences,
            )  # fmt: skip

    def resident_states(self, ids: Int64Array, rows: Int64Array, field: str = "sequence_ids") -> Int64Array:
        """Return a copy of the states int64[n, 8] of these rows. Raises SequenceSwappedError."""
        states = self.states.take(rows, axis=0)
        if self.num_swapped:
            swapped = states[:, SWAPPED] != 0
            if np.count_nonzero(swapped):
                i = int(swapped.argmax())
                raise SequenceSwappedError(
                    f"sequence {ids[i]} is swapped out", field=f"{field}[{i}]", sequence_id=int(ids[i])
                )
        return states

    def new_flags(self, flags: int) -> int:
        """Return the FLAGS of the next sequence, with these bits."""
        self._num_created += 1
        return self._num_created << _ORDER_BITS | flags

    def set_extra_keys(self, row: int, by_block: dict[int, bytes]) -> None:
        """Set the extra keys of a row by block number, which other rows may share."""
        self._kept_extra_keys[row] = pack_extra_keys(by_block)
        self.extra_keys[row] = by_block

    def drop_extra_keys(self, rows: list[int]) -> None:
        """Remove the extra keys of rows, of which some may have none."""
        for row in rows:
            if self.extra_keys.pop(row, None) is not None:
                del self._kept_extra_keys[row]

    def recover(self) -> None:
        """Derive the totals, the free rows and the extra keys from valid states, in which free rows are zero."""
        used = self.states[:, NAMESPACE] != 0
        self.free_rows = np.flatnonzero(~used)[::-1].tolist()
        self.num_tokens = int(self.states[used, LENGTH].sum())
        self.num_swapped = int(self.states[used, SWAPPED].sum())
        self._num_created = int(self.states[:, FLAGS].max(initial=0)) >> _ORDER_BITS
        for row in [row for row in self._kept_extra_keys if not used[row]]:
            del self._kept_extra_keys[row]
        self.extra_keys = {row: unpack_extra_keys(data) for row, data in self._kept_extra_keys.items()}

    def end_steps(self, namespace: SessionNamespace, rows: Int64Array) -> None:
        """Make the newest steps of these rows stale."""
        namespace.supersede(distinct_steps(self.steps[rows]))
        self.steps[rows] = NO_STEP

    def table_entries(self, rows: Int64Array, first: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        """Return all table entries of these rows from entry `first` on: (entry number int64[m], block int64[m])."""
        if len(rows) == 1:
            row, begin = int(rows[0]), 0 if first is None else int(first[0])
            end = self.states.item(row, NUM_BLOCKS)
            return np.arange(begin, end), self.block_tables[row, begin:end].astype(np.int64)
        num_blocks = self.num_blocks[rows]
        start = np.zeros(len(rows), np.int64) if first is None else first
        which, entry = ragged(start, num_blocks - start)
        return entry, self.block_tables[rows[which], entry].astype(np.int64)

    def append_blocks(self, rows: Int64Array, num_blocks: Int64Array, grown: Int64Array, blocks: Int64Array) -> None:
        """Append grown[i] of these blocks to the table of each row, which has num_blocks[i] blocks."""
        which, entries = ragged(num_blocks, grown)
        self.block_tables[rows[which], entries] = blocks
        self.num_blocks[rows] += grown

    def slots(self, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
        """Return the slots of the tokens starts[i], ..., starts[i] + counts[i] - 1 of each row: int64[sum(counts)]."""
        slots: Int64Array = slot_mapping(self.block_tables, rows, starts, counts, self._shift)
        return slots

    def shared_entries(
        self, rows: Int64Array, first: Int64Array, counts: Int64Array, ref_count: Int32Array, indexed: BoolArray
    ) -> Int64Array:
        """Return which of the table entries first[i], ..., first[i] + counts[i] - 1 of each row, concatenated, have a
        block that several tables hold or that is in the prefix index."""
        shared: Int64Array = shared_entries(self.block_tables, rows, first, counts, ref_count, indexed)
        return shared
