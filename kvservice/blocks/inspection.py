"""Read-only operations: block tables and slots for attention, descriptions of sequences, statistics."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.blocks.core import Core
from kvservice.blocks.plans import (
    BlocksStats,
    BoolArray,
    Int64Array,
    SequenceInfo,
    SequenceTables,
    gather_block_tables,
)
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED, SequenceSpace, unknown_sequence
from kvservice.blocks.slices import Slices, finish, in_turn
from kvservice.errors import InvalidArgumentError, KVServiceError, NotComputedError, UnknownSequenceError


class InspectionOps(Core):
    """gather_tables, read_slots, describe, stats."""

    def gather_tables(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> SequenceTables:
        """Return the block tables of the computed tokens of sequence_ids int64[n], for attention outside a step.

        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        context_lens = self._resident(ids, rows)[:, NUM_COMPUTED].astype(np.int32)
        tables = gather_block_tables(self.block_tables, rows, context_lens, self.config.block_size)
        return SequenceTables(tables, context_lens)

    def read_slots(self, space: SequenceSpace, ranges: Sequence[tuple[int, int, int]]) -> Int64Array:
        """Return the slots int64[m] of the token positions start <= position < stop of each (sequence id, start, stop)
        range, in order. A sequence may appear more than once.

        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError, and NotComputedError if one of the
        tokens is not computed. Fields are named as in ranges[0].stop.
        """
        self._enter(space)
        if not ranges:
            raise InvalidArgumentError("must not be empty", field="ranges")
        names = [sequence_id for sequence_id, _, _ in ranges]
        rows = self._range_rows(space, names)
        length, computed = self.sequences.lengths[rows], self.sequences.num_computed[rows]
        starts, stops = (np.array([token_range[i] for token_range in ranges], np.int64) for i in (1, 2))
        _refuse_range((stops < 0) | (stops > length), "stop", "must be from 0 to the sequence's length")
        _refuse_range((starts < 0) | (starts > stops), "start", "must be from 0 to stop")
        if np.count_nonzero(stops > computed):
            i = int((stops > computed).argmax())
            raise NotComputedError(
                f"only {computed[i]} tokens of sequence {names[i]} are computed", field=f"ranges[{i}].stop",
                sequence_id=names[i], num_computed=int(computed[i]),
            )  # fmt: skip
        return self._slots(rows, starts, stops - starts)

    def _range_rows(self, space: SequenceSpace, names: list[int]) -> Int64Array:
        try:
            rows = np.array([space.rows[name] for name in names], np.int64)
            self._resident(np.array(names, np.int64), rows, "ranges")
        except KeyError:
            error = unknown_sequence(names, space.rows, "ranges")
        except KVServiceError as swapped:
            error = swapped
        else:
            return rows
        error.field += ".sequence_id"
        raise error

    def describe(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike | None = None,
        *,
        first: int = 0,
        limit: int | None = None,
        include_tokens: bool = False,
        include_blocks: bool = False,
    ) -> list[SequenceInfo]:
        """Describe sequences in the requested order. Without ids it describes the sequences of the namespace in the
        order of their creation, at most `limit` of them from index `first` on.

        Raises InvalidArgumentError, UnknownSequenceError, and QuotaExceededError if the tokens or blocks exceed the
        limits of one request.
        """
        return finish(
            self.describe_in_slices(
                space,
                sequence_ids,
                first=first,
                limit=limit,
                include_tokens=include_tokens,
                include_blocks=include_blocks,
            )
        )

    def describe_in_slices(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike | None = None,
        *,
        first: int = 0,
        limit: int | None = None,
        include_tokens: bool = False,
        include_blocks: bool = False,
    ) -> Slices[list[SequenceInfo]]:
        """`describe` in slices. The first slice selects the sequences; each is described as of its own slice. Raises
        UnknownSequenceError if one is freed in the meantime."""
        self._enter(space)
        if sequence_ids is None:
            stop = None if limit is None else first + limit
            named = dict(itertools.islice(space.rows.items(), first, stop))
        else:
            ids, rows = space.lookup(sequence_ids)
            named = dict(zip(ids.tolist(), rows.tolist(), strict=True))
        described = list(named.values())
        if include_tokens:
            self._check_request_tokens(int(self.sequences.lengths[described].sum()), "sequence_ids")
        if include_blocks:
            self._check_request_blocks(int(self.sequences.num_blocks[described].sum()), "sequence_ids")
        return (yield from in_turn(self._describe(space, name, include_tokens, include_blocks) for name in named))

    def _describe(
        self, space: SequenceSpace, sequence_id: int, include_tokens: bool, include_blocks: bool
    ) -> SequenceInfo:
        row = None if space.closed else space.rows.get(sequence_id)
        if row is None:
            raise UnknownSequenceError(
                f"sequence {sequence_id} was freed meanwhile", field="sequence_ids", sequence_id=sequence_id
            )
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
        """Return all gauges and counters, in O(1)."""
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


def _refuse_range(bad: BoolArray, name: str, message: str) -> None:
    if np.count_nonzero(bad):
        raise InvalidArgumentError(message, field=f"ranges[{int(bad.argmax())}].{name}")
