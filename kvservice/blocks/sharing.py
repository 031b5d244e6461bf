"""Forks: sequences that share blocks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import int64_array
from kvservice.blocks.block_pool import ONE
from kvservice.blocks.limits import check_request_blocks
from kvservice.blocks.namespaces import NO_STEP, SessionNamespace
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.sequences import (
    FLAGS,
    LENGTH,
    NUM_BLOCKS,
    NUM_COMPUTED,
    SCHEDULED,
    SEQUENCE_ID,
    STATE_COLUMNS,
    STEP,
)
from kvservice.blocks.state import BlockState
from kvservice.errors import InvalidArgumentError


class Forker:
    """Forks sequences, and finds the blocks that sequences share."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._sequences = state.device, state.sequences
        self._shift = state.config.block_shift

    def fork(self, namespace: SessionNamespace, parent_ids: npt.ArrayLike, child_ids: npt.ArrayLike) -> None:
        """See BlockManager.fork."""
        self._state.enter(namespace)
        parents, children = int64_array(parent_ids, "parent_ids").tolist(), int64_array(child_ids, "child_ids").tolist()
        if len(parents) != len(children):
            raise InvalidArgumentError(f"has {len(children)} elements for {len(parents)} parents", field="child_ids")
        rows = self._parent_rows(namespace, parents)
        namespace.check_new_ids(children, "child_ids[{}]")
        self._sequences.require_free_rows(len(children), "child_ids")
        if len(rows) > 1:
            check_request_blocks(self._config, int(self._sequences.num_blocks[rows].sum()), "parent_ids")
        self._state.intents.begin_new(self._sequences.free_rows[-len(rows) :])
        if namespace.lost:
            self._state.create_lost(namespace, children)
        if len(rows) == 1:
            namespace.rows[children[0]] = self._fork_row(namespace, rows[0], children)[0]
            return
        by_parent: dict[int, list[int]] = {}
        for row, child_id in zip(rows, children, strict=True):
            by_parent.setdefault(row, []).append(child_id)
        made: dict[int, int] = {}
        for row, child_ids in by_parent.items():
            made.update(zip(child_ids, self._fork_row(namespace, row, child_ids), strict=True))
        for child_id in children:  # `describe` lists sequences in creation order
            namespace.rows[child_id] = made[child_id]

    def _parent_rows(self, namespace: SessionNamespace, parents: list[int]) -> list[int]:
        """Return the rows of the parents. Unlike `lookup`, it accepts repeated ids."""
        try:
            rows = [namespace.rows[parent] for parent in parents]
        except KeyError:
            raise namespace.unknown_sequence(parents, "parent_ids") from None
        if self._sequences.num_swapped:
            self._sequences.resident_states(np.array(parents, np.int64), np.array(rows, np.int64), "parent_ids")
        return rows

    def _fork_row(self, namespace: SessionNamespace, parent: int, child_ids: list[int]) -> list[int]:
        """Fork one row. Returns the rows of the children, whose ids are not registered yet."""
        sequences = self._sequences
        states, tables, items, at = sequences.states, sequences.block_tables, sequences.items, parent * STATE_COLUMNS
        step_id = items[at + STEP]
        if step_id != NO_STEP:
            namespace.supersede((step_id,))
            items[at + STEP] = NO_STEP
        table = tables[parent, : items[at + NUM_BLOCKS]]
        self._device.incref_active(table, ONE if len(child_ids) == 1 else np.array(len(child_ids), np.int32))
        flags, rows = items[at + FLAGS] & SCHEDULED, []
        for child_id in child_ids:
            row = sequences.free_rows.pop()
            rows.append(row)
            tables[row, : len(table)] = table
            states[row] = states[parent]
            items[row * STATE_COLUMNS + SEQUENCE_ID] = child_id
            items[row * STATE_COLUMNS + FLAGS] = sequences.new_flags(flags)
            if parent in sequences.extra_keys:
                sequences.set_extra_keys(row, sequences.extra_keys[parent])
        sequences.num_tokens += items[at + LENGTH] * len(child_ids)
        return rows

    def tail_blocks(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """See BlockManager.tail_blocks."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        entries = states[:, LENGTH] >> self._shift
        there = entries < states[:, NUM_BLOCKS]
        blocks = np.zeros(len(ids), np.int64)
        blocks[there] = self._sequences.block_tables[rows[there], entries[there]]
        holders = self._device.ref_count[blocks] + self._device.pinned[blocks]
        return blocks, np.where(there, holders, 0).astype(np.int64)

    def common_prefix_blocks(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> int:
        """See BlockManager.common_prefix_blocks."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        width = int(((states[:, NUM_COMPUTED]) >> self._shift).min())
        first = self._sequences.block_tables[rows[0]]
        for row in rows[1:].tolist():
            differs = self._sequences.block_tables[row, :width] != first[:width]
            if np.count_nonzero(differs):
                width = int(differs.argmax())
        return width
