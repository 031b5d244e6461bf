"""Rearranging: sequences continue others, as the beams of a beam search do after every step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import int64_array
from kvservice.blocks.intents import DROP
from kvservice.blocks.limits import check_request_blocks
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.ranges import ragged
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED
from kvservice.blocks.state import BlockState
from kvservice.errors import InvalidArgumentError


class Rearranger:
    """Lets sequences continue others. Moves no bytes."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._sequences = state.device, state.sequences

    def rearrange(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, parent_ids: npt.ArrayLike) -> None:
        """See BlockManager.rearrange."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        parents, parent_rows = self._parents(namespace, parent_ids, len(ids))
        self._sequences.resident_states(ids, rows)
        self._sequences.resident_states(parents, parent_rows, "parent_ids")
        moved = rows != parent_rows
        if np.count_nonzero(moved):
            self._move(namespace, rows[moved], parent_rows[moved])

    def _parents(
        self, namespace: SessionNamespace, parent_ids: npt.ArrayLike, count: int
    ) -> tuple[Int64Array, Int64Array]:
        """Return (ids int64[n], rows int64[n]) of the parents, which may be repeated."""
        parents = int64_array(parent_ids, "parent_ids")
        if len(parents) != count:
            raise InvalidArgumentError(f"has {len(parents)} elements for {count} sequences", field="parent_ids")
        names = parents.tolist()
        try:
            return parents, np.array([namespace.rows[name] for name in names], np.int64)
        except KeyError:
            raise namespace.unknown_sequence(names, "parent_ids") from None

    def _move(self, namespace: SessionNamespace, rows: Int64Array, parent_rows: Int64Array) -> None:
        """Replace the content of rows with that of their parents. All of it is read before anything changes."""
        device, sequences = self._device, self._sequences
        states = sequences.states[parent_rows]
        counts = (states[:, LENGTH] + self._config.block_mask) >> self._config.block_shift
        check_request_blocks(self._config, int(counts.sum() + sequences.num_blocks[rows].sum()), "sequence_ids")
        which, entries = ragged(np.zeros(len(rows), np.int64), counts)
        blocks = sequences.block_tables[parent_rows[which], entries].astype(np.int64)
        extra_keys = [sequences.extra_keys.get(row) for row in parent_rows.tolist()]
        self._state.intents.begin(DROP, rows)
        sequences.end_steps(namespace, np.concatenate([rows, parent_rows]))
        dropped = sequences.table_entries(rows)
        device.incref(*np.unique(blocks, return_counts=True))
        device.decref_entries(*dropped)
        sequences.num_tokens += int((states[:, LENGTH] - sequences.lengths[rows]).sum())
        sequences.block_tables[rows[which], entries] = blocks
        sequences.lengths[rows], sequences.num_computed[rows] = states[:, LENGTH], states[:, NUM_COMPUTED]
        sequences.states[rows, NUM_BLOCKS] = counts
        for row, keys in zip(rows.tolist(), extra_keys, strict=True):
            if keys is not None:
                sequences.set_extra_keys(row, keys)
            else:
                sequences.drop_extra_keys([row])
