"""Recovery: the state of an earlier process of the daemon, made whole.

The process may have ended at any point. The operation in progress is undone, or drops its sequences (see Intents in
state.py). Blocks whose bytes may be incomplete leave the prefix index, and the sequences that hold them are lost. The
sequences of schedulers and of closed sessions end. Reference counts, free blocks, the index and the eviction queue are
derived. An orderly take-over also carries live steps to the next process, with their written layers and parts.

Recovery may be interrupted, too, and then runs again from its start: sequences are recorded as lost before their rows
become free, the intent ends after its rows are valid, and unfinished blocks are forgotten last."""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.blocks.integrity import require_range
from kvservice.blocks.kept import pack_steps, unpack_ids, unpack_steps
from kvservice.blocks.layers import commit_rows
from kvservice.blocks.plans import NO_STEP, BoolArray, Int64Array, LiveStep, StepPlan
from kvservice.blocks.state import (
    CREATE,
    DROP,
    FLAGS,
    NAMESPACE,
    NUM_BLOCKS,
    NUM_COMPUTED,
    RESTORE,
    SCHEDULED,
    SEQUENCE_ID,
    SWAPPED,
    BlockState,
    SessionNamespace,
    ragged,
)
from kvservice.blocks.steps import NO_COPIES


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


def recover(
    state: BlockState,
    open_namespaces: Mapping[int, MutableSequence[int]],
    *,
    with_steps: bool = False,
    living: Collection[int] = (),
) -> Recovery:
    """Make the state of an earlier process whole, before any other operation of this manager.

    `open_namespaces` maps the numbers of namespaces that live on to their counters; the sequences and pins of all
    others end. `with_steps` says that the process before ended with `save_steps`; otherwise all steps end. `living` are
    the writers that have not ended, see quarantine.py. May be interrupted and repeated. Raises InternalError if the
    tables are invalid.
    """
    lost = {number: unpack_ids(state.kept.lost.get(number, b"")) for number in open_namespaces}
    num_lost_before = sum(map(len, lost.values()))
    state.quarantine.recover(living)
    _undo_operation(state, lost)
    tables = _tables(state)
    ended = _end_sequences(state, tables, lost)
    state.device.indexed[_unfinished_blocks(state)] = False
    state.intents.end()
    _derive(state, tables, ended)
    namespaces = {
        number: _namespace(state, number, counters, lost[number]) for number, counters in open_namespaces.items()
    }
    _commit_finished(state, namespaces)
    state.pins.recover(namespaces, state.config.max_pinned_blocks)
    _end_steps(state, namespaces, with_steps)
    _forget(state, open_namespaces)
    return Recovery(
        namespaces=namespaces,
        num_sequences=sum(map(len, namespaces.values())),
        num_lost=sum(map(len, lost.values())) - num_lost_before,
        num_ended=int(np.count_nonzero(ended)),
        num_cached_blocks=state.device.num_cached + state.device.num_pinned_cached,
        num_pins=state.pins.num_pins,
        num_steps=sum(len(namespace.steps) for namespace in namespaces.values()),
    )


def _undo_operation(state: BlockState, lost: dict[int, set[int]]) -> None:
    """Undo the operation in progress, or drop its sequences, and record these in `lost`."""
    kind, rows, before = state.intents.read()
    if kind == DROP:
        _quarantine_dropped(state, rows, before)
        _lose(state, before, lost)
        state.sequences.states[rows] = 0
    elif kind == CREATE:
        state.sequences.states[rows] = 0
    elif kind == RESTORE:
        state.sequences.states[rows] = before


def _lose(state: BlockState, states: Int64Array, lost: dict[int, set[int]]) -> None:
    """Record the sequences with these states int64[n, 8] as lost, if their clients can still ask for them."""
    for number in {number for number in states[:, NAMESPACE].tolist() if number in lost}:
        mine = (states[:, NAMESPACE] == number) & (states[:, FLAGS] & SCHEDULED == 0)
        lost[number].update(states[mine, SEQUENCE_ID].tolist())
        state.keep_lost(number, lost[number])


def _tables(state: BlockState) -> _Tables:
    """Return the entries of all rows in use. Raises InternalError if one cannot be."""
    used = np.flatnonzero(state.sequences.states[:, NAMESPACE])
    counts = state.sequences.states[used, NUM_BLOCKS]
    require_range(counts, state.sequences.block_tables.shape[1] + 1, "the size of a table")
    which, entries = ragged(np.zeros(len(used), np.int64), counts)
    rows = used[which]
    blocks = state.sequences.block_tables[rows, entries].astype(np.int64)
    swapped = state.sequences.states[rows, SWAPPED] != 0
    require_range(blocks[~swapped], state.device.num_blocks, "a block in a table")
    require_range(blocks[swapped], state.swap.num_blocks, "a swap block in a table")
    return _Tables(rows, entries, blocks, swapped)


def _end_sequences(state: BlockState, tables: _Tables, lost: dict[int, set[int]]) -> BoolArray:
    """Free the rows of sequences that do not live on. Returns bool[max_sequences]: which ones."""
    states = state.sequences.states
    torn = np.zeros(len(states), np.bool_)
    for swapped, unfinished in (
        (tables.swapped, state.unfinished_swap != 0),
        (~tables.swapped, _unfinished_blocks(state)),
    ):
        torn[tables.rows[swapped][unfinished[tables.blocks[swapped]]]] = True
    owned = np.isin(states[:, NAMESPACE], list(lost)) & (states[:, FLAGS] & SCHEDULED == 0)
    _lose(state, states[owned & torn], lost)
    ended: BoolArray = (states[:, NAMESPACE] != 0) & (torn | ~owned)
    _quarantine_ended(state, tables, ended)
    states[ended, NAMESPACE] = 0
    states[states[:, NAMESPACE] == 0] = 0
    return ended


def _quarantine_dropped(state: BlockState, rows: Int64Array, before: Int64Array) -> None:
    """Do as `_quarantine_ended` for the sequences of the operation in progress. Their client may be in a step that the
    operation opens another one after. Its blocks are not among those that the operation replaces in the tables."""
    rows, before = rows[before[:, SWAPPED] == 0], before[before[:, SWAPPED] == 0]
    first = before[:, NUM_COMPUTED] >> state.shift
    which, entries = ragged(first, np.maximum(before[:, NUM_BLOCKS] - first, 0))
    blocks = state.sequences.block_tables[rows[which], entries].astype(np.int64)
    found = (blocks >= 0) & (blocks < state.device.num_blocks)  # others are of the swap tier
    _quarantine(state, blocks[found], before[which[found], NAMESPACE])


def _quarantine_ended(state: BlockState, tables: _Tables, ended: BoolArray) -> None:
    """Let blocks of sequences that end wait for processes that may still write them: their clients have not asked for
    it, and may be in the middle of a step."""
    writable = np.flatnonzero(ended[tables.rows] & ~tables.swapped)
    states = state.sequences.states[tables.rows[writable]]
    uncomputed = tables.entries[writable] >= states[:, NUM_COMPUTED] >> state.shift
    _quarantine(state, tables.blocks[writable[uncomputed]], states[uncomputed, NAMESPACE])


def _quarantine(state: BlockState, blocks: Int64Array, numbers: Int64Array) -> None:
    """Let blocks int64[n] wait for the processes of the sessions with these namespace numbers int64[n]."""
    for number in state.quarantine.sessions():
        state.quarantine.hold(number, blocks[numbers == number], recovering=True)


def _unfinished_blocks(state: BlockState) -> BoolArray:
    """Return bool[num_blocks]: the device blocks whose bytes may be incomplete."""
    blocks: BoolArray = (state.unfinished_device != 0) | state.unsubmitted
    return blocks


def _derive(state: BlockState, tables: _Tables, ended: BoolArray) -> None:
    """Derive all that is not kept from what is, without the tables of rows that ended."""
    depths = np.zeros(state.device.num_blocks, np.int64)
    gone = ended[tables.rows] & ~tables.swapped
    depths[tables.blocks[gone]] = tables.entries[gone]
    held = ~ended[tables.rows]
    waiting = np.flatnonzero(state.quarantine.held)
    state.device.recover_cache(np.concatenate([tables.blocks[held & ~tables.swapped], waiting]), depths)
    state.swap.recover(tables.blocks[held & tables.swapped])
    state.sequences.recover()


def _namespace(state: BlockState, number: int, counters: MutableSequence[int], lost: set[int]) -> SessionNamespace:
    """Open a namespace with its sequences, in the order of their creation."""
    namespace = state.add_namespace(number, counters)
    namespace.last_step_before_restart = namespace.last_step_id
    rows = np.flatnonzero(state.sequences.states[:, NAMESPACE] == number)
    rows = rows[np.argsort(state.sequences.states[rows, FLAGS])]
    namespace.rows.update(zip(state.sequences.states[rows, SEQUENCE_ID].tolist(), rows.tolist(), strict=True))
    namespace.lost = lost.difference(namespace.rows)
    state.keep_lost(number, namespace.lost)
    return namespace


def _commit_finished(state: BlockState, namespaces: Mapping[int, SessionNamespace]) -> None:
    """Commit the steps that lanes have finished, and that the process before had not committed."""
    steps, num_computed = state.sequences.steps, state.sequences.num_computed
    for number, namespace in namespaces.items():
        finished = state.lane_finished_ids[number - 1]
        if np.count_nonzero(finished):
            rows = np.array(list(namespace.rows.values()), np.int64)
            rows = rows[np.isin(steps[rows], finished[finished != NO_STEP])]
            rows = rows[num_computed[rows] < state.lane_lens[rows]]
            commit_rows(state, rows, state.lane_lens[rows])


def _end_steps(state: BlockState, namespaces: Mapping[int, SessionNamespace], with_steps: bool) -> None:
    """Make all steps stale except those that were saved."""
    live = np.zeros(len(state.sequences.states), np.bool_)
    if with_steps:
        for number, namespace in namespaces.items():
            live[_restore_steps(state, namespace, state.kept.steps.get(number, b"[]"))] = True
    state.sequences.steps[~live] = NO_STEP


def _forget(state: BlockState, open_namespaces: Mapping[int, MutableSequence[int]]) -> None:
    """Remove what only this recovery needed."""
    state.kept.steps.clear()
    for number in [number for number in state.kept.lost if number not in open_namespaces]:
        del state.kept.lost[number]
    for number in state.quarantine.sessions():
        if number not in open_namespaces:
            state.quarantine.forget_writers(number)
    state.lane_finished_ids[:] = NO_STEP
    state.unsubmitted[:] = False
    state.unfinished_device[:] = 0
    state.unfinished_swap[:] = 0


# ---- Live steps of an orderly take-over


def save_steps(state: BlockState) -> int:
    """Save the live steps for the process that takes the state over, as the last operation of this one. Returns how
    many they are. Steps of a scheduler, and steps that follow others, are not saved."""
    num_saved = 0
    for namespace in state.namespaces:
        steps = [_saved_step(entry) for entry in namespace.steps.values() if _can_be_saved(state, entry)]
        num_saved += len(steps)
        state.kept.steps[namespace.number] = pack_steps(steps)
    return num_saved


def _restore_steps(state: BlockState, namespace: SessionNamespace, data: bytes) -> Int64Array:
    """Make the saved steps of a namespace live, if they are the newest of all their sequences. Returns their rows
    int64[n]."""
    rows = [_restore_step(state, namespace, saved) for saved in unpack_steps(data)]
    return np.concatenate(rows) if rows else np.zeros(0, np.int64)


def _can_be_saved(state: BlockState, entry: LiveStep) -> bool:
    """Return whether a step means something without a scheduler and without other steps."""
    alone = not entry.follows and not entry.follower and entry.tokens_known
    return alone and not np.count_nonzero(state.sequences.states[entry.plan.rows, FLAGS] & SCHEDULED)


def _saved_step(entry: LiveStep) -> dict[str, Any]:
    step, appended = entry.plan, entry.num_appended
    return {
        "step_id": step.step_id,
        "sequence_ids": step.sequence_ids.tolist(),
        "query_lens": step.query_lens.tolist(),
        "context_lens": step.context_lens.tolist(),
        "num_appended": appended.tolist() if isinstance(appended, np.ndarray) else appended,
        "written": list(entry.written),
        "sent": list(entry.sent.items()),
        "committed": entry.committed,
    }


def _restore_step(state: BlockState, namespace: SessionNamespace, saved: dict[str, Any]) -> Int64Array:
    """Make a saved step live. Returns its rows, or none if one of its sequences is gone."""
    ids, sequences = saved["sequence_ids"], state.sequences
    rows = np.array([namespace.rows.get(sequence_id, -1) for sequence_id in ids], np.int64)
    if (rows < 0).any() or (sequences.steps[rows] != saved["step_id"]).any():
        return rows[:0]
    query_lens, context_lens = (np.array(saved[name], np.int64) for name in ("query_lens", "context_lens"))
    assert (context_lens <= sequences.states[rows, NUM_BLOCKS] * state.config.block_size).all()
    step = StepPlan(
        step_id=saved["step_id"],
        sequence_ids=np.array(ids, np.int64),
        rows=rows,
        query_lens=query_lens.astype(np.int32),
        context_lens=context_lens.astype(np.int32),
        slot_mapping=sequences.slots(rows, context_lens - query_lens, query_lens),
        copies=NO_COPIES,
        tables=sequences.block_tables,
        block_size=state.config.block_size,
    )
    appended = saved["num_appended"]
    entry = LiveStep(
        step,
        bytearray(saved["written"]),
        np.array(appended, np.int64) if isinstance(appended, list) else appended,
        committed=saved["committed"],
        sent=dict(saved["sent"]),
    )
    namespace.steps[step.step_id] = entry
    return rows
