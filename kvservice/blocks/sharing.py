"""Fork, truncate and free: operations that add and drop references to blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.blocks.allocation import AllocationOps
from kvservice.blocks.arguments import counts_for, int64_array, refuse
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.sequences import (
    LENGTH,
    NO_STEP,
    NUM_BLOCKS,
    NUM_COMPUTED,
    SEQUENCE_ID,
    STEP,
    SWAPPED,
    SequenceSpace,
    unknown_sequence,
)  # fmt: skip
from kvservice.blocks.slices import Slices, cut_rows, finish
from kvservice.blocks.tier import ONE
from kvservice.errors import InvalidArgumentError


class SharingOps(AllocationOps):
    """fork, truncate, free, common_prefix_blocks."""

    def fork(self, space: SequenceSpace, parent_ids: npt.ArrayLike, child_ids: npt.ArrayLike) -> None:
        """Create children that share every block of their parents (vLLM v0: fork). Moves no bytes.

        parent_ids int64[n] may repeat a parent; child_ids int64[n] are distinct and unused.
        The parents' steps become stale, because their slots are now shared.
        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError, DuplicateSequenceError,
        QuotaExceededError.
        """
        self._enter(space)
        parents, children = int64_array(parent_ids, "parent_ids").tolist(), int64_array(child_ids, "child_ids").tolist()
        if len(parents) != len(children):
            raise InvalidArgumentError(f"has {len(children)} elements for {len(parents)} parents", field="child_ids")
        rows = self._parent_rows(space, parents)
        self._check_new_ids(space, children, "child_ids[{}]")
        self._require_rows(len(children), "child_ids")
        if len(rows) == 1:
            space.rows[children[0]] = self._fork_row(space, rows[0], children)[0]
            return
        self._check_request_blocks(int(self.sequences.num_blocks[rows].sum()), "parent_ids")
        by_parent: dict[int, list[int]] = {}
        for row, child_id in zip(rows, children, strict=True):
            by_parent.setdefault(row, []).append(child_id)
        made: dict[int, int] = {}
        for row, child_ids in by_parent.items():
            made.update(zip(child_ids, self._fork_row(space, row, child_ids), strict=True))
        for child_id in children:  # `describe` lists sequences in creation order
            space.rows[child_id] = made[child_id]

    def _parent_rows(self, space: SequenceSpace, parents: list[int]) -> list[int]:
        """Return the rows of the parents. Unlike `lookup`, it accepts repeated ids."""
        try:
            rows = [space.rows[parent] for parent in parents]
        except KeyError:
            raise unknown_sequence(parents, space.rows, "parent_ids") from None
        if self.sequences.num_swapped:
            self._resident(np.array(parents, np.int64), np.array(rows, np.int64), "parent_ids")
        return rows

    def _fork_row(self, space: SequenceSpace, parent: int, child_ids: list[int]) -> list[int]:
        """Fork one row. Returns the rows of the children, whose ids are not registered yet."""
        sequences, meta, tables = self.sequences, self.meta, self.block_tables
        step_id = meta.item(parent, STEP)
        if step_id != NO_STEP:
            space.supersede((step_id,))
            meta[parent, STEP] = NO_STEP
        table = tables[parent, : meta.item(parent, NUM_BLOCKS)]
        self.device.hold_active(table, ONE if len(child_ids) == 1 else np.array(len(child_ids), np.int32))
        rows = []
        for child_id in child_ids:
            row = sequences.free_rows.pop()
            rows.append(row)
            tables[row, : len(table)] = table
            meta[row] = meta[parent]
            meta[row, SEQUENCE_ID] = child_id
            if parent in sequences.extra_keys:
                sequences.extra_keys[row] = sequences.extra_keys[parent]
        sequences.num_tokens += meta.item(parent, LENGTH) * len(child_ids)
        return rows

    def truncate(self, space: SequenceSpace, sequence_ids: npt.ArrayLike, lengths: npt.ArrayLike) -> None:
        """Remove tokens at the end, for rejected speculation or a retried step (vLLM v1 and SGLang do the same).

        sequence_ids int64[n], distinct; lengths int64[n], each from 0 to the sequence's length. A sequence of length 0
        continues to exist without blocks. Blocks past the new end are released, including lookahead blocks. Raises
        InvalidArgumentError, UnknownSequenceError, SequenceSwappedError.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        meta = self._resident(ids, rows)
        kept = counts_for(lengths, "lengths", len(ids))
        if np.count_nonzero(kept > meta[:, LENGTH]):
            refuse("lengths", kept > meta[:, LENGTH], "must not be above the sequence's length")
        num_blocks = (kept + self._mask) >> self._shift
        self._check_request_blocks(int((meta[:, NUM_BLOCKS] - num_blocks).sum()), "sequence_ids")
        self._supersede(space, rows)
        self._release_entries(self.device, *self._table_entries(rows, num_blocks))
        self.meta[rows, LENGTH] = kept
        self.meta[rows, NUM_COMPUTED] = np.minimum(kept, meta[:, NUM_COMPUTED])
        self.meta[rows, NUM_BLOCKS] = num_blocks
        self.sequences.num_tokens -= int((meta[:, LENGTH] - kept).sum())

    def free(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> None:
        """`free_in_slices` without a pause."""
        finish(self.free_in_slices(space, sequence_ids))

    def free_in_slices(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> Slices[None]:
        """Free sequences, including swapped-out ones. sequence_ids int64[n], distinct.

        Computed full blocks without references stay cached, and the deepest block of a chain is evicted first; other
        blocks become free. The ids are free after the first slice, all blocks after the last one.
        Raises InvalidArgumentError, UnknownSequenceError.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        self._supersede(space, rows)
        for sequence_id in ids.tolist():
            space.remove(sequence_id)
        yield from self._end_rows(rows)

    def _end_rows(self, rows: Int64Array) -> Slices[None]:
        """Free rows that no sequence id and no step refers to any more."""
        parts = [rows] if len(rows) == 1 else cut_rows(rows, self.sequences.num_blocks[rows])
        if len(parts) > 1:
            self.sequences.ending.update(rows.tolist())
        for part in parts[:-1]:
            self._free_rows(part)
            yield
        self._free_rows(parts[-1])

    def _free_rows(self, rows: Int64Array) -> None:
        self.generation += 1
        self.sequences.num_tokens -= int(self.meta[rows, LENGTH].sum())
        resident = rows
        if self.sequences.num_swapped:
            swapped = self.meta[rows, SWAPPED] != 0
            resident, gone = rows[~swapped], rows[swapped]
            self.sequences.num_swapped -= len(gone)
            if len(gone):
                self._release_entries(self.swap, *self._table_entries(gone))
        if len(resident):
            self._release_entries(self.device, *self._table_entries(resident))
        self.meta[rows] = 0
        free = rows.tolist()
        if self.sequences.extra_keys:
            for row in free:
                self.sequences.extra_keys.pop(row, None)
        if self.sequences.ending:
            self.sequences.ending.difference_update(free)
        self.sequences.free_rows.extend(free)

    def common_prefix_blocks(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> int:
        """Return how many leading blocks all these sequences share, so that attention can read them once (cascade).
        Only blocks that are full and computed in every sequence count.

        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        meta = self._resident(ids, rows)
        width = int(((meta[:, NUM_COMPUTED]) >> self._shift).min())
        first = self.block_tables[rows[0]]
        for row in rows[1:].tolist():
            differs = self.block_tables[row, :width] != first[:width]
            if np.count_nonzero(differs):
                width = int(differs.argmax())
        return width
