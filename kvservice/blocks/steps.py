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
from kvservice.blocks.core import distinct_steps
from kvservice.blocks.growth import NO_COPIES, Batch, GrowthOps, OneEach
from kvservice.blocks.plans import BlockCopies, Int32Array, Int64Array, Step
from kvservice.blocks.sequences import LENGTH, NUM_COMPUTED, STEP, OpenStep, SequenceSpace
from kvservice.blocks.tier import ONE
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LengthMismatchError


class StepOps(GrowthOps):
    """Append and open_step."""

    def can_append(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> bool:
        """Return whether enough blocks are available for `append`. The answer is exact: an append with the same
        arguments does not run out of blocks.

        Unlike allocate, append may use the blocks below the watermark, which exists for running sequences.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        counts = self._append_counts(num_tokens, len(ids))
        meta = self._resident(ids, rows)
        if num_tokens is None and lookahead == 0:
            one_each = self._plan_one_each(rows, meta)
            if one_each is not None:
                return len(one_each.fresh) <= self.device.num_available
        batch = Batch(ids, rows, meta, meta[:, LENGTH] + counts)
        self._check_request_tokens(int((batch.lengths - meta[:, NUM_COMPUTED]).sum()), "sequence_ids")
        return self._plan_growth(batch, lookahead).num_new <= self.device.num_available

    def append(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        expected_lengths: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> Step:
        """Append tokens and open a step over all uncomputed tokens (vLLM v0: append_slots).

        sequence_ids int64[n], distinct; token_ids int32[sum(num_tokens)], sequence after sequence; num_tokens int64[n],
        each >= 1, one each if None; expected_lengths int64[n], the lengths before the append. If the lengths show that
        this very append was the last operation, the same step is returned again, without its copies (which were already
        made), so a retry is safe.
        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError, LengthMismatchError, OutOfBlocksError.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        tokens = int32_array(token_ids, "token_ids")
        counts = self._append_counts(num_tokens, len(ids))
        expected_tokens = counts * len(ids) if isinstance(counts, int) else int(counts.sum())
        if expected_tokens != len(tokens):
            raise InvalidArgumentError(f"has {len(tokens)} tokens, expected {expected_tokens}", field="token_ids")
        meta = self._resident(ids, rows)
        if expected_lengths is not None:
            expected = int64_array(expected_lengths, "expected_lengths")
            if len(expected) != len(ids):
                raise InvalidArgumentError(
                    f"has {len(expected)} elements for {len(ids)} sequences", field="expected_lengths"
                )
            if np.count_nonzero(meta[:, LENGTH] != expected):
                return self._repeated_append(space, Batch(ids, rows, meta, expected), tokens, counts)
        if num_tokens is None and lookahead == 0:
            one_each = self._plan_one_each(rows, meta)
            if one_each is not None:
                return self._append_one_each(space, Batch(ids, rows, meta, one_each.positions + ONE), one_each, tokens)
        batch = Batch(ids, rows, meta, meta[:, LENGTH] + counts)
        query_lens = batch.lengths - meta[:, NUM_COMPUTED]
        self._check_request_tokens(int(np.add.reduce(query_lens)), "sequence_ids")
        growth = self._plan_growth(batch, lookahead)
        self._require_device_blocks(growth.num_new)

        copies = self._grow(batch, growth)
        slots = self._slots(batch.rows, meta[:, NUM_COMPUTED], query_lens)
        if len(slots) == len(tokens):  # no tokens were pending before
            self.device.token_slots[slots] = tokens
        else:
            appended = np.broadcast_to(np.asarray(counts), len(ids))
            self.device.token_slots[self._slots(batch.rows, meta[:, LENGTH], appended)] = tokens
        self.sequences.num_tokens += len(tokens)
        context_lens = batch.lengths.astype(np.int32)
        return self._open(space, batch, query_lens.astype(np.int32), context_lens, slots, copies, counts)

    def _append_one_each(self, space: SequenceSpace, batch: Batch, plan: OneEach, tokens: Int32Array) -> Step:
        """Append for a decode step: no tokens were pending, and no block needs a copy."""
        self._require_device_blocks(len(plan.fresh))
        slots = self._grow_one_each(batch.rows, plan)
        self.device.token_slots[slots] = tokens
        self.sequences.num_tokens += len(tokens)
        context_lens = batch.lengths.astype(np.int32)
        return self._open(space, batch, self._ones[: len(tokens)], context_lens, slots, NO_COPIES, 1)

    def can_open_step(self, space: SequenceSpace, sequence_ids: npt.ArrayLike, lookahead: int = 0) -> bool:
        """Return whether enough blocks are available for `open_step`. The answer is exact."""
        self._enter(space)
        batch = self._pending(space, sequence_ids)
        self._check_request_tokens(int((batch.lengths - batch.meta[:, NUM_COMPUTED]).sum()), "sequence_ids")
        return self._plan_growth(batch, lookahead).num_new <= self.device.num_available

    def open_step(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> Step:
        """Open a step over existing tokens that are not computed: a prefill, or one chunk of it with num_tokens.

        num_tokens int64[n], each from 1 to the sequence's pending tokens; None means all pending tokens. Raises the
        errors of append, and FailedPreconditionError if a sequence has no pending tokens.
        """
        self._enter(space)
        batch = self._pending(space, sequence_ids)
        pending = batch.lengths - batch.meta[:, NUM_COMPUTED]
        query_lens = pending
        if num_tokens is not None:
            query_lens = counts_for(num_tokens, "num_tokens", len(batch.ids))
            outside = (query_lens < 1) | (query_lens > pending)
            if np.count_nonzero(outside):
                refuse("num_tokens", outside, "must be from 1 to the tokens that are not computed")
        self._check_request_tokens(int(np.add.reduce(query_lens)), "sequence_ids")
        growth = self._plan_growth(batch, lookahead)
        self._require_device_blocks(growth.num_new)

        copies = self._grow(batch, growth)
        slots = self._slots(batch.rows, batch.meta[:, NUM_COMPUTED], query_lens)
        context_lens = (batch.meta[:, NUM_COMPUTED] + query_lens).astype(np.int32)
        return self._open(space, batch, query_lens.astype(np.int32), context_lens, slots, copies, None)

    def _append_counts(self, num_tokens: npt.ArrayLike | None, batch: int) -> Int64Array | int:
        if num_tokens is None:
            return 1
        counts = counts_for(num_tokens, "num_tokens", batch)
        if np.minimum.reduce(counts) < 1:
            refuse("num_tokens", counts < 1, "must be at least 1")
        if np.maximum.reduce(counts) > self.config.max_sequence_tokens:
            limit = self.config.max_sequence_tokens
            refuse("num_tokens", counts > limit, f"must be at most max_sequence_tokens = {limit}")
        return counts

    def _pending(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> Batch:
        ids, rows = space.lookup(sequence_ids)
        meta = self._resident(ids, rows)
        done = meta[:, NUM_COMPUTED] == meta[:, LENGTH]
        if np.count_nonzero(done):
            i = int(done.argmax())
            raise FailedPreconditionError(
                f"all tokens of sequence {ids[i]} are computed", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
            )
        return Batch(ids, rows, meta, meta[:, LENGTH])

    def _repeated_append(
        self, space: SequenceSpace, batch: Batch, tokens: Int32Array, counts: Int64Array | int
    ) -> Step:
        """Return the step of this append if it was the last operation on its sequences. Raises LengthMismatchError
        otherwise."""
        expected, lengths = batch.lengths, batch.meta[:, LENGTH]
        if np.count_nonzero(expected < 0):
            refuse("expected_lengths", expected < 0, "must not be negative")
        entry = space.steps.get(int(batch.meta[0, STEP]))
        if (
            entry is not None
            and entry.num_appended is not None
            and np.array_equal(entry.plan.sequence_ids, batch.ids)
            and bool(np.all(entry.num_appended == counts))
            and np.array_equal(lengths, expected + counts)
        ):
            appended = np.broadcast_to(np.asarray(counts), len(batch.ids))
            if np.array_equal(self.device.token_slots[self._slots(batch.rows, expected, appended)], tokens):
                return dataclasses.replace(entry.plan, copies=NO_COPIES)
        i = int((lengths != expected).argmax())
        raise LengthMismatchError(
            f"sequence {batch.ids[i]} has {lengths[i]} tokens, not {expected[i]}", field=f"expected_lengths[{i}]",
            sequence_id=int(batch.ids[i]), length=int(lengths[i]), expected_length=int(expected[i]),
        )  # fmt: skip

    def _open(
        self,
        space: SequenceSpace,
        batch: Batch,
        query_lens: Int32Array,
        context_lens: Int32Array,
        slots: Int64Array,
        copies: BlockCopies,
        appended: Int64Array | int | None,
    ) -> Step:
        space.supersede(distinct_steps(batch.meta[:, STEP]))
        space.last_step_id += 1
        step = Step(
            step_id=space.last_step_id,
            sequence_ids=batch.ids,
            rows=batch.rows,
            query_lens=query_lens,
            context_lens=context_lens,
            slot_mapping=slots,
            copies=copies,
            tables=self.block_tables,
            block_size=self.config.block_size,
        )
        self.sequences.lengths[batch.rows] = batch.lengths
        self.sequences.steps[batch.rows] = step.step_id
        space.steps[step.step_id] = OpenStep(step, bytearray(self.config.num_layers), appended)
        return step
