"""Reading the state without changing it: tables and slots for attention, descriptions, figures."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import whole_number
from kvservice.blocks.core import Core
from kvservice.blocks.plans import BlocksStats, Int64Array, SequenceInfo, SequenceTables, gather_block_tables
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED, SequenceSpace
from kvservice.errors import NotComputedError


class InspectionOps(Core):
    """gather_tables, read_slots, describe, stats."""

    def gather_tables(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> SequenceTables:
        """Tables of the computed tokens of sequence_ids int64[n], for attention outside a step.

        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        context_lens = self._resident(ids, rows)[:, NUM_COMPUTED].astype(np.int32)
        tables = gather_block_tables(self.block_tables, rows, context_lens, self.config.block_size)
        return SequenceTables(tables, context_lens)

    def read_slots(self, space: SequenceSpace, sequence_id: int, start: int, stop: int) -> Int64Array:
        """Slots int64[stop - start] of the tokens start <= position < stop of a sequence.

        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError, and NotComputedError if one of these
        tokens is not computed.
        """
        self._enter(space)
        ids, rows = space.lookup([sequence_id], "sequence_id")
        meta = self._resident(ids, rows, "sequence_id")
        stop = whole_number(stop, "stop", 0, int(meta[0, LENGTH]))
        start = whole_number(start, "start", 0, stop)
        if stop > meta[0, NUM_COMPUTED]:
            raise NotComputedError(
                f"only {meta[0, NUM_COMPUTED]} tokens of sequence {sequence_id} are computed", field="stop",
                sequence_id=int(ids[0]), num_computed=int(meta[0, NUM_COMPUTED]),
            )  # fmt: skip
        positions = np.arange(start, stop)
        blocks: Int64Array = self.block_tables[rows[0], positions >> self._shift].astype(np.int64)
        return (blocks << self._shift) | (positions & self._mask)

    def describe(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike | None = None,
        *,
        include_tokens: bool = False,
        include_blocks: bool = False,
    ) -> list[SequenceInfo]:
        """Each sequence as it stands, in the order asked, or all of the space in the order of their making.

        Raises InvalidArgumentError, UnknownSequenceError.
        """
        self._enter(space)
        if sequence_ids is None:
            names = list(space.rows.items())
        else:
            ids, rows = space.lookup(sequence_ids)
            names = list(zip(ids.tolist(), rows.tolist(), strict=True))
        return [self._describe_row(name, row, include_tokens, include_blocks) for name, row in names]

    def _describe_row(self, sequence_id: int, row: int, include_tokens: bool, include_blocks: bool) -> SequenceInfo:
        meta = self.meta[row].tolist()
        blocks = self.block_tables[row, : meta[NUM_BLOCKS]]
        tier = self.swap if meta[SWAPPED] else self.device
        return SequenceInfo(
            sequence_id,
            length=meta[LENGTH],
            num_computed=meta[NUM_COMPUTED],
            num_blocks=meta[NUM_BLOCKS],
            swapped=bool(meta[SWAPPED]),
            token_ids=tier.token_ids[blocks].reshape(-1)[: meta[LENGTH]] if include_tokens else None,
            block_ids=blocks.copy() if include_blocks else None,
        )

    def stats(self) -> BlocksStats:
        """All gauges and counters; nothing is scanned for them."""
        device = self.device
        return BlocksStats(
            num_blocks=device.num_blocks,
            num_free_blocks=device.num_free,
            num_active_blocks=device.num_active,
            num_shared_blocks=device.num_shared,
            num_cached_blocks=device.num_cached,
            num_pinned_blocks=device.num_pinned_unheld,
            num_swap_blocks=self.swap.num_blocks,
            num_used_swap_blocks=self.swap.num_active,
            num_sequences=self.config.max_sequences - len(self.sequences.free_rows),
            num_swapped_sequences=self.sequences.num_swapped,
            num_tokens=self.sequences.num_tokens,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            computed_tokens=self.computed_tokens,
            cow_copies=self.cow_copies,
            swapped_out_blocks=self.swapped_out_blocks,
            swapped_in_blocks=self.swapped_in_blocks,
            swapped_out_sequences=self.swapped_out_sequences,
            swapped_in_sequences=self.swapped_in_sequences,
            evictions=device.evictions,
        )
