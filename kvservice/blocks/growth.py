"""Growth of a batch before it is written: new blocks at the end of tables, and copies of shared blocks.

Planning counts every block before anything changes; applying a plan cannot fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvservice.blocks.arguments import whole_number
from kvservice.blocks.block_pool import ONE
from kvservice.blocks.intents import DROP, RESTORE
from kvservice.blocks.limits import check_request_blocks, check_sequence_lengths
from kvservice.blocks.plans import BlockCopies, BoolArray, Int64Array
from kvservice.blocks.ranges import ragged
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED
from kvservice.blocks.state import BlockState

_NO_BLOCKS = np.zeros(0, np.int64)
NO_COPIES = BlockCopies(np.zeros(0, np.int32), np.zeros(0, np.int32))


class WriteBatch(NamedTuple):
    """Sequences that will be written: ids int64[n], rows int64[n], a copy of their states int64[n, 8], and their new
    lengths int64[n]."""

    ids: Int64Array
    rows: Int64Array
    states: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, slots=True)
class _CopyOnWrite:
    """Blocks to copy: row, table entry and block id, int64[c] each. `computed` bool[c] says which of them hold computed
    tokens of their sequence. `unindexed` int64[u] are blocks that are not copied but leave the prefix index."""

    rows: Int64Array
    entries: Int64Array
    src: Int64Array
    computed: BoolArray
    unindexed: Int64Array


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks that a batch needs: `grown` int64[n] new blocks at the end of each table, and copies of shared blocks."""

    grown: Int64Array
    num_grown: int
    copies: _CopyOnWrite | None

    @property
    def num_new(self) -> int:
        return self.num_grown + self.num_copied

    @property
    def num_copied(self) -> int:
        return len(self.copies.src) if self.copies else 0


class DecodeGrowth(NamedTuple):
    """Plan for a batch where each sequence gets one token, has no other pending tokens, and owns the block to write.

    `positions` int64[n] are the token positions. `cells` int64[n] are indices into the flat block tables, and `blocks`
    int64[n] the block ids there. `fresh` int64[f] are the sequences whose block is still to be allocated.
    """

    positions: Int64Array
    cells: Int64Array
    blocks: Int64Array
    fresh: Int64Array


class GrowthPlanner:
    """Plans the growth of a batch, and applies a plan."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._sequences = state.device, state.sequences
        self._shift, self._mask = state.config.block_shift, state.config.block_mask
        # Zero-dimensional arrays for the hot path; see ONE in block_pool.py.
        self._shift_array, self._mask_array = np.array(self._shift), np.array(self._mask)
        self._max_length_array = np.array(state.config.max_sequence_tokens)
        self._table_width_array = np.array(state.sequences.block_tables.shape[1])

    def plan_decode(self, rows: Int64Array, states: Int64Array) -> DecodeGrowth | None:
        """Return the plan for a decode step, the most frequent case, or None if the batch needs the general plan."""
        positions = states[:, LENGTH]
        if np.count_nonzero(positions != states[:, NUM_COMPUTED]):
            return None
        if np.count_nonzero(positions >= self._max_length_array):
            return None
        entries = positions >> self._shift_array
        cells = rows * self._table_width_array
        cells += entries
        blocks = self._sequences.flat_tables[cells]
        fresh = (entries >= states[:, NUM_BLOCKS]).nonzero()[0]
        if len(fresh):
            blocks[fresh] = 0  # these table entries are not valid yet
        not_exclusive = (self._device.ref_count[blocks] > ONE) | self._device.indexed[blocks]
        if len(fresh):
            not_exclusive[fresh] = False
        return None if np.count_nonzero(not_exclusive) else DecodeGrowth(positions, cells, blocks, fresh)

    def apply_decode(self, rows: Int64Array, plan: DecodeGrowth) -> Int64Array:
        """Apply a plan that is known to fit. Returns the slots int64[n] of the tokens."""
        self._state.intents.begin(RESTORE, rows)
        blocks, fresh = plan.blocks, plan.fresh
        if len(fresh):
            new = self._device.allocate(len(fresh))
            blocks[fresh] = new
            self._sequences.flat_tables[plan.cells[fresh]] = new
            self._sequences.num_blocks[rows[fresh]] += 1
        slots: Int64Array = blocks << self._shift_array
        slots += plan.positions & self._mask_array
        return slots

    def plan(self, batch: WriteBatch, lookahead: Int64Array | int) -> Growth:
        """Count every block that the batch will allocate, before anything changes. `lookahead` is one number, or a
        valid number for each sequence int64[n]."""
        if not isinstance(lookahead, np.ndarray) and lookahead != 0:
            lookahead = whole_number(lookahead, "lookahead", 0, self._config.max_sequence_tokens)
        check_sequence_lengths(self._config, batch.lengths, lookahead)
        held = batch.states[:, NUM_BLOCKS]
        grown = np.maximum(((batch.lengths + (lookahead + self._mask)) >> self._shift) - held, 0)
        first = batch.states[:, NUM_COMPUTED] >> self._shift
        written = (batch.lengths + self._mask) >> self._shift
        pending = np.minimum(written, held) - first
        num_grown = int(np.add.reduce(grown))
        check_request_blocks(self._config, int(np.add.reduce(pending)) + num_grown, "sequence_ids")
        shared = self._sequences.shared_entries(
            batch.rows, first, pending, self._device.ref_count, self._device.indexed
        )
        if not len(shared):
            return Growth(grown, num_grown, None)
        which, entries = (numbers[shared] for numbers in ragged(first, pending))
        blocks = self._sequences.block_tables[batch.rows[which], entries].astype(np.int64)
        copied, unindexed = self._plan_copies(blocks)
        which, entries = which[copied], entries[copied]
        computed = (entries << self._shift) < batch.states[which, NUM_COMPUTED]
        copies = _CopyOnWrite(batch.rows[which], entries, blocks[copied], computed, unindexed)
        return Growth(grown, num_grown, copies)

    def _plan_copies(self, blocks: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Plan copy-on-write for `blocks` int64[n], which are shared or indexed and will be written.

        Returns (bool[n], which of them are copied; int64[m], blocks that leave the prefix index). If all holders of a
        block write to it, the last of them keeps the block, unless the block is pinned.
        """
        distinct, inverse, writers = np.unique(blocks, return_inverse=True, return_counts=True)
        kept = (writers == self._device.ref_count[distinct]) & ~self._device.pinned[distinct]
        last = np.zeros(len(distinct), np.int64)
        last[inverse] = np.arange(len(blocks))
        copied = np.ones(len(blocks), np.bool_)
        copied[last[kept]] = False
        return copied, distinct[kept & self._device.indexed[distinct]]

    def apply(self, batch: WriteBatch, growth: Growth) -> BlockCopies:
        """Apply a growth that is known to fit. Where blocks are replaced with copies, the tables change."""
        self._state.intents.begin(DROP if growth.num_copied else RESTORE, batch.rows)
        new = self._device.allocate(growth.num_new) if growth.num_new else _NO_BLOCKS
        if growth.num_grown:
            self._sequences.append_blocks(
                batch.rows, batch.states[:, NUM_BLOCKS], growth.grown, new[: growth.num_grown]
            )
        return self._copy(growth.copies, new[growth.num_grown :]) if growth.copies else NO_COPIES

    def _copy(self, copies: _CopyOnWrite, dst: Int64Array) -> BlockCopies:
        """Replace the blocks to be copied with the new blocks `dst`."""
        device, src = self._device, copies.src
        device.remove_from_index(copies.unindexed)
        device.token_ids[dst] = device.token_ids[src]
        self._sequences.block_tables[copies.rows, copies.entries] = dst
        distinct, holders = np.unique(src, return_counts=True)
        device.decref(distinct, holders)
        self._state.counters.cow_copies += len(src)
        made = copies.computed
        return BlockCopies(src[made].astype(np.int32), dst[made].astype(np.int32))
