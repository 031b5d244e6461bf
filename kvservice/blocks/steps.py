"""Steps: append tokens and make the slots that will be written exclusive.

A step covers the next uncomputed tokens of its sequences. Opening a step makes the blocks from the first such token to
the end of the sequence exclusive. A block that is shared or pinned is copied (copy-on-write, as in vLLM's v0 block
manager, but with each copy counted in advance). A block that only this sequence holds leaves the prefix index, because
its content will change. New blocks are added at the end, also for the lookahead. Lookahead blocks are reserved space,
not slots to write, so a fork may share them; a later append that writes there makes them exclusive.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import counts_for, int32_array, int64_array, refuse
from kvservice.blocks.block_pool import ONE
from kvservice.blocks.growth import NO_COPIES, DecodeGrowth, GrowthPlanner, WriteBatch
from kvservice.blocks.limits import check_request_tokens
from kvservice.blocks.namespaces import LiveStep, SessionNamespace, distinct_steps
from kvservice.blocks.plans import BlockCopies, Int32Array, Int64Array, StepPlan
from kvservice.blocks.sequences import LENGTH, NUM_COMPUTED, STEP
from kvservice.blocks.state import BlockState
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LengthMismatchError


class StepPlanner:
    """Opens steps: append and open_step. `growth` and `open` serve other ways to open a step, too."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._sequences = state.device, state.sequences
        self.growth = GrowthPlanner(state)
        self._ones = np.ones(state.config.max_sequences, np.int32)
        self._ones.flags.writeable = False

    def can_append(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None,
        lookahead: int,
    ) -> bool:
        """See BlockManager.can_append."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        counts = self._append_counts(num_tokens, len(ids))
        states = self._sequences.resident_states(ids, rows)
        if num_tokens is None and lookahead == 0:
            decode = self.growth.plan_decode(rows, states)
            if decode is not None:
                return len(decode.fresh) <= self._device.num_available
        batch = WriteBatch(ids, rows, states, states[:, LENGTH] + counts)
        check_request_tokens(self._config, int((batch.lengths - states[:, NUM_COMPUTED]).sum()), "sequence_ids")
        return self.growth.plan(batch, lookahead).num_new <= self._device.num_available

    def append(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None,
        expected_lengths: npt.ArrayLike | None,
        lookahead: int,
    ) -> StepPlan:
        """See BlockManager.append."""
        self._state.enter(namespace)
        ids, rows = namespace.lookup(sequence_ids)
        tokens = int32_array(token_ids, "token_ids")
        counts = self._append_counts(num_tokens, len(ids))
        expected_tokens = counts * len(ids) if isinstance(counts, int) else int(counts.sum())
        if expected_tokens != len(tokens):
            raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {expected_tokens}", field="token_ids")
        states = self._sequences.resident_states(ids, rows)
        if expected_lengths is not None:
            expected = _expected_of(expected_lengths, len(ids))
            if np.count_nonzero(states[:, LENGTH] != expected):
                return self._repeated_append(namespace, WriteBatch(ids, rows, states, expected), tokens, counts)
        if num_tokens is None and lookahead == 0:
            decode = self.growth.plan_decode(rows, states)
            if decode is not None:
                batch = WriteBatch(ids, rows, states, decode.positions + ONE)
                slots = self.append_decode(rows, decode, tokens)
                self._sequences.num_tokens += len(tokens)
                context_lens = batch.lengths.astype(np.int32)
                return self.open(namespace, batch, self._ones[: len(tokens)], context_lens, slots, NO_COPIES, 1)
        batch = WriteBatch(ids, rows, states, states[:, LENGTH] + counts)
        query_lens = batch.lengths - states[:, NUM_COMPUTED]
        check_request_tokens(self._config, int(np.add.reduce(query_lens)), "sequence_ids")
        growth = self.growth.plan(batch, lookahead)
        self._device.require_available(growth.num_new)

        copies = self.growth.apply(batch, growth)
        slots = self._sequences.slots(batch.rows, states[:, NUM_COMPUTED], query_lens)
        if len(slots) == len(tokens):  # no tokens were pending before
            self._device.tokens_by_slot[slots] = tokens
        else:
            appended = np.broadcast_to(np.asarray(counts), len(ids))
            self._device.tokens_by_slot[self._sequences.slots(batch.rows, states[:, LENGTH], appended)] = tokens
        self._sequences.num_tokens += len(tokens)
        context_lens = batch.lengths.astype(np.int32)
        return self.open(namespace, batch, query_lens.astype(np.int32), context_lens, slots, copies, counts)

    def append_decode(self, rows: Int64Array, plan: DecodeGrowth, tokens: Int32Array) -> Int64Array:
        """Store the tokens of a decode step: no tokens were pending, and no block needs a copy. Returns their slots
        int64[n]."""
        self._device.require_available(len(plan.fresh))
        slots = self.growth.apply_decode(rows, plan)
        self._device.tokens_by_slot[slots] = tokens
        return slots

    def can_open_step(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int) -> bool:
        """See BlockManager.can_open_step."""
        self._state.enter(namespace)
        batch = self._pending(namespace, sequence_ids)
        check_request_tokens(self._config, int((batch.lengths - batch.states[:, NUM_COMPUTED]).sum()), "sequence_ids")
        return self.growth.plan(batch, lookahead).num_new <= self._device.num_available

    def open_step(
        self,
        namespace: SessionNamespace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None,
        lookahead: int,
    ) -> StepPlan:
        """See BlockManager.open_step."""
        self._state.enter(namespace)
        batch = self._pending(namespace, sequence_ids)
        pending = batch.lengths - batch.states[:, NUM_COMPUTED]
        query_lens = pending
        if num_tokens is not None:
            query_lens = check_query_lens(num_tokens, pending)
        check_request_tokens(self._config, int(np.add.reduce(query_lens)), "sequence_ids")
        growth = self.growth.plan(batch, lookahead)
        self._device.require_available(growth.num_new)

        copies = self.growth.apply(batch, growth)
        slots = self._sequences.slots(batch.rows, batch.states[:, NUM_COMPUTED], query_lens)
        context_lens = (batch.states[:, NUM_COMPUTED] + query_lens).astype(np.int32)
        return self.open(namespace, batch, query_lens.astype(np.int32), context_lens, slots, copies, None)

    def _append_counts(self, num_tokens: npt.ArrayLike | None, batch: int) -> Int64Array | int:
        if num_tokens is None:
            return 1
        counts = counts_for(num_tokens, "num_tokens", batch)
        if np.minimum.reduce(counts) < 1:
            refuse("num_tokens", counts < 1, "must be at least 1")
        if np.maximum.reduce(counts) > self._config.max_sequence_tokens:
            limit = self._config.max_sequence_tokens
            refuse("num_tokens", counts > limit, f"must be at most max_sequence_tokens = {limit}")
        return counts

    def _pending(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> WriteBatch:
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        done = states[:, NUM_COMPUTED] == states[:, LENGTH]
        if np.count_nonzero(done):
            i = int(done.argmax())
            raise FailedPreconditionError(
                f"all tokens of sequence {ids[i]} are computed", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
            )
        return WriteBatch(ids, rows, states, states[:, LENGTH])

    def _repeated_append(
        self, namespace: SessionNamespace, batch: WriteBatch, tokens: Int32Array, counts: Int64Array | int
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
            slots = self._sequences.slots(batch.rows, expected, appended)
            if np.array_equal(self._device.tokens_by_slot[slots], tokens):
                return dataclasses.replace(entry.plan, copies=NO_COPIES)
        raise _mismatch(batch.ids, lengths, expected)

    def open(
        self,
        namespace: SessionNamespace,
        batch: WriteBatch,
        query_lens: Int32Array,
        context_lens: Int32Array,
        slots: Int64Array,
        copies: BlockCopies,
        appended: Int64Array | int | None,
        followed: LiveStep | None = None,
    ) -> StepPlan:
        """Open a step over a batch that has its blocks. It replaces the steps of its sequences, except the one that it
        follows."""
        if followed is None:
            namespace.supersede(distinct_steps(batch.states[:, STEP]))
        else:
            self._supersede_others(namespace, batch, followed)
        step = StepPlan(
            step_id=namespace.next_step_id(),
            sequence_ids=batch.ids,
            rows=batch.rows,
            query_lens=query_lens,
            context_lens=context_lens,
            slot_mapping=slots,
            copies=copies,
            tables=self._sequences.block_tables,
            block_size=self._config.block_size,
        )
        self._sequences.lengths[batch.rows] = batch.lengths
        self._sequences.steps[batch.rows] = step.step_id
        entry = LiveStep(step, bytearray(self._config.num_layers), appended)
        namespace.steps[step.step_id] = entry
        if followed is not None:
            entry.follows, followed.follower = followed.plan.step_id, step.step_id
        return step

    def _supersede_others(self, namespace: SessionNamespace, batch: WriteBatch, followed: LiveStep) -> None:
        """End the steps of a batch except the one that it follows. The step before that one ends, too: it is complete,
        and two live steps share sequences at most."""
        others = set(distinct_steps(batch.states[:, STEP]))
        others.discard(followed.plan.step_id)
        others.add(followed.follows)
        namespace.supersede(others)


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
