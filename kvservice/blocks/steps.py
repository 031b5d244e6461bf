"""Steps: append tokens and make the slots that will be written exclusive.

A step covers the next uncomputed tokens of its sequences. Opening a step makes the blocks from the first such token to
the end of the sequence exclusive. A block that is shared or pinned is copied (copy-on-write, as in vLLM's v0 block
manager, but with each copy counted in advance). A block that only this sequence holds leaves the prefix index, because
its content will change. New blocks are added at the end, also for the lookahead. Lookahead blocks are reserved space,
not slots to write, so a fork may share them; a later append that writes there makes them exclusive."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice._ext import distinct_blocks
from kvservice.blocks.arguments import (
    check_request_blocks,
    check_request_tokens,
    check_sequence_lengths,
    counts_for,
    int32_array,
    int64_array,
    refuse,
    whole_number,
)
from kvservice.blocks.plans import BlockCopies, BoolArray, Int32Array, Int64Array, LiveStep, StepPlan
from kvservice.blocks.state import (
    DROP,
    LENGTH,
    NUM_BLOCKS,
    NUM_COMPUTED,
    RESTORE,
    STEP,
    BlockState,
    SessionNamespace,
    ragged,
)
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LengthMismatchError

NO_COPIES = BlockCopies(np.zeros(0, np.int32), np.zeros(0, np.int32))


class WriteBatch(NamedTuple):
    """Sequences that will be written: ids int64[n], rows int64[n], a copy of their states int64[n, 8], and their new
    lengths int64[n]."""

    ids: Int64Array
    rows: Int64Array
    states: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, slots=True)
class _CopyOnWrite:
    """Blocks to copy: row, table entry and block id, int64[c] each. `computed` bool[c] says which of them hold computed
    tokens of their sequence. `unindexed` int64[u] are blocks that are not copied but leave the prefix index."""

    rows: Int64Array
    entries: Int64Array
    src: Int64Array
    computed: BoolArray
    unindexed: Int64Array


@dataclass(frozen=True, slots=True)
class Growth:
    """Blocks that a batch needs: `grown` int64[n] new blocks at the end of each table, and copies of shared blocks."""

    grown: Int64Array
    num_grown: int
    copies: _CopyOnWrite | None

    @property
    def num_new(self) -> int:
        return self.num_grown + self.num_copied

    @property
    def num_copied(self) -> int:
        return len(self.copies.src) if self.copies else 0


class Grown(NamedTuple):
    """A growth that was applied; `start_step` ends it. While shared blocks are replaced, the sequences are hidden (see
    BlockState.hide): `listed` are all sequences of the namespace then."""

    copies: BlockCopies
    listed: dict[int, int] | None = None


WITHOUT_COPIES = Grown(NO_COPIES)


class DecodeGrowth(NamedTuple):
    """Plan for a batch where each sequence gets one token, has no other pending tokens, and owns the block to write.

    `lengths` int64[n] and `context_lens` int32[n] are the lengths afterwards, `slots` int64[n] the slots of the tokens.
    `fresh` int64[f] are the sequences whose block is still to be allocated, and whose slot is only the offset in it;
    None if there are none.
    """

    lengths: Int64Array
    context_lens: Int32Array
    slots: Int64Array
    fresh: Int64Array | None


def can_append(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike,
    num_tokens: npt.ArrayLike | None = None,
    lookahead: int = 0,
) -> bool:
    """Return whether enough blocks are available for `append`. The answer is exact: an append with the same
    arguments does not run out of blocks.

    Unlike allocate, append may use the blocks below the watermark, which exists for running sequences.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    if num_tokens is None and lookahead == 0:
        decode = plan_decode(state, rows, state.ones[: len(rows)])
        if decode is not None:
            return decode.fresh is None or len(decode.fresh) <= state.device.num_available
    counts: Int64Array | int = 1 if num_tokens is None else _append_counts(state, num_tokens, len(ids))
    states = state.sequences.resident_states(ids, rows)
    batch = WriteBatch(ids, rows, states, states[:, LENGTH] + counts)
    check_request_tokens(state.config, int((batch.lengths - states[:, NUM_COMPUTED]).sum()), "sequence_ids")
    return plan_growth(state, batch, lookahead).num_new <= state.device.num_available


def append(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike,
    token_ids: npt.ArrayLike,
    num_tokens: npt.ArrayLike | None = None,
    expected_lengths: npt.ArrayLike | None = None,
    lookahead: int = 0,
) -> StepPlan:
    """Append tokens and open a step over all uncomputed tokens (vLLM v0: append_slots).

    sequence_ids int64[n], distinct; token_ids int32[sum(num_tokens)], sequence after sequence; num_tokens int64[n],
    each >= 1, one each if None; expected_lengths int64[n], the lengths before the append. If the lengths show that
    this very append was the last operation, the same step is returned again, without its copies (which were already
    made), so a retry is safe. Raises LengthMismatchError, OutOfBlocksError.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    if num_tokens is None and lookahead == 0:
        decode = plan_decode(state, rows, token_ids, expected_lengths)
        if decode is not None:
            append_decode(state, rows, decode, token_ids)
            state.sequences.num_tokens += len(ids)
            ones = state.ones[: len(ids)]
            return start_step(state, namespace, ids, rows, decode.lengths, ones, decode.context_lens, decode.slots, 1)
    states = state.sequences.resident_states(ids, rows)
    tokens = int32_array(token_ids, "token_ids")
    counts: Int64Array | int = 1 if num_tokens is None else _append_counts(state, num_tokens, len(ids))
    expected_tokens = counts * len(ids) if isinstance(counts, int) else int(counts.sum())
    if expected_tokens != len(tokens):
        raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {expected_tokens}", field="token_ids")
    if expected_lengths is not None:
        expected = _expected_of(expected_lengths, len(ids))
        if np.count_nonzero(states[:, LENGTH] != expected):
            return _repeated_append(state, namespace, WriteBatch(ids, rows, states, expected), tokens, counts)
    batch = WriteBatch(ids, rows, states, states[:, LENGTH] + counts)
    query_lens = batch.lengths - states[:, NUM_COMPUTED]
    check_request_tokens(state.config, int(np.add.reduce(query_lens)), "sequence_ids")
    growth = plan_growth(state, batch, lookahead)
    state.device.require_available(growth.num_new)

    grown = apply_growth(state, namespace, batch, growth)
    slots = state.sequences.slots(batch.rows, states[:, NUM_COMPUTED], query_lens)
    if len(slots) == len(tokens):  # no tokens were pending before
        state.device.tokens_by_slot[slots] = tokens
    else:
        appended = np.broadcast_to(np.asarray(counts), len(ids))
        state.device.tokens_by_slot[state.sequences.slots(batch.rows, states[:, LENGTH], appended)] = tokens
    state.sequences.num_tokens += len(tokens)
    return start_step(
        state, namespace, ids, rows, batch.lengths, query_lens.astype(np.int32), batch.lengths.astype(np.int32), slots,
        counts, grown=grown,
    )  # fmt: skip


def append_decode(state: BlockState, rows: Int64Array, plan: DecodeGrowth, tokens: npt.ArrayLike) -> None:
    """Store the tokens int32[n] of a decode step: no tokens were pending, and no block needs a copy. The slots of the
    plan are complete then."""
    blocks = None
    if plan.fresh is not None:
        state.device.require_available(len(plan.fresh))
    state.intents.begin(RESTORE, rows)
    if plan.fresh is not None:
        blocks = state.device.allocate(len(plan.fresh))
    state.step_tables.append(rows, plan.slots, tokens, plan.fresh, blocks)


def open_step(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike,
    num_tokens: npt.ArrayLike | None = None,
    lookahead: int = 0,
) -> StepPlan:
    """Open a step over existing tokens that are not computed: a prefill, or one chunk of it with num_tokens.

    num_tokens int64[n], each from 1 to the sequence's pending tokens; None means all pending tokens. Raises the
    errors of append, and FailedPreconditionError if a sequence has no pending tokens.
    """
    state.enter(namespace)
    batch = _pending(state, namespace, sequence_ids)
    pending = batch.lengths - batch.states[:, NUM_COMPUTED]
    query_lens = pending
    if num_tokens is not None:
        query_lens = check_query_lens(num_tokens, pending)
    check_request_tokens(state.config, int(np.add.reduce(query_lens)), "sequence_ids")
    growth = plan_growth(state, batch, lookahead)
    state.device.require_available(growth.num_new)

    grown = apply_growth(state, namespace, batch, growth)
    slots = state.sequences.slots(batch.rows, batch.states[:, NUM_COMPUTED], query_lens)
    context_lens = (batch.states[:, NUM_COMPUTED] + query_lens).astype(np.int32)
    return start_step(
        state, namespace, batch.ids, batch.rows, batch.lengths, query_lens.astype(np.int32), context_lens, slots,
        grown=grown,
    )  # fmt: skip


def _append_counts(state: BlockState, num_tokens: npt.ArrayLike, batch: int) -> Int64Array:
    """Return how many tokens each sequence of a batch gets. Raises InvalidArgumentError."""
    counts = counts_for(num_tokens, "num_tokens", batch)
    if np.minimum.reduce(counts) < 1:
        refuse("num_tokens", counts < 1, "must be at least 1")
    if np.maximum.reduce(counts) > state.config.max_sequence_tokens:
        limit = state.config.max_sequence_tokens
        refuse("num_tokens", counts > limit, f"must be at most max_sequence_tokens = {limit}")
    return counts


def _pending(state: BlockState, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> WriteBatch:
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    done = states[:, NUM_COMPUTED] == states[:, LENGTH]
    if np.count_nonzero(done):
        i = int(done.argmax())
        raise FailedPreconditionError(
            f"all tokens of sequence {ids[i]} are computed", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
        )
    return WriteBatch(ids, rows, states, states[:, LENGTH])


def _repeated_append(
    state: BlockState, namespace: SessionNamespace, batch: WriteBatch, tokens: Int32Array, counts: Int64Array | int
) -> StepPlan:
    """Return the step of this append if it was the last operation on its sequences. Raises LengthMismatchError
    otherwise."""
    expected, lengths = batch.lengths, batch.states[:, LENGTH]
    entry = namespace.steps.get(int(batch.states[0, STEP]))
    if (
        entry is not None
        and entry.num_appended is not None
        and np.array_equal(entry.plan.sequence_ids, batch.ids)
        and bool(np.all(entry.num_appended == counts))
        and np.array_equal(lengths, expected + counts)
    ):
        appended = np.broadcast_to(np.asarray(counts), len(batch.ids))
        slots = state.sequences.slots(batch.rows, expected, appended)
        if np.array_equal(state.device.tokens_by_slot[slots], tokens):
            return dataclasses.replace(entry.plan, copies=NO_COPIES)
    raise _mismatch(batch.ids, lengths, expected)


def start_step(
    state: BlockState,
    namespace: SessionNamespace,
    ids: Int64Array,
    rows: Int64Array,
    lengths: Int64Array,
    query_lens: Int32Array,
    context_lens: Int32Array,
    slots: Int64Array,
    appended: Int64Array | int | None = None,
    *,
    grown: Grown = WITHOUT_COPIES,
    followed: LiveStep | None = None,
) -> StepPlan:
    """Open a step over sequences that have their blocks, and get these lengths int64[n]. It replaces their steps,
    except the one that it follows, but also the step before that one, which is complete: two live steps share sequences
    at most."""
    step_id = namespace.next_step_id()
    replaced = state.step_tables.start(rows, lengths, step_id)
    if followed is not None:
        replaced = [number for number in replaced if number != followed.plan.step_id]
        replaced.append(followed.follows)
    namespace.supersede(replaced)
    tables, config = state.sequences.block_tables, state.config
    step = StepPlan(step_id, ids, rows, query_lens, context_lens, slots, grown.copies, tables, config.block_size)
    entry = LiveStep(step, bytearray(config.num_layers), appended)
    namespace.steps[step_id] = entry
    if followed is not None:
        entry.follows, followed.follower = followed.plan.step_id, step_id
    if grown.listed is not None:
        state.show(namespace, grown.listed, rows)
    return step


def reopen(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike,
    starts: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    lookahead: int = 0,
) -> StepPlan:
    """Open a step over tokens that may be computed already, for an engine that lost what it computed.

    sequence_ids int64[n], distinct; starts int64[n], the first token of the step in each sequence, at most its
    number of computed tokens; num_tokens int64[n], at least 1. Tokens from the start on are not computed any more,
    and their blocks leave the prefix index or are copied. Raises OutOfBlocksError.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    first = counts_for(starts, "starts", len(ids))
    if np.count_nonzero(first > states[:, NUM_COMPUTED]):
        refuse("starts", first > states[:, NUM_COMPUTED], "must not be above the sequence's computed tokens")
    states[:, NUM_COMPUTED] = first
    query_lens = check_query_lens(num_tokens, states[:, LENGTH] - first)
    check_request_tokens(state.config, int(query_lens.sum()), "sequence_ids")
    batch = WriteBatch(ids, rows, states, states[:, LENGTH])
    growth = plan_growth(state, batch, lookahead)
    state.device.require_available(growth.num_new)

    grown = apply_growth(state, namespace, batch, growth, reopened=True)
    slots = state.sequences.slots(rows, first, query_lens)
    context_lens = (first + query_lens).astype(np.int32)
    return start_step(
        state, namespace, ids, rows, batch.lengths, query_lens.astype(np.int32), context_lens, slots, grown=grown
    )


def check_query_lens(num_tokens: npt.ArrayLike, pending: Int64Array) -> Int64Array:
    """Return how many of its pending tokens each sequence computes. Raises InvalidArgumentError naming num_tokens."""
    query_lens = counts_for(num_tokens, "num_tokens", len(pending))
    outside = (query_lens < 1) | (query_lens > pending)
    if np.count_nonzero(outside):
        refuse("num_tokens", outside, "must be from 1 to the tokens that are not computed")
    return query_lens


def check_expected_lengths(ids: Int64Array, lengths: Int64Array, expected_lengths: npt.ArrayLike) -> None:
    """Raise LengthMismatchError unless the sequences have these lengths."""
    expected = _expected_of(expected_lengths, len(ids))
    if np.count_nonzero(lengths != expected):
        raise _mismatch(ids, lengths, expected)


def _expected_of(expected_lengths: npt.ArrayLike, count: int) -> Int64Array:
    expected = int64_array(expected_lengths, "expected_lengths")
    if len(expected) != count:
        raise InvalidArgumentError(f"has {len(expected)} elements for {count} sequences", field="expected_lengths")
    if np.count_nonzero(expected < 0):
        refuse("expected_lengths", expected < 0, "must not be negative")
    return expected


def _mismatch(ids: Int64Array, lengths: Int64Array, expected: Int64Array) -> LengthMismatchError:
    i = int((lengths != expected).argmax())
    return LengthMismatchError(
        f"sequence {ids[i]} has {lengths[i]} tokens, not {expected[i]}", field=f"expected_lengths[{i}]",
        sequence_id=int(ids[i]), length=int(lengths[i]), expected_length=int(expected[i]),
    )  # fmt: skip


# ---- Growth: new blocks at the end of tables, and copies of shared blocks. Planning counts every block before anything
# changes; applying a plan cannot fail.


def plan_decode(
    state: BlockState,
    rows: Int64Array,
    tokens: npt.ArrayLike,
    expected_lengths: npt.ArrayLike | None = None,
    states: Int64Array | None = None,
) -> DecodeGrowth | None:
    """Return the plan for a decode step, the most frequent case, or None if the batch needs the general plan, or has an
    argument that is wrong. `states` int64[n, 8] replaces the states of the rows."""
    planned = state.step_tables.plan_decode(rows, tokens, expected_lengths, states)
    return None if planned is None else DecodeGrowth(*planned)


def plan_growth(state: BlockState, batch: WriteBatch, lookahead: Int64Array | int) -> Growth:
    """Count every block that the batch will allocate, before anything changes. `lookahead` is one number, or a
    valid number for each sequence int64[n]."""
    if not isinstance(lookahead, np.ndarray) and lookahead != 0:
        lookahead = whole_number(lookahead, "lookahead", 0, state.config.max_sequence_tokens)
    check_sequence_lengths(state.config, batch.lengths, lookahead)
    held = batch.states[:, NUM_BLOCKS]
    grown = np.maximum(((batch.lengths + (lookahead + state.mask)) >> state.shift) - held, 0)
    first = batch.states[:, NUM_COMPUTED] >> state.shift
    written = (batch.lengths + state.mask) >> state.shift
    pending = np.minimum(written, held) - first
    num_grown = int(np.add.reduce(grown))
    check_request_blocks(state.config, int(np.add.reduce(pending)) + num_grown, "sequence_ids")
    shared = state.sequences.shared_entries(batch.rows, first, pending, state.device.ref_count, state.device.indexed)
    if not len(shared):
        return Growth(grown, num_grown, None)
    which, entries = (numbers[shared] for numbers in ragged(first, pending))
    blocks = state.sequences.block_tables[batch.rows[which], entries].astype(np.int64)
    copied, unindexed = _plan_copies(state, blocks)
    which, entries = which[copied], entries[copied]
    computed = (entries << state.shift) < batch.states[which, NUM_COMPUTED]
    copies = _CopyOnWrite(batch.rows[which], entries, blocks[copied], computed, unindexed)
    return Growth(grown, num_grown, copies)


def _plan_copies(state: BlockState, blocks: Int64Array) -> tuple[BoolArray, Int64Array]:
    """Plan copy-on-write for `blocks` int64[n], which are shared or indexed and will be written.

    Returns (bool[n], which of them are copied; int64[m], blocks that leave the prefix index). If all holders of a
    block write to it, the last of them keeps the block, unless the block is pinned.
    """
    distinct, inverse, writers = distinct_blocks(blocks)
    kept = (writers == state.device.ref_count[distinct]) & ~state.device.pinned[distinct]
    last = np.zeros(len(distinct), np.int64)
    last[inverse] = np.arange(len(blocks))
    copied = np.ones(len(blocks), np.bool_)
    copied[last[kept]] = False
    return copied, distinct[kept & state.device.indexed[distinct]]


def apply_growth(
    state: BlockState, namespace: SessionNamespace, batch: WriteBatch, growth: Growth, *, reopened: bool = False
) -> Grown:
    """Apply a growth that is known to fit. Where blocks are replaced with copies, the tables change: `start_step` ends
    that. `reopened`: the numbers of computed tokens become those of the batch, before a computed block is replaced."""
    state.intents.begin(DROP if growth.num_copied else RESTORE, batch.rows)
    listed = state.hide(namespace, batch.ids, batch.rows) if growth.num_copied else None
    if reopened:
        state.sequences.num_computed[batch.rows] = batch.states[:, NUM_COMPUTED]
    new = state.device.allocate(growth.num_new) if growth.num_new else np.zeros(0, np.int64)
    if growth.num_grown:
        state.sequences.append_blocks(batch.rows, batch.states[:, NUM_BLOCKS], growth.grown, new[: growth.num_grown])
    if growth.copies is None:
        return WITHOUT_COPIES
    return Grown(_replace_copied(state, growth.copies, new[growth.num_grown :]), listed)


def _replace_copied(state: BlockState, copies: _CopyOnWrite, dst: Int64Array) -> BlockCopies:
    """Replace the blocks to be copied with the new blocks `dst`."""
    device, src = state.device, copies.src
    device.remove_from_index(copies.unindexed)
    device.token_ids[dst] = device.token_ids[src]
    state.sequences.block_tables[copies.rows, copies.entries] = dst
    device.decref(src)
    state.counters.cow_copies += len(src)
    made = copies.computed
    return BlockCopies(src[made].astype(np.int32), dst[made].astype(np.int32))
