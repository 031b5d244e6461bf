"""Truncate, free and closing a namespace: operations that give blocks back.

A table names no block any more before the block's reference is dropped. So an exception in the middle, for example
because memory is short, may lose blocks and rows until the next restart, but never gives a block to two sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import check_request_blocks, counts_for, refuse
from kvservice.blocks.plans import NO_STEP, Int64Array
from kvservice.blocks.pool import BlockPool
from kvservice.blocks.slices import SLICE_BLOCKS, Slices, cut_rows, finish
from kvservice.blocks.state import (
    DROP,
    LENGTH,
    NAMESPACE,
    NUM_BLOCKS,
    NUM_COMPUTED,
    RESTORE,
    STATE_COLUMNS,
    SWAPPED,
    BlockState,
    DiskSequence,
    SessionNamespace,
    id_array,
)

# Steps that one slice ends.
_SLICE_STEPS: Final = 1024


def truncate(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike,
    lengths: npt.ArrayLike,
    *,
    unindex: bool = False,
) -> None:
    """Remove tokens at the end, for rejected speculation or a retried step (vLLM v1 and SGLang do the same).

    sequence_ids int64[n], distinct; lengths int64[n], each from 0 to the sequence's length. A sequence of length 0
    continues to exist without blocks. Blocks past the new end are released, including lookahead blocks. A block of
    which only some tokens remain stays in the prefix index until it is written. With `unindex` it leaves the index
    at once, unless others hold or pin it, so that nobody shares it before and the write needs no copy.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    kept = counts_for(lengths, "lengths", len(ids))
    if np.count_nonzero(kept > states[:, LENGTH]):
        refuse("lengths", kept > states[:, LENGTH], "must not be above the sequence's length")
    num_blocks = (kept + state.mask) >> state.shift
    check_request_blocks(state.config, int((states[:, NUM_BLOCKS] - num_blocks).sum()), "sequence_ids")
    entries, blocks = state.sequences.table_entries(rows, num_blocks)
    changed = np.stack((kept, np.minimum(kept, states[:, NUM_COMPUTED]), num_blocks), axis=1)
    num_removed = int((states[:, LENGTH] - kept).sum())
    state.intents.begin(RESTORE, rows)
    state.sequences.end_steps(namespace, rows)
    state.sequences.states[rows, LENGTH : NUM_BLOCKS + 1] = changed
    state.sequences.num_tokens -= num_removed
    state.device.decref_entries(entries, blocks)
    if unindex:
        _unindex_cut_blocks(state, rows, kept)


def _unindex_cut_blocks(state: BlockState, rows: Int64Array, kept: Int64Array) -> None:
    """Remove blocks from the prefix index whose last tokens are removed, except those that others hold or pin."""
    cut = (kept & state.mask) != 0
    blocks = state.sequences.block_tables[rows[cut], kept[cut] >> state.shift].astype(np.int64)
    exclusive = (state.device.ref_count[blocks] == 1) & ~state.device.pinned[blocks]
    state.device.remove_from_index(blocks[exclusive & state.device.indexed[blocks]])


def free(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> None:
    """Free sequences, including swapped-out ones. sequence_ids int64[n], distinct.

    Computed full blocks without references stay cached, and the deepest block of a chain is evicted first; other
    blocks become free.
    """
    finish(free_in_slices(state, namespace, sequence_ids))


def free_in_slices(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Slices[None]:
    """`free` in slices. The ids are free after the first slice, all blocks after the last one."""
    state.enter(namespace)
    if namespace.lost or namespace.on_disk:
        state.require_lost(namespace, len(id_array(sequence_ids, "sequence_ids")))
        sequence_ids = _forget_lost(state, namespace, sequence_ids)
        if not len(sequence_ids):
            return
    ids, rows = namespace.lookup(sequence_ids)
    parts = _cut(state, rows)
    if len(parts) > 1:
        state.require_lost(namespace, len(ids))
    state.intents.begin(DROP, rows)
    state.sequences.end_steps(namespace, rows)
    for sequence_id in ids.tolist():
        namespace.remove(sequence_id)
    if len(parts) == 1:
        _free_rows(state, rows)
        return
    # Other operations end the intent meanwhile. The sequences are lost if a restart comes before the reply.
    state.keep_lost(namespace.number, namespace.lost.union(ids.tolist()))
    state.sequences.states[rows, NAMESPACE] = 0
    state.sequences.ending.update(rows.tolist())
    yield from _free_parts(state, parts)
    state.keep_lost_later(namespace)


def _forget_lost(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Int64Array:
    """Forget those of these sequences that are lost or on the disk. Returns the others."""
    ids = id_array(sequence_ids, "sequence_ids")
    names = ids.tolist()
    gone, on_disk = namespace.lost.intersection(names), namespace.on_disk.keys() & set(names)
    without_row = gone | on_disk
    others = ids[[name not in without_row for name in names]] if without_row else ids
    if len(others):
        namespace.lookup(others)
    if gone:
        state.forget_lost(namespace, gone)
    _forget_on_disk(state, namespace, on_disk)
    return others


def _forget_on_disk(state: BlockState, namespace: SessionNamespace, names: set[int]) -> None:
    """Forget sequences that are on the disk. Until the operation counts, they are lost after a restart, so that a
    client can repeat it."""
    if not names:
        return
    state.keep_lost(namespace.number, namespace.lost | names)
    for name in names:
        del namespace.on_disk[name]
    state.sequences.num_on_disk -= len(names)
    state.keep_lost_later(namespace)


def _cut(state: BlockState, rows: Int64Array) -> list[Int64Array]:
    return [rows] if len(rows) == 1 else cut_rows(rows, state.sequences.num_blocks[rows])


def _free_parts(state: BlockState, parts: list[Int64Array]) -> Slices[None]:
    """Free rows that no sequence id and no step refers to any more, one part in a slice."""
    for part in parts[:-1]:
        _free_rows(state, part)
        yield
    _free_rows(state, parts[-1])


def _free_rows(state: BlockState, rows: Int64Array) -> None:
    state.generation += 1
    if len(rows) == 1:
        _free_row(state, rows.item())
        return
    sequences, free = state.sequences, rows.tolist()
    num_tokens = int(sequences.states[rows, LENGTH].sum())
    resident, gone = rows, rows[:0]
    if sequences.num_swapped:
        swapped = sequences.states[rows, SWAPPED] != 0
        resident, gone = rows[~swapped], rows[swapped]
    tiers: tuple[tuple[BlockPool, Int64Array], ...] = (state.swap, gone), (state.device, resident)
    held = [(pool, *sequences.table_entries(some)) for pool, some in tiers if len(some)]
    sequences.num_tokens -= num_tokens
    sequences.num_swapped -= len(gone)
    sequences.states[rows] = 0
    if sequences.extra_keys.by_row:
        sequences.extra_keys.drop(free)
    if sequences.ending:
        sequences.ending.difference_update(free)
    sequences.free_rows.extend(free)
    for pool, entries, blocks in held:
        pool.decref_entries(entries, blocks)


def _free_row(state: BlockState, row: int) -> None:
    """Do as `_free_rows` for a single row, with few calls of NumPy."""
    sequences = state.sequences
    length, _, num_blocks, _, swapped, *_ = sequences.items[row * STATE_COLUMNS : (row + 1) * STATE_COLUMNS]
    blocks = sequences.block_tables[row, :num_blocks].astype(np.int64)
    sequences.num_tokens -= length
    sequences.num_swapped -= swapped
    sequences.states[row] = 0
    if row in sequences.extra_keys.by_row:
        sequences.extra_keys.drop([row])
    sequences.ending.discard(row)
    sequences.free_rows.append(row)
    (state.swap if swapped else state.device).decref(blocks[::-1])


def close_namespace(state: BlockState, namespace: SessionNamespace) -> int:
    """Free all sequences of a namespace and remove its pins. Returns the number of sequences freed, which is 0 if
    it was already closed."""
    return finish(close_namespace_in_slices(state, namespace))


def close_namespace_in_slices(state: BlockState, namespace: SessionNamespace) -> Slices[int]:
    """`close_namespace` in slices. The namespace is closed after the first slice."""
    if namespace.closed:
        return 0
    namespace.closed = True
    state.generation += 1
    state.namespaces.remove(namespace)
    state.end_operation()
    rows = np.array(list(namespace.rows.values()), np.int64)
    state.sequences.states[rows, NAMESPACE] = 0
    state.sequences.ending.update(rows.tolist())
    state.forget_lost(namespace, list(namespace.lost))
    state.sequences.num_on_disk -= len(namespace.on_disk)
    namespace.on_disk.clear()
    yield from _end_steps(namespace)
    yield from _end_pins(state, namespace)
    if len(rows):
        yield from _free_parts(state, _cut(state, rows))
    return len(rows)


def quarantine_writable(state: BlockState, namespace: SessionNamespace) -> tuple[int, set[int]]:
    """Let the blocks that processes of a session may still write wait for their end, and end the session's steps.
    Called before the session is closed or another client gets it, unless its client has said that it writes no more.

    Such a block has slots of tokens that are not computed, see quarantine.py. If the session goes on, its next step
    that writes there gets a copy. Returns how many blocks wait, and for whom.
    """
    if not state.quarantine.writers(namespace.number):
        state.quarantine.forget_writers(namespace.number)
        return 0, set()
    state.enter(namespace)
    rows = np.array(list(namespace.rows.values()), np.int64)
    namespace.supersede(list(namespace.steps))
    state.sequences.steps[rows] = NO_STEP
    resident = rows[state.sequences.swapped[rows] == 0]
    _, blocks = state.sequences.table_entries(resident, state.sequences.num_computed[resident] >> state.shift)
    held = state.quarantine.hold(namespace.number, blocks)
    state.quarantine.forget_writers(namespace.number)
    return held


def move_to_disk_in_slices(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> Slices[None]:
    """Free sequences that the caller has saved on a disk, and list them in `namespace.on_disk`.

    sequence_ids int64[n], distinct. Operations on them raise SequenceSwappedError then, except `free`, which
    forgets them.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.states[rows]
    moved = zip(ids.tolist(), states[:, LENGTH].tolist(), states[:, NUM_COMPUTED].tolist(), strict=True)
    on_disk = {name: DiskSequence(length, num_computed) for name, length, num_computed in moved}
    state.counters.swapped_out_sequences += len(ids)
    freeing = free_in_slices(state, namespace, ids)
    try:
        next(freeing)
    except StopIteration:
        add_on_disk(state, namespace, on_disk)
        return
    add_on_disk(state, namespace, on_disk)
    yield
    yield from freeing


def add_on_disk(state: BlockState, namespace: SessionNamespace, sequences: Mapping[int, DiskSequence]) -> None:
    """Let a namespace have sequences on a disk that it does not have yet."""
    state.sequences.num_on_disk += len(sequences)
    namespace.on_disk.update(sequences)


def end_steps_in_slices(
    state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike | None = None
) -> Slices[None]:
    """Make the steps of these sequences stale, or all steps of a namespace. Their tokens that are not computed stay
    pending."""
    state.enter(namespace)
    if sequence_ids is not None:
        state.sequences.end_steps(namespace, namespace.lookup(sequence_ids)[1])
        return
    yield from _end_steps(namespace)
    rows = np.array(list(namespace.rows.values()), np.int64)
    state.sequences.steps[rows] = NO_STEP


def _end_steps(namespace: SessionNamespace) -> Slices[None]:
    step_ids = list(namespace.steps)
    for first in range(0, len(step_ids), _SLICE_STEPS):
        if first:
            yield
        namespace.supersede(step_ids[first : first + _SLICE_STEPS])


def _end_pins(state: BlockState, namespace: SessionNamespace) -> Slices[None]:
    left = SLICE_BLOCKS
    while namespace.pins:
        if left <= 0:
            yield
            left = SLICE_BLOCKS
        state.generation += 1
        left -= state.pins.remove(namespace, next(iter(namespace.pins)))
