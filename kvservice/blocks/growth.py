"""Growth of a batch before it is written: new blocks at the end of tables, and copies of shared blocks.

Planning counts every block before anything changes; applying a plan cannot fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvservice.blocks.arguments import whole_number
from kvservice.blocks.core import Core, ragged
from kvservice.blocks.plans import BlockCopies, BoolArray, Int64Array
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED
from kvservice.blocks.tier import ONE

_NO_BLOCKS = np.zeros(0, np.int64)
NO_COPIES = BlockCopies(np.zeros(0, np.int32), np.zeros(0, np.int32))


class Batch(NamedTuple):
    """Sequences that will be written: ids int64[n], rows int64[n], a copy of their states int64[n, 8], and their new
    lengths int64[n]."""

    ids: Int64Array
    rows: Int64Array
    meta: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, slots=True)
class _Copying:
    """Blocks to copy: row, table entry and block id, int64[c] each. `computed` bool[c] says which of them hold computed
    tokens of their sequence. `forgotten` are blocks that are not copied but leave the prefix index."""

    rows: Int64Array
    entries: Int64Array
    src: Int64Array
    computed: BoolArray
    forgotten: Int64Array


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks that a batch needs: `grown` int64[n] new blocks at the end of each table, and copies of shared blocks."""

    grown: Int64Array
    num_grown: int
    copying: _Copying | None

    @property
    def num_new(self) -> int:
        return self.num_grown + (len(self.copying.src) if self.copying else 0)


class OneEach(NamedTuple):
    """Plan for a batch where each sequence gets one token, has no other pending tokens, and owns the block to write.

    `positions` int64[n] are the token positions. `cells` int64[n] are indices into the flat block tables, and `blocks`
    int64[n] the block ids there. `fresh` int64[f] are the sequences whose block is still to be allocated.
    """

    positions: Int64Array
    cells: Int64Array
    blocks: Int64Array
    fresh: Int64Array


class GrowthOps(Core):
    """Planning and application of growth."""

    def _plan_one_each(self, rows: Int64Array, meta: Int64Array) -> OneEach | None:
        """Return the plan for a decode step, the most frequent case, or None if the batch needs the general plan."""
        positions = meta[:, LENGTH]
        if np.count_nonzero(positions != meta[:, NUM_COMPUTED]):
            return None
        if np.count_nonzero(positions >= self._max_length_array):
            return None
        entries = positions >> self._shift_array
        cells = rows * self._table_width_array
        cells += entries
        blocks = self._flat_tables[cells]
        fresh = (entries >= meta[:, NUM_BLOCKS]).nonzero()[0]
        if len(fresh):
            blocks[fresh] = 0  # these table entries are not valid yet
        taken = (self.device.ref_count[blocks] > ONE) | self.device.indexed[blocks]
        if len(fresh):
            taken[fresh] = False
        return None if np.count_nonzero(taken) else OneEach(positions, cells, blocks, fresh)

    def _grow_one_each(self, rows: Int64Array, plan: OneEach) -> Int64Array:
        """Apply a plan that is known to fit. Returns the slots int64[n] of the tokens."""
        blocks, fresh = plan.blocks, plan.fresh
        if len(fresh):
            taken = self.device.take(len(fresh))
            blocks[fresh] = taken
            self._flat_tables[plan.cells[fresh]] = taken
            self.sequences.num_blocks[rows[fresh]] += 1
        slots: Int64Array = blocks << self._shift_array
        slots += plan.positions & self._mask_array
        return slots

    def _plan_growth(self, batch: Batch, lookahead: int) -> Growth:
        """Count every block that the batch will allocate, before anything changes."""
        if lookahead != 0:
            lookahead = whole_number(lookahead, "lookahead", 0, self.config.max_sequence_tokens)
        self._check_reach(batch.lengths, lookahead)
        held = batch.meta[:, NUM_BLOCKS]
        grown = np.maximum(((batch.lengths + (lookahead + self._mask)) >> self._shift) - held, 0)
        first = batch.meta[:, NUM_COMPUTED] >> self._shift
        written = (batch.lengths + self._mask) >> self._shift
        pending = np.minimum(written, held) - first
        num_grown = int(np.add.reduce(grown))
        self._check_request_blocks(int(np.add.reduce(pending)) + num_grown, "sequence_ids")
        which, entries = ragged(first, pending)
        rows = batch.rows[which]
        blocks = self.block_tables[rows, entries].astype(np.int64)
        taken = (self.device.ref_count[blocks] > 1) | self.device.indexed[blocks]
        if not np.count_nonzero(taken):
            return Growth(grown, num_grown, None)
        copied, forgotten = self._plan_copies(blocks[taken])
        chosen = np.flatnonzero(taken)[copied]
        computed = (entries[chosen] << self._shift) < batch.meta[which[chosen], NUM_COMPUTED]
        return Growth(grown, num_grown, _Copying(rows[chosen], entries[chosen], blocks[chosen], computed, forgotten))

    def _plan_copies(self, blocks: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Plan copy-on-write for `blocks` int64[n], which are shared or indexed and will be written.

        Returns (bool[n], which of them are copied; int64[m], blocks that leave the prefix index). If all holders of a
        block write to it, the last of them keeps the block, unless the block is pinned.
        """
        distinct, inverse, writers = np.unique(blocks, return_inverse=True, return_counts=True)
        kept = (writers == self.device.ref_count[distinct]) & ~self.device.pinned[distinct]
        last = np.zeros(len(distinct), np.int64)
        last[inverse] = np.arange(len(blocks))
        copied = np.ones(len(blocks), np.bool_)
        copied[last[kept]] = False
        return copied, distinct[kept & self.device.indexed[distinct]]

    def _grow(self, batch: Batch, growth: Growth) -> BlockCopies:
        """Apply a growth that is known to fit."""
        new = self.device.take(growth.num_new) if growth.num_new else _NO_BLOCKS
        if growth.num_grown:
            which, entries = ragged(batch.meta[:, NUM_BLOCKS], growth.grown)
            self.block_tables[batch.rows[which], entries] = new[: growth.num_grown]
            self.sequences.num_blocks[batch.rows] += growth.grown
        return self._copy(growth.copying, new[growth.num_grown :]) if growth.copying else NO_COPIES

    def _copy(self, copying: _Copying, dst: Int64Array) -> BlockCopies:
        """Replace the blocks to be copied with the new blocks `dst`."""
        device, src = self.device, copying.src
        device.forget(copying.forgotten)
        device.token_ids[dst] = device.token_ids[src]
        self.block_tables[copying.rows, copying.entries] = dst
        distinct, holders = np.unique(src, return_counts=True)
        device.release(distinct, holders)
        self.cow_copies += len(src)
        made = copying.computed
        return BlockCopies(src[made].astype(np.int32), dst[made].astype(np.int32))
