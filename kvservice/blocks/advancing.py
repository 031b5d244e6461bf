"""Steps that do not wait for the step before: batches that mix decodes and chunks of prompts, steps that follow another
one, and steps ahead.

A step that follows another one begins where that step ends. The next token of a decode is then not known yet, because
the followed step samples it: its slot is reserved, but it is no token of its sequence before `set_tokens`.

A step ahead is one that a client takes before its tokens are known here. It has slots for the next `num_steps` tokens
of each sequence, which are no tokens of the sequences yet. The client writes their K/V by itself. When it commits, the
tokens that it has written become computed tokens, and another step ahead, with slots after them, replaces this one. So
nobody waits for the bookkeeping between two tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import check_request_tokens, counts_for, int32_array, refuse, whole_number
from kvservice.blocks.layers import commit_rows
from kvservice.blocks.plans import Int32Array, Int64Array, LiveStep, StepPlan
from kvservice.blocks.state import (
    COMPUTED_TOKENS,
    LENGTH,
    NUM_COMPUTED,
    RESTORE,
    STEP,
    BlockState,
    SessionNamespace,
)
from kvservice.blocks.steps import (
    WITHOUT_COPIES,
    Grown,
    WriteBatch,
    append_decode,
    apply_growth,
    check_expected_lengths,
    check_query_lens,
    plan_decode,
    plan_growth,
    start_step,
)
from kvservice.errors import FailedPreconditionError, InvalidArgumentError

_NO_TOKENS = np.zeros(0, np.int32)


class _Advance(NamedTuple):
    """A batch to advance. The first m sequences get counts int64[m] of the `tokens` int32[sum(counts)], and all of them
    compute query_lens int64[n] tokens. `followed` is the step that this one follows, if they share sequences, and
    `unknown` int64[u] are the sequences whose token it samples."""

    batch: WriteBatch
    tokens: Int32Array
    counts: Int64Array
    query_lens: Int64Array
    followed: LiveStep | None
    unknown: Int64Array | None


def advance(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike,
    token_ids: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    lookahead: int = 0,
    *,
    num_appended: npt.ArrayLike | None = None,
    follows: int | None = None,
) -> StepPlan:
    """Append tokens to the first sequences, and open one step over them and over chunks of prompts.

    sequence_ids int64[n], distinct; token_ids int32[t] for the first m <= n sequences: num_appended int64[m] each,
    or one each if None; num_tokens int64[n], the tokens of the step in each sequence, from 1 to its pending tokens,
    the appended ones included. `lookahead` slots are reserved past the first appended token of a sequence, so that
    other appended tokens use them. It is `append` and `open_step` in one, for batches that mix decodes and chunked
    prefills. Unlike `append`, it cannot be repeated.

    `follows` is a live step, which may be incomplete and stays live. In the sequences that it covers, the new step
    begins where that step ends. Where one of them gets a token, that token is the one sampled after the followed
    step: the value in token_ids is ignored, and the token becomes a token of its sequence with `set_tokens`. Until
    the followed step is complete and the tokens are known, the new step does not commit. Any other operation on a
    sequence of one of the two steps ends both, unless the sequence is only in the followed step and that step is
    complete.

    Raises OutOfBlocksError, and for `follows` UnknownStepError, StaleStepError, and FailedPreconditionError if that
    step has a follower, if its tokens are not known, if it follows an incomplete step itself, or if it does not
    cover all tokens of a sequence that gets a token.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    tokens, counts = _appended(state, token_ids, num_appended, len(ids))
    lengths = states[:, LENGTH].copy()
    lengths[: len(counts)] += counts
    batch = WriteBatch(ids, rows, states, lengths)
    followed, unknown = None, None
    if follows is not None:
        followed = _followed(namespace, follows)
        covered = _begin_after(state, followed, batch)
        unknown = _sampled(followed, batch, covered, counts)
        if not len(covered):
            followed = None
    query_lens = check_query_lens(num_tokens, lengths - states[:, NUM_COMPUTED])
    check_request_tokens(state.config, int(np.add.reduce(query_lens)), "sequence_ids")
    plan = _Advance(batch, tokens, counts, query_lens, followed, unknown)
    if num_appended is None and lookahead == 0 and len(tokens) == len(ids):
        decode = plan_decode(state, rows, tokens, states=states)
        if decode is not None:
            append_decode(state, rows, decode, tokens)
            return _start(state, namespace, plan, decode.slots, WITHOUT_COPIES)
    return _advance(state, namespace, plan, lookahead)


def _advance(state: BlockState, namespace: SessionNamespace, plan: _Advance, lookahead: int) -> StepPlan:
    """Advance a batch for which no fast path exists."""
    _, rows, states, _ = plan.batch
    needed = plan_growth(state, plan.batch, _reserved(state, plan, lookahead))
    state.device.require_available(needed.num_new)
    grown = apply_growth(state, namespace, plan.batch, needed)
    num_decodes = len(plan.counts)
    if num_decodes:
        slots = state.sequences.slots(rows[:num_decodes], states[:num_decodes, LENGTH], plan.counts)
        state.device.tokens_by_slot[slots] = plan.tokens
    slots = state.sequences.slots(rows, states[:, NUM_COMPUTED], plan.query_lens)
    return _start(state, namespace, plan, slots, grown)


def _start(state: BlockState, namespace: SessionNamespace, plan: _Advance, slots: Int64Array, grown: Grown) -> StepPlan:
    """Open the step. Tokens that are not known do not count in the lengths of their sequences."""
    batch, unknown, lengths = plan.batch, plan.unknown, plan.batch.lengths
    state.sequences.num_tokens += len(plan.tokens)
    if unknown is not None:
        lengths = lengths.copy()
        lengths[unknown] -= 1
        state.sequences.num_tokens -= len(unknown)
    context_lens = (batch.states[:, NUM_COMPUTED] + plan.query_lens).astype(np.int32)
    query_lens = plan.query_lens.astype(np.int32)
    step = start_step(
        state, namespace, batch.ids, batch.rows, lengths, query_lens, context_lens, slots,
        grown=grown, followed=plan.followed,
    )  # fmt: skip
    if unknown is not None:
        namespace.steps[step.step_id].unknown = unknown
    return step


def _appended(
    state: BlockState, token_ids: npt.ArrayLike, num_appended: npt.ArrayLike | None, num_sequences: int
) -> tuple[Int32Array, Int64Array]:
    """Return the new tokens int32[t], and how many each of the first sequences gets: int64[m]."""
    tokens = int32_array(token_ids, "token_ids") if np.size(token_ids) else _NO_TOKENS
    if num_appended is None:
        if len(tokens) > num_sequences:
            raise InvalidArgumentError(f"has {len(tokens)} tokens for {num_sequences} sequences", field="token_ids")
        return tokens, np.ones(len(tokens), np.int64)
    num_decodes = np.size(num_appended)
    if num_decodes > num_sequences:
        raise InvalidArgumentError(f"has {num_decodes} elements for {num_sequences} sequences", field="num_appended")
    counts = counts_for(num_appended, "num_appended", num_decodes)
    outside = (counts < 1) | (counts > state.config.max_sequence_tokens)
    if np.count_nonzero(outside):
        limit = state.config.max_sequence_tokens
        refuse("num_appended", outside, f"must be from 1 to max_sequence_tokens = {limit}")
    if int(counts.sum()) != len(tokens):
        raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {counts.sum()}", field="token_ids")
    return tokens, counts


def _followed(namespace: SessionNamespace, step_id: int) -> LiveStep:
    """Return the live step that a new step may follow."""
    step = namespace.live_step(step_id, "follows")
    if step.follower:
        raise FailedPreconditionError(
            f"step {step.follower} follows step {step_id} already", field="follows", step_id=step_id
        )
    if not step.tokens_known:
        raise FailedPreconditionError(f"the tokens of step {step_id} are not known", field="follows", step_id=step_id)
    if step.follows and not namespace.steps[step.follows].committed:
        raise FailedPreconditionError(
            f"step {step_id} follows step {step.follows}, which is not complete", field="follows", step_id=step_id
        )
    return step


def _begin_after(state: BlockState, followed: LiveStep, batch: WriteBatch) -> Int64Array:
    """Move the starts in `batch.states` of the sequences that the followed step covers. Returns their indices."""
    covered = np.flatnonzero(batch.states[:, STEP] == followed.plan.step_id)
    state.followed_lens[followed.plan.rows] = followed.plan.context_lens
    batch.states[covered, NUM_COMPUTED] = state.followed_lens[batch.rows[covered]]
    return covered


def _reserved(state: BlockState, plan: _Advance, lookahead: int) -> Int64Array | int:
    """Return the slots to reserve past the tokens of each sequence: of `lookahead` slots past the next token, those
    that the other new tokens do not use."""
    lookahead = whole_number(lookahead, "lookahead", 0, state.config.max_sequence_tokens)
    if not lookahead or len(plan.counts) == len(plan.tokens):
        return lookahead
    reserved = np.full(len(plan.batch.ids), lookahead, np.int64)
    reserved[: len(plan.counts)] = np.maximum(lookahead - (plan.counts - 1), 0)
    return reserved


def _sampled(followed: LiveStep, batch: WriteBatch, covered: Int64Array, counts: Int64Array) -> Int64Array | None:
    """Return the indices of the sequences whose new token the followed step samples, or None if there are none."""
    sampled = covered[: int(np.searchsorted(covered, len(counts)))]
    if not len(sampled):
        return None
    more = counts[sampled] != 1
    if np.count_nonzero(more):
        i = int(sampled[more.argmax()])
        raise InvalidArgumentError("must be 1, because one token is sampled", field=f"num_appended[{i}]")
    rest = batch.states[sampled, LENGTH] != batch.states[sampled, NUM_COMPUTED]
    if np.count_nonzero(rest):
        i = int(sampled[rest.argmax()])
        raise FailedPreconditionError(
            f"step {followed.plan.step_id} does not cover all tokens of sequence {batch.ids[i]}",
            field=f"sequence_ids[{i}]", sequence_id=int(batch.ids[i]),
        )  # fmt: skip
    return sampled


# ---- Steps ahead


def open_ahead(
    state: BlockState,
    namespace: SessionNamespace,
    sequence_ids: npt.ArrayLike,
    num_steps: int,
    expected_lengths: npt.ArrayLike | None = None,
) -> StepPlan:
    """Open a step over the next `num_steps` tokens of sequences, which are not known yet (vLLM v0: multi-step
    scheduling with lookahead slots).

    sequence_ids int64[n], distinct, all of whose tokens are computed; expected_lengths int64[n], the lengths that
    the client knows, which say where it writes. The step has no layers to write: its client writes the K/V, and
    tells the tokens with `commit_ahead`. It ends as other steps do. Raises FailedPreconditionError,
    LengthMismatchError, OutOfBlocksError.
    """
    state.enter(namespace)
    ids, rows = namespace.lookup(sequence_ids)
    states = state.sequences.resident_states(ids, rows)
    num_steps = whole_number(num_steps, "num_steps", 1, state.config.max_sequence_tokens)
    if expected_lengths is not None:
        check_expected_lengths(ids, states[:, LENGTH], expected_lengths)
    _check_computed(ids, states)
    batch = _planned(state, WriteBatch(ids, rows, states, states[:, LENGTH]), num_steps)
    growth = plan_growth(state, batch, 0)
    state.device.require_available(growth.num_new)
    grown = apply_growth(state, namespace, batch, growth)
    return _start_ahead(state, namespace, batch, num_steps, grown)


def commit_ahead(
    state: BlockState,
    namespace: SessionNamespace,
    step_id: int,
    token_ids: npt.ArrayLike,
    num_tokens: npt.ArrayLike | None = None,
    num_steps: int = 0,
) -> StepPlan | None:
    """Append the tokens that a step ahead has written, as computed tokens, and open the next one.

    token_ids int32[sum(num_tokens)], sequence after sequence; num_tokens int64[n], from 0 to the `num_steps` of the
    step, the same number each if None. The next step has slots for `num_steps` tokens after them, of which the
    first are those that this step had beyond the tokens; 0 opens none and returns None. Raises
    FailedPreconditionError for other steps, OutOfBlocksError.
    """
    state.enter(namespace)
    entry = namespace.live_step(step_id)
    if not entry.ahead:
        raise FailedPreconditionError(f"step {step_id} is not ahead", field="step_id", step_id=step_id)
    tokens, counts = _written_tokens(entry, token_ids, num_tokens)
    num_steps = whole_number(num_steps, "num_steps", 0, state.config.max_sequence_tokens)
    ids, rows = entry.plan.sequence_ids, entry.plan.rows
    states = state.sequences.resident_states(ids, rows)
    begins, lengths = states[:, LENGTH].copy(), states[:, LENGTH] + counts
    states[:, LENGTH] = states[:, NUM_COMPUTED] = lengths
    batch = WriteBatch(ids, rows, states, lengths)
    if num_steps == 0:
        state.intents.begin(RESTORE, rows)
        _compute(state, namespace, batch, begins, counts, tokens)
        state.sequences.end_steps(namespace, rows)
        return None
    batch = _planned(state, batch, num_steps)
    growth = plan_growth(state, batch, 0)
    state.device.require_available(growth.num_new)
    grown = apply_growth(state, namespace, batch, growth)
    _compute(state, namespace, batch._replace(lengths=lengths), begins, counts, tokens)
    return _start_ahead(state, namespace, batch, num_steps, grown)


def _planned(state: BlockState, batch: WriteBatch, num_steps: int) -> WriteBatch:
    """Return the batch with its lengths after `num_steps` more tokens. Raises InvalidArgumentError and
    QuotaExceededError."""
    lengths, limit = batch.lengths + num_steps, state.config.max_sequence_tokens
    if np.count_nonzero(lengths > limit):
        i = int((lengths > limit).argmax())
        raise InvalidArgumentError(
            f"makes sequence {batch.ids[i]} longer than max_sequence_tokens = {limit}", field="num_steps"
        )
    check_request_tokens(state.config, len(lengths) * num_steps, "num_steps")
    return batch._replace(lengths=lengths)


def _start_ahead(
    state: BlockState, namespace: SessionNamespace, batch: WriteBatch, num_steps: int, grown: Grown
) -> StepPlan:
    """Open a step ahead over a batch that has its blocks."""
    lengths = batch.states[:, LENGTH]
    query_lens = np.full(len(lengths), num_steps, np.int32)
    slots = state.sequences.slots(batch.rows, lengths, query_lens.astype(np.int64))
    context_lens = batch.lengths.astype(np.int32)
    step = start_step(state, namespace, batch.ids, batch.rows, lengths, query_lens, context_lens, slots, grown=grown)
    namespace.steps[step.step_id].ahead = True
    return step


def _written_tokens(
    entry: LiveStep, token_ids: npt.ArrayLike, num_tokens: npt.ArrayLike | None
) -> tuple[Int32Array, Int64Array]:
    """Return the tokens int32[sum(counts)] that were written, and how many in each sequence, int64[n]."""
    tokens = int32_array(token_ids, "token_ids") if np.size(token_ids) else _NO_TOKENS
    num_sequences, most = len(entry.plan.rows), int(entry.plan.query_lens[0])
    if num_tokens is None:
        each, rest = divmod(len(tokens), num_sequences)
        if rest or each > most:
            raise InvalidArgumentError(
                f"has {len(tokens)} tokens for {num_sequences} sequences with up to {most} each", field="token_ids"
            )
        return tokens, np.full(num_sequences, each, np.int64)
    counts = counts_for(num_tokens, "num_tokens", num_sequences)
    outside = (counts < 0) | (counts > most)
    if np.count_nonzero(outside):
        refuse("num_tokens", outside, f"must be from 0 to the step's {most} tokens of a sequence")
    if int(counts.sum()) != len(tokens):
        raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {counts.sum()}", field="token_ids")
    return tokens, counts


def _compute(
    state: BlockState,
    namespace: SessionNamespace,
    batch: WriteBatch,
    begins: Int64Array,
    counts: Int64Array,
    tokens: Int32Array,
) -> None:
    """Make the written tokens computed tokens of their sequences, whose lengths were `begins` int64[n]."""
    state.device.tokens_by_slot[state.sequences.slots(batch.rows, begins, counts)] = tokens
    state.sequences.lengths[batch.rows] = batch.lengths
    state.sequences.num_tokens += len(tokens)
    state.generation += 1
    state.counters.computed_tokens += len(tokens)
    namespace.counters[COMPUTED_TOKENS] += len(tokens)
    commit_rows(state, batch.rows, batch.lengths.astype(np.int32))


def _check_computed(ids: Int64Array, states: Int64Array) -> None:
    """Raise FailedPreconditionError if a sequence has tokens that are not computed."""
    pending = states[:, LENGTH] != states[:, NUM_COMPUTED]
    if np.count_nonzero(pending):
        i = int(pending.argmax())
        raise FailedPreconditionError(
            f"sequence {ids[i]} has tokens that are not computed", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
        )
