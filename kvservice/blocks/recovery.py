"""Recovery: the state of an earlier process of the daemon, made whole.

The process may have ended at any point. The operation in progress is undone, or drops its sequences (see intents.py).
Blocks whose bytes may be incomplete leave the prefix index, and the sequences that hold them are lost. The sequences of
schedulers and of closed sessions end. Reference counts, free blocks, the index and the eviction queue are derived.

Recovery may be interrupted, too, and then runs again from its start: sequences are recorded as lost before their rows
become free, the intent ends after its rows are valid, and unfinished blocks are forgotten last.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence
from dataclasses import dataclass

import numpy as np

from kvservice.blocks.intents import CREATE, DROP, RESTORE
from kvservice.blocks.invariants import require_range
from kvservice.blocks.kept import unpack_ids
from kvservice.blocks.layers import LayerTracker
from kvservice.blocks.namespaces import NO_STEP, SessionNamespace
from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.blocks.ranges import ragged
from kvservice.blocks.saved_steps import restore_steps
from kvservice.blocks.sequences import FLAGS, NAMESPACE, NUM_BLOCKS, SCHEDULED, SEQUENCE_ID, SWAPPED
from kvservice.blocks.state import BlockState


@dataclass(frozen=True)
class Recovery:
    """The findings of a new process. `namespaces` are the open ones by number. The counts are of sequences that exist,
    that are lost since the process before, and that ended with their scheduler or session; of cached blocks, pins
    and live steps."""

    namespaces: dict[int, SessionNamespace]
    num_sequences: int
    num_lost: int
    num_ended: int
    num_cached_blocks: int
    num_pins: int
    num_steps: int


@dataclass(frozen=True, slots=True, eq=False)
class _Tables:
    """The table entries of rows in use: row, entry and block, int64[m] each, and whether the block is one of the swap
    tier, bool[m]."""

    rows: Int64Array
    entries: Int64Array
    blocks: Int64Array
    swapped: BoolArray


class Recoverer:
    """Makes the state of an earlier process whole."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._kept, self._sequences = state, state.kept, state.sequences
        self._device, self._swap, self._states = state.device, state.swap, state.sequences.states

    def recover(self, open_namespaces: Mapping[int, MutableSequence[int]], with_steps: bool) -> Recovery:
        """See BlockManager.recover."""
        lost = {number: unpack_ids(self._kept.lost.get(number, b"")) for number in open_namespaces}
        num_lost_before = sum(map(len, lost.values()))
        self._end_operation(lost)
        tables = self._tables()
        ended = self._end_sequences(tables, lost)
        self._device.indexed[self._unfinished_blocks()] = False
        self._state.intents.end()
        self._derive(tables, ended)
        namespaces = {
            number: self._namespace(number, counters, lost[number]) for number, counters in open_namespaces.items()
        }
        self._commit_finished(namespaces)
        self._state.pins.recover(namespaces, self._state.config.max_pinned_blocks)
        self._end_steps(namespaces, with_steps)
        self._forget(open_namespaces)
        return Recovery(
            namespaces=namespaces,
            num_sequences=sum(map(len, namespaces.values())),
            num_lost=sum(map(len, lost.values())) - num_lost_before,
            num_ended=int(np.count_nonzero(ended)),
            num_cached_blocks=self._device.num_cached + self._device.num_pinned_cached,
            num_pins=self._state.pins.num_pins,
            num_steps=sum(len(namespace.steps) for namespace in namespaces.values()),
        )

    def _end_operation(self, lost: dict[int, set[int]]) -> None:
        """Undo the operation in progress, or drop its sequences, and record these in `lost`."""
        kind, rows, before = self._state.intents.read()
        if kind == DROP:
            self._lose(before, lost)
            self._states[rows] = 0
        elif kind == CREATE:
            self._states[rows] = 0
        elif kind == RESTORE:
            self._states[rows] = before

    def _lose(self, states: Int64Array, lost: dict[int, set[int]]) -> None:
        """Record the sequences with these states int64[n, 8] as lost, if their clients can still ask for them."""
        for number in {number for number in states[:, NAMESPACE].tolist() if number in lost}:
            mine = (states[:, NAMESPACE] == number) & (states[:, FLAGS] & SCHEDULED == 0)
            lost[number].update(states[mine, SEQUENCE_ID].tolist())
            self._state.keep_lost(number, lost[number])

    def _tables(self) -> _Tables:
        """Return the entries of all rows in use. Raises InternalError if one cannot be."""
        used = np.flatnonzero(self._states[:, NAMESPACE])
        counts = self._states[used, NUM_BLOCKS]
        require_range(counts, self._sequences.block_tables.shape[1] + 1, "the size of a table")
        which, entries = ragged(np.zeros(len(used), np.int64), counts)
        rows = used[which]
        blocks = self._sequences.block_tables[rows, entries].astype(np.int64)
        swapped = self._states[rows, SWAPPED] != 0
        require_range(blocks[~swapped], self._device.num_blocks, "a block in a table")
        require_range(blocks[swapped], self._swap.num_blocks, "a swap block in a table")
        return _Tables(rows, entries, blocks, swapped)

    def _end_sequences(self, tables: _Tables, lost: dict[int, set[int]]) -> BoolArray:
        """Free the rows of sequences that do not live on. Returns bool[max_sequences]: which ones."""
        states = self._states
        torn = np.zeros(len(states), np.bool_)
        for swapped, unfinished in (
            (tables.swapped, self._state.unfinished_swap != 0),
            (~tables.swapped, self._unfinished_blocks()),
        ):
            torn[tables.rows[swapped][unfinished[tables.blocks[swapped]]]] = True
        owned = np.isin(states[:, NAMESPACE], list(lost)) & (states[:, FLAGS] & SCHEDULED == 0)
        self._lose(states[owned & torn], lost)
        ended: BoolArray = (states[:, NAMESPACE] != 0) & (torn | ~owned)
        states[ended, NAMESPACE] = 0
        states[states[:, NAMESPACE] == 0] = 0
        return ended

    def _unfinished_blocks(self) -> BoolArray:
        """Return bool[num_blocks]: the device blocks whose bytes may be incomplete."""
        blocks: BoolArray = (self._state.unfinished_device != 0) | self._state.unsubmitted
        return blocks

    def _derive(self, tables: _Tables, ended: BoolArray) -> None:
        """Derive all that is not kept from what is, without the tables of rows that ended."""
        depths = np.zeros(self._device.num_blocks, np.int64)
        gone = ended[tables.rows] & ~tables.swapped
        depths[tables.blocks[gone]] = tables.entries[gone]
        held = ~ended[tables.rows]
        self._device.recover_cache(tables.blocks[held & ~tables.swapped], depths)
        self._swap.recover(tables.blocks[held & tables.swapped])
        self._sequences.recover()

    def _namespace(self, number: int, counters: MutableSequence[int], lost: set[int]) -> SessionNamespace:
        """Open a namespace with its sequences, in the order of their creation."""
        namespace = self._state.add_namespace(number, counters)
        namespace.last_step_before_restart = namespace.last_step_id
        rows = np.flatnonzero(self._states[:, NAMESPACE] == number)
        rows = rows[np.argsort(self._states[rows, FLAGS])]
        namespace.rows.update(zip(self._states[rows, SEQUENCE_ID].tolist(), rows.tolist(), strict=True))
        namespace.lost = lost.difference(namespace.rows)
        self._state.keep_lost(number, namespace.lost)
        return namespace

    def _commit_finished(self, namespaces: Mapping[int, SessionNamespace]) -> None:
        """Commit the steps that lanes have finished, and that the process before had not committed."""
        layers, steps, num_computed = LayerTracker(self._state), self._sequences.steps, self._sequences.num_computed
        for number, namespace in namespaces.items():
            finished = self._state.finished_ids[number - 1]
            if np.count_nonzero(finished):
                rows = np.array(list(namespace.rows.values()), np.int64)
                rows = rows[np.isin(steps[rows], finished[finished != NO_STEP])]
                rows = rows[num_computed[rows] < self._state.lane_lens[rows]]
                layers.commit_rows(rows, self._state.lane_lens[rows])

    def _end_steps(self, namespaces: Mapping[int, SessionNamespace], with_steps: bool) -> None:
        """Make all steps stale except those that were saved."""
        live = np.zeros(len(self._states), np.bool_)
        if with_steps:
            for number, namespace in namespaces.items():
                live[restore_steps(self._state, namespace, self._kept.steps.get(number, b"[]"))] = True
        self._sequences.steps[~live] = NO_STEP

    def _forget(self, open_namespaces: Mapping[int, MutableSequence[int]]) -> None:
        """Remove what only this recovery needed."""
        self._kept.steps.clear()
        for number in [number for number in self._kept.lost if number not in open_namespaces]:
            del self._kept.lost[number]
        self._state.finished_ids[:] = NO_STEP
        self._state.unsubmitted[:] = False
        self._state.unfinished_device[:] = 0
        self._state.unfinished_swap[:] = 0
