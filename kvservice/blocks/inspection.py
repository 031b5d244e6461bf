"""Read-only operations: slots of tokens to read back, descriptions of sequences, shared blocks, statistics."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import check_request_blocks, check_request_tokens
from kvservice.blocks.plans import BlocksStats, BoolArray, Int64Array, SequenceSnapshot
from kvservice.blocks.slices import Slices, finish, in_turn
from kvservice.blocks.state import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED, BlockState, SessionNamespace
from kvservice.errors import InvalidArgumentError, KVServiceError, NotComputedError, UnknownSequenceError


def read_slots(state: BlockState, namespace: SessionNamespace, ranges: Sequence[tuple[int, int, int]]) -> Int64Array:
    """Return the slots int64[m] of the token positions start <= position < stop of each (sequence id, start, stop)
    range, in order. A sequence may appear more than once.

    Raises NotComputedError if one of the tokens is not computed. Fields are named as in ranges[0].stop.
    """
    state.enter(namespace)
    if not ranges:
        raise InvalidArgumentError("must not be empty", field="ranges")
    names = [sequence_id for sequence_id, _, _ in ranges]
    rows = _range_rows(state, namespace, names)
    length, computed = state.sequences.lengths[rows], state.sequences.num_computed[rows]
    starts, stops = (np.array([token_range[i] for token_range in ranges], np.int64) for i in (1, 2))
    _refuse_range((stops < 0) | (stops > length), "stop", "must be from 0 to the sequence's length")
    _refuse_range((starts < 0) | (starts > stops), "start", "must be from 0 to stop")
    if np.count_nonzero(stops > computed):
        i = int((stops > computed).argmax())
        raise NotComputedError(
            f"only {computed[i]} tokens of sequence {names[i]} are computed", field=f"ranges[{i}].stop",
            sequence_id=names[i], num_computed=int(computed[i]),
        )  # fmt: skip
    return state.sequences.slots(rows, starts, stops - starts)


def _range_rows(state: BlockState, namespace: SessionNamespace, names: list[int]) -> Int64Array:
    try:
        rows = np.array([namespace.rows[name] for name in names], np.int64)
        state.sequences.resident_states(np.array(names, np.int64), rows, "ranges")
    except KeyError:
        error = namespace.unknown_sequence(names, "ranges")
    except KVServiceError as swapped:
        error = swapped
    else:
        return rows
    error.field += ".sequence_id"
    raise error


def describe(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike | None = None,
    *,
    first: int = 0,
    limit: int | None = None,
    include_tokens: bool = False,
    include_blocks: bool = False,
) -> list[SequenceSnapshot]:
    """Describe sequences in the requested order. Without ids it describes the sequences of the namespace in the
    order of their creation, at most `limit` of them from index `first` on. Swapped-out sequences are included."""
    return finish(
        describe_in_slices(
            state,
            namespace,
            sequence_ids,
            first=first,
            limit=limit,
            include_tokens=include_tokens,
            include_blocks=include_blocks,
        )
    )


def describe_in_slices(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike | None = None,
    *,
    first: int = 0,
    limit: int | None = None,
    include_tokens: bool = False,
    include_blocks: bool = False,
) -> Slices[list[SequenceSnapshot]]:
    """`describe` in slices. The first slice selects the sequences; each is described as of its own slice. Raises
    UnknownSequenceError if one is freed in the meantime."""
    state.enter(namespace)
    if sequence_ids is None:
        rest = itertools.islice(namespace.rows.items(), min(first, len(namespace.rows)), None)
        named = dict(itertools.islice(rest, limit))
    else:
        ids, rows = namespace.lookup(sequence_ids)
        named = dict(zip(ids.tolist(), rows.tolist(), strict=True))
    described = list(named.values())
    if include_tokens:
        check_request_tokens(state.config, int(state.sequences.lengths[described].sum()), "sequence_ids")
    if include_blocks:
        check_request_blocks(state.config, int(state.sequences.num_blocks[described].sum()), "sequence_ids")
    return (yield from in_turn(_describe(state, namespace, name, include_tokens, include_blocks) for name in named))


def _describe(
    state: BlockState, namespace: SessionNamespace, sequence_id: int, include_tokens: bool, include_blocks: bool
) -> SequenceSnapshot:
    row = None if namespace.closed else namespace.rows.get(sequence_id)
    if row is None:
        raise UnknownSequenceError(
            f"sequence {sequence_id} was freed meanwhile", field="sequence_ids", sequence_id=sequence_id
        )
    states = state.sequences.states[row].tolist()
    blocks = state.sequences.block_tables[row, : states[NUM_BLOCKS]]
    pool = state.swap if states[SWAPPED] else state.device
    return SequenceSnapshot(
        sequence_id,
        length=states[LENGTH],
        num_computed=states[NUM_COMPUTED],
        num_blocks=states[NUM_BLOCKS],
        swapped=bool(states[SWAPPED]),
        token_ids=pool.token_ids[blocks].reshape(-1)[: states[LENGTH]] if include_tokens else None,
        block_ids=blocks.copy() if include_blocks else None,
    )


def tail_blocks(
    state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike
) -> tuple[Int64Array, Int64Array]:
    """Return the blocks int64[n] to which the next tokens of sequences are written, and how many tables hold each
    of them, int64[n]. Where the block is still to be allocated, both are 0. A block that several tables hold is
    copied before it is written."""
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    entries = states[:, LENGTH] >> state.shift
    there = entries < states[:, NUM_BLOCKS]
    blocks = np.zeros(len(ids), np.int64)
    blocks[there] = state.sequences.block_tables[rows[there], entries[there]]
    holders = state.device.ref_count[blocks] + state.device.pinned[blocks]
    return blocks, np.where(there, holders, 0).astype(np.int64)


def common_prefix_blocks(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> int:
    """Return how many leading blocks all these sequences share, so that attention can read them once (cascade).
    Only blocks that are full and computed in every sequence count."""
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    width = int(((states[:, NUM_COMPUTED]) >> state.shift).min())
    first = state.sequences.block_tables[rows[0]]
    for row in rows[1:].tolist():
        differs = state.sequences.block_tables[row, :width] != first[:width]
        if np.count_nonzero(differs):
            width = int(differs.argmax())
    return width


def block_hash(state: BlockState, block_id: int) -> bytes:
    """Return the chain hash of a block in the prefix index, or b"" for other blocks and for invalid block ids."""
    device = state.device
    if 0 <= block_id < device.num_blocks and device.indexed[block_id]:
        return device.hashes[block_id] or b""
    return b""


def stats(state: BlockState) -> BlocksStats:
    """Return all gauges and counters, in O(1)."""
    device, swap, sequences = state.device, state.swap, state.sequences
    return dataclasses.replace(
        state.counters,
        num_blocks=device.num_blocks,
        free_blocks=device.num_free,
        active_blocks=device.num_active - device.num_shared + device.num_loading,
        shared_blocks=device.num_shared,
        cached_blocks=device.num_cached,
        pinned_blocks=device.num_pinned_cached,
        quarantined_blocks=state.quarantine.num_blocks,
        num_swap_blocks=swap.num_blocks,
        used_swap_blocks=swap.num_active,
        sequences=state.config.max_sequences - len(sequences.free_rows),
        swapped_sequences=sequences.num_swapped,
        tokens=sequences.num_tokens,
        evicted_blocks=device.num_evicted,
    )


def _refuse_range(bad: BoolArray, name: str, message: str) -> None:
    if np.count_nonzero(bad):
        raise InvalidArgumentError(message, field=f"ranges[{int(bad.argmax())}].{name}")
