"""Batches that mix decodes and chunks of prompts, and steps that are opened while the step before is still computed.

A step that follows another one begins where that step ends. The next token of a decode is then not known yet, because
the followed step samples it: its slot is reserved, but it is no token of its sequence before `set_tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import counts_for, int32_array, refuse, whole_number
from kvservice.blocks.growth import NO_COPIES, WriteBatch
from kvservice.blocks.limits import check_request_tokens
from kvservice.blocks.namespaces import LiveStep, SessionNamespace
from kvservice.blocks.plans import BlockCopies, Int32Array, Int64Array, StepPlan
from kvservice.blocks.sequences import LENGTH, NUM_COMPUTED, STEP
from kvservice.blocks.state import BlockState
from kvservice.blocks.steps import StepPlanner, check_query_lens
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


class Advancer:
    """Opens steps over decodes and chunks of prompts: advance."""

    def __init__(self, state: BlockState, steps: StepPlanner) -> None:
        self._state, self._config, self._steps = state, state.config, steps
        self._device, self._sequences = state.device, state.sequences
        # Scratch: the context lengths of the followed step, by row.
        self._context_lens = np.zeros(state.config.max_sequences, np.int64)

    def advance(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        lookahead: int,
        num_appended: npt.ArrayLike | None,
        follows: int | None,
    ) -> StepPlan:
        """See BlockManager.advance."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        tokens, counts = self._appended(token_ids, num_appended, len(ids))
        lengths = states[:, LENGTH].copy()
        lengths[: len(counts)] += counts
        batch = WriteBatch(ids, rows, states, lengths)
        followed, unknown = None, None
        if follows is not None:
            followed = self._followed(namespace, follows)
            covered = self._begin_after(followed, batch)
            unknown = _sampled(followed, batch, covered, counts)
            if not len(covered):
                followed = None
        query_lens = check_query_lens(num_tokens, lengths - states[:, NUM_COMPUTED])
        check_request_tokens(self._config, int(np.add.reduce(query_lens)), "sequence_ids")
        plan = _Advance(batch, tokens, counts, query_lens, followed, unknown)
        if num_appended is None and lookahead == 0 and len(tokens) == len(ids):
            decode = self._steps.growth.plan_decode(rows, states)
            if decode is not None:
                return self._open(namespace, plan, self._steps.append_decode(rows, decode, tokens), NO_COPIES)
        return self._advance(namespace, plan, lookahead)

    def _advance(self, namespace: SessionNamespace, plan: _Advance, lookahead: int) -> StepPlan:
        """Advance a batch for which no fast path exists."""
        (_, rows, states, _), growth = plan.batch, self._steps.growth
        needed = growth.plan(plan.batch, self._reserved(plan, lookahead))
        self._device.require_available(needed.num_new)
        copies = growth.apply(plan.batch, needed)
        num_decodes = len(plan.counts)
        if num_decodes:
            slots = self._sequences.slots(rows[:num_decodes], states[:num_decodes, LENGTH], plan.counts)
            self._device.tokens_by_slot[slots] = plan.tokens
        slots = self._sequences.slots(rows, states[:, NUM_COMPUTED], plan.query_lens)
        return self._open(namespace, plan, slots, copies)

    def _open(self, namespace: SessionNamespace, plan: _Advance, slots: Int64Array, copies: BlockCopies) -> StepPlan:
        """Open the step. Tokens that are not known do not count in the lengths of their sequences."""
        batch, unknown = plan.batch, plan.unknown
        self._sequences.num_tokens += len(plan.tokens)
        if unknown is not None:
            lengths = batch.lengths.copy()
            lengths[unknown] -= 1
            batch = batch._replace(lengths=lengths)
            self._sequences.num_tokens -= len(unknown)
        context_lens = (batch.states[:, NUM_COMPUTED] + plan.query_lens).astype(np.int32)
        query_lens = plan.query_lens.astype(np.int32)
        step = self._steps.open(namespace, batch, query_lens, context_lens, slots, copies, None, plan.followed)
        if unknown is not None:
            namespace.steps[step.step_id].unknown = unknown
        return step

    def _appended(
        self, token_ids: npt.ArrayLike, num_appended: npt.ArrayLike | None, num_sequences: int
    ) -> tuple[Int32Array, Int64Array]:
        """Return the new tokens int32[t], and how many each of the first sequences gets: int64[m]."""
        tokens = int32_array(token_ids, "token_ids") if np.size(token_ids) else _NO_TOKENS
        if num_appended is None:
            if len(tokens) > num_sequences:
                raise InvalidArgumentError(f"has {len(tokens)} tokens for {num_sequences} sequences", field="token_ids")
            return tokens, np.ones(len(tokens), np.int64)
        num_decodes = np.size(num_appended)
        if num_decodes > num_sequences:
            raise InvalidArgumentError(
                f"has {num_decodes} elements for {num_sequences} sequences", field="num_appended"
            )
        counts = counts_for(num_appended, "num_appended", num_decodes)
        outside = (counts < 1) | (counts > self._config.max_sequence_tokens)
        if np.count_nonzero(outside):
            limit = self._config.max_sequence_tokens
            refuse("num_appended", outside, f"must be from 1 to max_sequence_tokens = {limit}")
        if int(counts.sum()) != len(tokens):
            raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {counts.sum()}", field="token_ids")
        return tokens, counts

    def _followed(self, namespace: SessionNamespace, step_id: int) -> LiveStep:
        """Return the live step that a new step may follow."""
        step = namespace.live_step(step_id, "follows")
        if step.follower:
            raise FailedPreconditionError(
                f"step {step.follower} follows step {step_id} already", field="follows", step_id=step_id
            )
        if not step.tokens_known:
            raise FailedPreconditionError(
                f"the tokens of step {step_id} are not known", field="follows", step_id=step_id
            )
        if step.follows and not namespace.steps[step.follows].committed:
            raise FailedPreconditionError(
                f"step {step_id} follows step {step.follows}, which is not complete", field="follows", step_id=step_id
            )
        return step

    def _begin_after(self, followed: LiveStep, batch: WriteBatch) -> Int64Array:
        """Move the starts in `batch.states` of the sequences that the followed step covers. Returns their indices."""
        covered = np.flatnonzero(batch.states[:, STEP] == followed.plan.step_id)
        self._context_lens[followed.plan.rows] = followed.plan.context_lens
        batch.states[covered, NUM_COMPUTED] = self._context_lens[batch.rows[covered]]
        return covered

    def _reserved(self, plan: _Advance, lookahead: int) -> Int64Array | int:
        """Return the slots to reserve past the tokens of each sequence: of `lookahead` slots past the next token, those
        that the other new tokens do not use."""
        lookahead = whole_number(lookahead, "lookahead", 0, self._config.max_sequence_tokens)
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
