"""Truncate, free and closing a namespace: operations that give blocks back."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import counts_for, int64_array, refuse
from kvservice.blocks.intents import DROP, RESTORE
from kvservice.blocks.limits import check_request_blocks
from kvservice.blocks.namespaces import NO_STEP, DiskSequence, SessionNamespace
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.sequences import LENGTH, NAMESPACE, NUM_BLOCKS, NUM_COMPUTED, SWAPPED
from kvservice.blocks.slices import SLICE_BLOCKS, Slices, cut_rows
from kvservice.blocks.state import BlockState

# Steps that one slice ends.
_SLICE_STEPS: Final = 1024


class Reclaimer:
    """Gives the blocks of truncated, freed and closed sequences back to the pools."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._swap, self._sequences = state.device, state.swap, state.sequences
        self._pins = state.pins
        self._shift, self._mask = state.config.block_shift, state.config.block_mask

    def truncate(
        self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lengths: npt.ArrayLike, unindex: bool
    ) -> None:
        """See BlockManager.truncate."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        kept = counts_for(lengths, "lengths", len(ids))
        if np.count_nonzero(kept > states[:, LENGTH]):
            refuse("lengths", kept > states[:, LENGTH], "must not be above the sequence's length")
        num_blocks = (kept + self._mask) >> self._shift
        check_request_blocks(self._config, int((states[:, NUM_BLOCKS] - num_blocks).sum()), "sequence_ids")
        self._state.intents.begin(RESTORE, rows)
        self._sequences.end_steps(namespace, rows)
        self._device.decref_entries(*self._sequences.table_entries(rows, num_blocks))
        if unindex:
            self._unindex_cut_blocks(rows, kept)
        self._sequences.states[rows, LENGTH] = kept
        self._sequences.states[rows, NUM_COMPUTED] = np.minimum(kept, states[:, NUM_COMPUTED])
        self._sequences.states[rows, NUM_BLOCKS] = num_blocks
        self._sequences.num_tokens -= int((states[:, LENGTH] - kept).sum())

    def _unindex_cut_blocks(self, rows: Int64Array, kept: Int64Array) -> None:
        """Remove blocks from the prefix index whose last tokens are removed, except those that others hold or pin."""
        cut = (kept & self._mask) != 0
        blocks = self._sequences.block_tables[rows[cut], kept[cut] >> self._shift].astype(np.int64)
        exclusive = (self._device.ref_count[blocks] == 1) & ~self._device.pinned[blocks]
        self._device.remove_from_index(blocks[exclusive & self._device.indexed[blocks]])

    def free(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Slices[None]:
        """See BlockManager.free. The ids are free after the first slice, all blocks after the last one."""
        self._state.enter(namespace)
        if namespace.lost or namespace.on_disk:
            sequence_ids = self._forget_lost(namespace, sequence_ids)
            if not len(sequence_ids):
                return
        ids, rows = namespace.lookup(sequence_ids)
        self._state.intents.begin(DROP, rows)
        self._sequences.end_steps(namespace, rows)
        for sequence_id in ids.tolist():
            namespace.remove(sequence_id)
        parts = self._cut(rows)
        if len(parts) == 1:
            self._free_rows(rows)
            return
        # Other operations end the intent meanwhile. The sequences are lost if a restart comes before the reply.
        self._state.keep_lost(namespace.number, namespace.lost.union(ids.tolist()))
        self._sequences.states[rows, NAMESPACE] = 0
        self._sequences.ending.update(rows.tolist())
        yield from self._free_parts(parts)
        self._state.settle_lost(namespace)

    def _forget_lost(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Int64Array:
        """Forget those of these sequences that are lost or on the disk. Returns the others."""
        ids = int64_array(sequence_ids, "sequence_ids")
        names = ids.tolist()
        gone, on_disk = namespace.lost.intersection(names), namespace.on_disk.keys() & set(names)
        without_row = gone | on_disk
        others = ids[[name not in without_row for name in names]] if without_row else ids
        if len(others):
            namespace.lookup(others)
        if gone:
            self._state.forget_lost(namespace, gone)
        self._forget_on_disk(namespace, on_disk)
        return others

    def _forget_on_disk(self, namespace: SessionNamespace, names: set[int]) -> None:
        """Forget sequences that are on the disk. Until the operation counts, they are lost after a restart, so that a
        client can repeat it."""
        if not names:
            return
        for name in names:
            del namespace.on_disk[name]
        self._state.keep_lost(namespace.number, namespace.lost | names)
        self._state.settle_lost(namespace)

    def _cut(self, rows: Int64Array) -> list[Int64Array]:
        return [rows] if len(rows) == 1 else cut_rows(rows, self._sequences.num_blocks[rows])

    def _free_parts(self, parts: list[Int64Array]) -> Slices[None]:
        """Free rows that no sequence id and no step refers to any more, one part in a slice."""
        for part in parts[:-1]:
            self._free_rows(part)
            yield
        self._free_rows(parts[-1])

    def _free_rows(self, rows: Int64Array) -> None:
        self._state.generation += 1
        self._sequences.num_tokens -= int(self._sequences.states[rows, LENGTH].sum())
        resident = rows
        if self._sequences.num_swapped:
            swapped = self._sequences.states[rows, SWAPPED] != 0
            resident, gone = rows[~swapped], rows[swapped]
            self._sequences.num_swapped -= len(gone)
            if len(gone):
                self._swap.decref_entries(*self._sequences.table_entries(gone))
        if len(resident):
            self._device.decref_entries(*self._sequences.table_entries(resident))
        self._sequences.states[rows] = 0
        free = rows.tolist()
        if self._sequences.extra_keys:
            self._sequences.drop_extra_keys(free)
        if self._sequences.ending:
            self._sequences.ending.difference_update(free)
        self._sequences.free_rows.extend(free)

    def close_namespace(self, namespace: SessionNamespace) -> Slices[int]:
        """See BlockManager.close_namespace. The namespace is closed after the first slice."""
        if namespace.closed:
            return 0
        namespace.closed = True
        self._state.generation += 1
        self._state.namespaces.remove(namespace)
        self._state.end_operation()
        rows = np.array(list(namespace.rows.values()), np.int64)
        self._sequences.states[rows, NAMESPACE] = 0
        self._sequences.ending.update(rows.tolist())
        self._state.forget_lost(namespace, list(namespace.lost))
        namespace.on_disk.clear()
        yield from self._end_steps(namespace)
        yield from self._end_pins(namespace)
        if len(rows):
            yield from self._free_parts(self._cut(rows))
        return len(rows)

    def move_to_disk(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Slices[None]:
        """See BlockManager.move_to_disk_in_slices."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.states[rows]
        moved = zip(ids.tolist(), states[:, LENGTH].tolist(), states[:, NUM_COMPUTED].tolist(), strict=True)
        on_disk = {name: DiskSequence(length, num_computed) for name, length, num_computed in moved}
        self._state.counters.swapped_out_sequences += len(ids)
        freeing = self.free(namespace, ids)
        try:
            next(freeing)
        except StopIteration:
            namespace.on_disk.update(on_disk)
            return
        namespace.on_disk.update(on_disk)
        yield
        yield from freeing

    def end_steps(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike | None) -> Slices[None]:
        """See BlockManager.end_steps_in_slices."""
        self._state.enter(namespace)
        if sequence_ids is not None:
            self._sequences.end_steps(namespace, namespace.lookup(sequence_ids)[1])
            return
        yield from self._end_steps(namespace)
        rows = np.array(list(namespace.rows.values()), np.int64)
        self._sequences.steps[rows] = NO_STEP

    def _end_steps(self, namespace: SessionNamespace) -> Slices[None]:
        step_ids = list(namespace.steps)
        for first in range(0, len(step_ids), _SLICE_STEPS):
            if first:
                yield
            namespace.supersede(step_ids[first : first + _SLICE_STEPS])

    def _end_pins(self, namespace: SessionNamespace) -> Slices[None]:
        left = SLICE_BLOCKS
        while namespace.pins:
            if left <= 0:
                yield
                left = SLICE_BLOCKS
            self._state.generation += 1
            left -= self._pins.remove(namespace, next(iter(namespace.pins)))
