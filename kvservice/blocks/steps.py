"""Steps: append tokens, make the slots to write exclusive, commit once all layers are written.

A step covers the next tokens of its sequences that are not computed. Opening one makes the blocks from the first such
token up to the sequence's end its own: a copy of each that somebody else holds or that is pinned (copy-on-write, as in
vLLM's v0 block manager, but each copy is counted beforehand), and a block that only this sequence holds leaves the
prefix index, since its content is about to change. New blocks come at the end, also for the lookahead: those are
room, not slots to write, so a fork may share them; the append that comes to write there makes them its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import counts_for, int32_array, refuse, whole_number
from kvservice.blocks.core import Core, distinct_steps, ragged
from kvservice.blocks.plans import BlockCopies, BoolArray, Int32Array, Int64Array, Step
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, STEP, OpenStep, SequenceSpace
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, LengthMismatchError

_NO_BLOCKS = np.zeros(0, np.int64)
_NO_COPIES = BlockCopies(np.zeros(0, np.int32), np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Sequences about to be written: ids, rows, a copy of their meta int64[n, 8], lengths int64[n] to come."""

    ids: Int64Array
    rows: Int64Array
    meta: Int64Array
    lengths: Int64Array


@dataclass(frozen=True, slots=True)
class _Copying:
    """Blocks to copy, by row, table entry and block int64[c]; `computed` bool[c] says which hold computed tokens of
    their sequence. `forgotten` are blocks that leave the prefix index instead."""

    rows: Int64Array
    entries: Int64Array
    src: Int64Array
    computed: BoolArray
    forgotten: Int64Array


@dataclass(frozen=True, slots=True)
class _Growth:
    """What a batch needs: grown int64[n] new blocks at each end, and copies of blocks that are not its own."""

    grown: Int64Array
    num_grown: int
    copying: _Copying | None

    @property
    def num_new(self) -> int:
        return self.num_grown + (len(self.copying.src) if self.copying else 0)


class StepOps(Core):
    """Append and open_step."""

    def can_append(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> bool:
        """Whether `append` has the blocks: exact, so no append of the same arguments fails for want of blocks.

        Unlike allocate it leaves no watermark: the watermark is there for these.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        counts = self._append_counts(num_tokens, len(ids))
        meta = self._resident(ids, rows)
        batch = _Batch(ids, rows, meta, meta[:, LENGTH] + counts)
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
        """Adds tokens and opens a step over all tokens that are not computed (vLLM v0: append_slots).

        sequence_ids int64[n], distinct; token_ids int32[sum(num_tokens)], sequence after sequence; num_tokens int64[n],
        each >= 1, one each if None; expected_lengths int64[n], the lengths before. If the lengths show that exactly
        this append was made already and nothing since, its step is returned again without its copies (they
        were made then), so that a retry does no harm.
        Raises InvalidArgumentError, UnknownSequenceError, SequenceSwappedError, LengthMismatchError, OutOfBlocksError.
        """
        self._enter(space)
        ids, rows = space.lookup(sequence_ids)
        tokens = int32_array(token_ids, "token_ids")
        counts = self._append_counts(num_tokens, len(ids))
        expected_tokens = counts * len(ids) if isinstance(counts, int) else int(counts.sum())
        if expected_tokens != len(tokens):
            raise InvalidArgumentError(f"has {len(tokens)} tokens where {expected_tokens} are named", field="token_ids")
        meta = self._resident(ids, rows)
        if expected_lengths is not None:
            expected = counts_for(expected_lengths, "expected_lengths", len(ids))
            if np.count_nonzero(meta[:, LENGTH] - expected):
                return self._repeated_append(space, _Batch(ids, rows, meta, expected), tokens, counts)
        batch = _Batch(ids, rows, meta, meta[:, LENGTH] + counts)
        growth = self._plan_growth(batch, lookahead)
        self._require_device_blocks(growth.num_new)

        query_lens = batch.lengths - meta[:, NUM_COMPUTED]
        copies = self._grow(batch, growth)
        slots = self._slots(batch.rows, meta[:, NUM_COMPUTED], query_lens)
        if len(slots) == len(tokens):  # nothing was pending before
            self.device.token_slots[slots] = tokens
        else:
            appended = np.broadcast_to(np.asarray(counts), len(ids))
            self.device.token_slots[self._slots(batch.rows, meta[:, LENGTH], appended)] = tokens
        self.sequences.num_tokens += len(tokens)
        return self._open(space, batch, query_lens, slots, copies, counts)

    def can_open_step(self, space: SequenceSpace, sequence_ids: npt.ArrayLike, lookahead: int = 0) -> bool:
        """Whether `open_step` has the blocks: exact."""
        self._enter(space)
        return self._plan_growth(self._pending(space, sequence_ids), lookahead).num_new <= self.device.num_available

    def open_step(
        self,
        space: SequenceSpace,
        sequence_ids: npt.ArrayLike,
        num_tokens: npt.ArrayLike | None = None,
        lookahead: int = 0,
    ) -> Step:
        """Opens a step over tokens that are there but not computed: a prefill, or with num_tokens a chunk of one.

        num_tokens int64[n], each from 1 to the sequence's pending tokens, all pending ones if None. Raises as append,
        and FailedPreconditionError when a sequence has no pending token.
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
        growth = self._plan_growth(batch, lookahead)
        self._require_device_blocks(growth.num_new)

        copies = self._grow(batch, growth)
        slots = self._slots(batch.rows, batch.meta[:, NUM_COMPUTED], query_lens)
        return self._open(space, batch, query_lens, slots, copies, None)

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

    def _pending(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> _Batch:
        ids, rows = space.lookup(sequence_ids)
        meta = self._resident(ids, rows)
        done = meta[:, NUM_COMPUTED] == meta[:, LENGTH]
        if np.count_nonzero(done):
            i = int(done.argmax())
            raise FailedPreconditionError(
                f"all tokens of sequence {ids[i]} are computed", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
            )
        return _Batch(ids, rows, meta, meta[:, LENGTH])

    def _repeated_append(
        self, space: SequenceSpace, batch: _Batch, tokens: Int32Array, counts: Int64Array | int
    ) -> Step:
        """The step of this very append if it was the last thing that happened to its sequences."""
        expected, lengths = batch.lengths, batch.meta[:, LENGTH]
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
                return dataclasses.replace(entry.plan, copies=_NO_COPIES)
        i = int((lengths != expected).argmax())
        raise LengthMismatchError(
            f"sequence {batch.ids[i]} has {lengths[i]} tokens, not {expected[i]}", field=f"expected_lengths[{i}]",
            sequence_id=int(batch.ids[i]), length=int(lengths[i]), expected_length=int(expected[i]),
        )  # fmt: skip

    def _plan_growth(self, batch: _Batch, lookahead: int) -> _Growth:
        """Counts, before anything changes, every block that the batch will take."""
        if lookahead != 0:
            lookahead = whole_number(lookahead, "lookahead", 0, self.config.max_sequence_tokens)
        self._check_reach(batch.lengths, lookahead)
        held = batch.meta[:, NUM_BLOCKS]
        grown = np.maximum(((batch.lengths + (lookahead + self._mask)) >> self._shift) - held, 0)
        first = batch.meta[:, NUM_COMPUTED] >> self._shift
        written = (batch.lengths + self._mask) >> self._shift
        which, entries = ragged(first, np.minimum(written, held) - first)
        rows = batch.rows[which]
        blocks = self.block_tables[rows, entries].astype(np.int64)
        taken = (self.device.ref_count[blocks] > 1) | self.device.indexed[blocks]
        num_grown = int(np.add.reduce(grown))
        if not np.count_nonzero(taken):
            return _Growth(grown, num_grown, None)
        copied, forgotten = self._plan_copies(blocks[taken])
        chosen = np.flatnonzero(taken)[copied]
        computed = (entries[chosen] << self._shift) < batch.meta[which[chosen], NUM_COMPUTED]
        return _Growth(grown, num_grown, _Copying(rows[chosen], entries[chosen], blocks[chosen], computed, forgotten))

    def _plan_copies(self, blocks: Int64Array) -> tuple[BoolArray, Int64Array]:
        """Blocks to be written that others hold or the index knows: (which are copied bool[n], which are forgotten).

        Where all holders of a block write, the last of them keeps it, unless a pin keeps its content.
        """
        distinct, inverse, writers = np.unique(blocks, return_inverse=True, return_counts=True)
        kept = (writers == self.device.ref_count[distinct]) & ~self.device.pinned[distinct]
        last = np.zeros(len(distinct), np.int64)
        last[inverse] = np.arange(len(blocks))
        copied = np.ones(len(blocks), np.bool_)
        copied[last[kept]] = False
        return copied, distinct[kept & self.device.indexed[distinct]]

    def _grow(self, batch: _Batch, growth: _Growth) -> BlockCopies:
        """Applies a growth that is known to fit."""
        new = self.device.take(growth.num_new) if growth.num_new else _NO_BLOCKS
        if growth.num_grown:
            which, entries = ragged(batch.meta[:, NUM_BLOCKS], growth.grown)
            self.block_tables[batch.rows[which], entries] = new[: growth.num_grown]
            batch.meta[:, NUM_BLOCKS] += growth.grown
        return self._copy(growth.copying, new[growth.num_grown :]) if growth.copying else _NO_COPIES

    def _copy(self, copying: _Copying, dst: Int64Array) -> BlockCopies:
        """Puts new blocks dst in the place of those to be copied."""
        device, src = self.device, copying.src
        device.forget(copying.forgotten)
        device.token_ids[dst] = device.token_ids[src]
        self.block_tables[copying.rows, copying.entries] = dst
        distinct, holders = np.unique(src, return_counts=True)
        device.release(distinct, holders)
        self.cow_copies += len(src)
        made = copying.computed
        return BlockCopies(src[made].astype(np.int32), dst[made].astype(np.int32))

    def _slots(self, rows: Int64Array, starts: Int64Array, counts: Int64Array) -> Int64Array:
        """Slots of the tokens starts[i], ..., starts[i] + counts[i] - 1 of each row: int64[sum(counts)]."""
        which, positions = ragged(starts, counts)
        blocks: Int64Array = self.block_tables[rows[which], positions >> self._shift].astype(np.int64)
        return (blocks << self._shift) | (positions & self._mask)

    def _open(
        self,
        space: SequenceSpace,
        batch: _Batch,
        query_lens: Int64Array,
        slots: Int64Array,
        copies: BlockCopies,
        appended: Int64Array | int | None,
    ) -> Step:
        meta = batch.meta
        space.supersede(distinct_steps(meta[:, STEP]))
        space.last_step_id += 1
        step = Step(
            step_id=space.last_step_id,
            sequence_ids=batch.ids,
            rows=batch.rows,
            query_lens=query_lens.astype(np.int32),
            context_lens=(meta[:, NUM_COMPUTED] + query_lens).astype(np.int32),
            slot_mapping=slots,
            copies=copies,
            tables=self.block_tables,
            block_size=self.config.block_size,
        )
        meta[:, LENGTH] = batch.lengths
        meta[:, STEP] = step.step_id
        self.meta[batch.rows] = meta
        space.steps[step.step_id] = OpenStep(step, bytearray(self.config.num_layers), appended)
        return step
