"""Batches: the running sequences as arrays, the draft of a batch, and the batch while it is in flight.

DecodeSet ─▶ Draft ─▶ ScheduledBatch, the frozen result ─▶ InFlight, until its report"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvservice.blocks import BlocksConfig, StepPlan, SwapPlan
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.blocks.pool import Float64Array
from kvservice.scheduler.requests import RequestGroup, RequestState

NO_SEQUENCES = np.zeros(0, np.int64)
NO_SEQUENCES.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Preemption:
    """A running sequence that lost its blocks: its `computed` tokens, of which the prefix cache may still find some, or
    its place on the device if it was `swapped`."""

    sequence_id: int
    computed: int
    swapped: bool


class QueueCounts(NamedTuple):
    """Requests of an engine by their place, after a batch was made."""

    waiting: int
    running: int
    swapped: int


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledBatch:
    """The batch of one step.

    `step` covers its sequences: the first `num_decodes` get one token each, the others a chunk of their prompt of
    `step.query_lens` tokens. It is None if no sequence can run. `sampled` int64[m] are the sequences for which the
    engine samples a token: the decodes, then the prompts whose last chunk this is; `sampled_rows` int32[m] are their
    rows in the step. Before the step the device executes `swapped_out`, then `swapped_in`, then the copies of the step.
    `num_stalled` running sequences wait for a block.

    `failed` are requests that could not go on, with their errors: they are aborted, and everything else in the batch is
    as without them. `error` stopped the making of the batch, which has what was planned before. Neither is raised,
    because blocks may have moved already: the device must execute the batch.
    """

    number: int
    step: StepPlan | None
    num_decodes: int
    sampled: Int64Array
    sampled_rows: Int32Array
    counts: QueueCounts
    preempted: tuple[Preemption, ...] = ()
    swapped_out: tuple[SwapPlan, ...] = ()
    swapped_in: tuple[SwapPlan, ...] = ()
    num_stalled: int = 0
    failed: tuple[tuple[int, Exception], ...] = ()
    error: Exception | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self.step is None else len(self.step.slot_mapping)


# ---- Decoding sequences, so that a step costs a few NumPy operations for all of them


_COLUMNS = 9
_IDS, _LENGTHS, _GENERATED, _LIMITS, _BLOCKS, _BEAMS, _NUMBERS, _PRIORITIES, _PROPOSED = range(_COLUMNS)


class DecodeSet:
    """Sequences that get one token a step, in the order in which they joined.

    `ids`, `lengths` (computed tokens), `generated`, `limits` (most generated tokens), `blocks` (of the table) and
    `beams` (the number of the request whose beams they are, or 0) are int64[n] views; `tokens` int32[n] are the next
    tokens to append, and `times` says when they were reported. `sharing` says that the last blocks of some of them may
    be shared, so that they are copied before the next token is written.
    The first proposed[i] elements of row i of `proposals` int32[n, lookahead] are proposed to follow its next token;
    `speculating` says that there are proposals.
    """

    def __init__(self, capacity: int, config: BlocksConfig, lookahead: int) -> None:
        self._columns = np.zeros((_COLUMNS, capacity), np.int64)
        self._tokens = np.zeros(capacity, np.int32)
        self._places = np.zeros(capacity, np.float64)
        self.times = TokenTimes(capacity)
        self._shift, self._mask = np.array(config.block_shift), np.array(config.block_mask)
        self._reach = np.array(1 + lookahead + config.block_mask)
        self._proposals = np.zeros((capacity, lookahead), np.int32)
        self._size = 0
        self.sharing = self.has_beams = self.speculating = False
        self._cut()

    def __len__(self) -> int:
        return self._size

    def _cut(self) -> None:
        """Make the views of the sequences in the set."""
        size = self._size
        columns = self._columns[:, :size]
        self.ids: Int64Array = columns[_IDS]
        self.lengths: Int64Array = columns[_LENGTHS]
        self.generated: Int64Array = columns[_GENERATED]
        self.limits: Int64Array = columns[_LIMITS]
        self.blocks: Int64Array = columns[_BLOCKS]
        self.beams: Int64Array = columns[_BEAMS]
        self.proposed: Int64Array = columns[_PROPOSED]
        self.tokens: Int32Array = self._tokens[:size]
        self.proposals: Int32Array = self._proposals[:size]

    def add(self, state: RequestState, length: int, token: int) -> None:
        """Add a sequence with `length` computed tokens, and the token to append next."""
        at = self._size
        priority, place, number = state.rank
        beams = state.group.number if state.group.request.beams else 0
        self._columns[:, at] = (
            state.sequence_id, length, state.generated, state.limit, state.blocks, beams, number, priority, 0,
        )  # fmt: skip
        self.has_beams |= beams > 0
        self._places[at] = place
        self.times.add(state.token_at_s)
        self._tokens[at] = token
        self._size += 1
        self._cut()

    def keep(self, kept: BoolArray) -> None:
        """Remove the sequences that are not in `kept` bool[n]. The others keep their order."""
        size = int(np.count_nonzero(kept))
        self._columns[:, :size] = self._columns[:, : self._size][:, kept]
        self._tokens[:size] = self.tokens[kept]
        if self.speculating:
            self._proposals[:size] = self.proposals[kept]
        self._places[:size] = self._places[: self._size][kept]
        self.times.keep(kept)
        self._size = size
        self._cut()
        self.has_beams = self.has_beams and bool(self.beams.any())

    def index(self, sequence_id: int) -> int:
        """Return the index of a sequence in the set."""
        return int((self.ids == sequence_id).argmax())

    def needs(self) -> Int64Array:
        """Return how many new blocks each sequence needs for its next token and the lookahead: int64[n]."""
        reach: Int64Array = self.lengths + self._reach
        reach >>= self._shift
        reach -= self.blocks
        return reach

    def needs_within(self, steps: int) -> int:
        """Return how many sequences need a new block in the `steps` steps after the next."""
        if not self._size or not steps:
            return 0
        left = (-1 - self.lengths) & self._mask
        return int(np.count_nonzero(left < steps))

    def whole(self, chosen: Int64Array) -> Int64Array:
        """Return the sequences `chosen` int64[n] without beams of which not all are chosen."""
        if not self.has_beams:
            return chosen
        left = np.ones(self._size, np.bool_)
        left[chosen] = False
        broken = self.beams[left]
        return chosen[~np.isin(self.beams[chosen], broken[broken > 0])]

    def by_rank(self) -> Int64Array:
        """Return the indices int64[n] of all sequences in the order of their ranks."""
        columns = self._columns[:, : self._size]
        order: Int64Array = np.lexsort((columns[_NUMBERS], self._places[: self._size], columns[_PRIORITIES]))
        return order


class TokenTimes:
    """Times in seconds of the sequences of a set, in their order.

    As a rule all sequences get a token in each step, so their times are equal: `_common` is that time then, and the
    array is not kept. It is None while the times differ.
    """

    def __init__(self, capacity: int) -> None:
        self._times = np.zeros(capacity, np.float64)
        self._common: float | None = None
        self._size = 0

    def add(self, time_s: float) -> None:
        if self._size == 0:
            self._common = time_s
        elif time_s != self._common:
            self._spread()
        if self._common is None:
            self._times[self._size] = time_s
        self._size += 1

    def keep(self, kept: BoolArray) -> None:
        """Remove the sequences that are not in `kept` bool[n]. The others keep their order."""
        size = int(np.count_nonzero(kept))
        if self._common is None:
            self._times[:size] = self._times[: self._size][kept]
        self._size = size

    def at(self, index: int) -> float:
        return float(self._times[index]) if self._common is None else self._common

    def advance(self, which: slice | Int64Array, count: int, now_s: float) -> float | Float64Array:
        """Set the times of `count` sequences to `now_s`.

        Returns the seconds since their times before: float64[count] in any order, or one number if they are equal.
        """
        if count == self._size:
            gaps = now_s - (self._times[:count] if self._common is None else self._common)
            self._common = now_s
            return gaps
        self._spread()
        gaps = now_s - self._times[which]
        self._times[which] = now_s
        return gaps

    def _spread(self) -> None:
        """Keep the time of each sequence from now on."""
        if self._common is not None:
            self._times[: self._size] = self._common
            self._common = None


# ---- Batches in the making and in flight


def checked_blocks(pending: int, block_size: int) -> int:
    """Return how many blocks a step checks at most, for a prompt with `pending` tokens that are not computed."""
    return 2 + pending // block_size


@dataclass(slots=True)
class Draft:
    """A batch in the making.

    `tokens_left` is the rest of its token budget, `max_running` its limit of running sequences, `max_new_blocks` the
    engine's allowance of blocks for new requests. `needed` counts blocks that the step will allocate when it is opened.
    `decodes` int64[n] are indices into the decode set, with `growth` int64[n] new blocks each. With `all_decodes` the
    decodes are the first n of the set, and their indices do not count. `counts` int64[n] are their tokens if some of
    them have proposals, else None. `chunks` are prompts with the tokens to compute.
    `failed` are requests that could not go on, and `error` is what stopped the making, see ScheduledBatch.
    `short` says that running requests lack blocks. With `ahead` a batch is in flight, so that nothing may be preempted:
    `blocked` says that something would be, and that the batch is not made.
    """

    tokens_left: int
    max_running: int
    max_new_blocks: int
    needed: int = 0
    decodes: Int64Array = field(default_factory=lambda: NO_SEQUENCES)
    growth: Int64Array = field(default_factory=lambda: NO_SEQUENCES)
    all_decodes: bool = False
    counts: Int64Array | None = None
    num_stalled: int = 0
    short: bool = False
    chunks: list[tuple[RequestState, int]] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    swapped_out: list[SwapPlan] = field(default_factory=list)
    swapped_in: list[SwapPlan] = field(default_factory=list)
    ahead: bool = False
    blocked: bool = False
    failed: dict[RequestGroup, Exception] = field(default_factory=dict)
    error: Exception | None = None

    @property
    def which(self) -> slice | Int64Array:
        """Indices of the decodes in the decode set."""
        return slice(0, len(self.decodes)) if self.all_decodes else self.decodes

    def leave_out_step(self) -> None:
        """Remove all sequences, whose step could not be opened."""
        self.decodes = self.growth = NO_SEQUENCES
        self.all_decodes, self.counts = False, None
        self.chunks.clear()

    def limit_pending(self, max_blocks: int, block_size: int) -> None:
        """Keep the first chunks whose prompts have at most `max_blocks` blocks that are not computed, and at least one
        chunk. A step checks all blocks of a prompt from the chunk on."""
        num_blocks = 0
        for i, (state, _) in enumerate(self.chunks):
            num_blocks += checked_blocks(state.pending, block_size)
            if i and num_blocks > max_blocks:
                del self.chunks[i:]
                return

    def speculative(self, size: int) -> Int64Array:
        """Return the indices of the decodes with proposals in a decode set of this size."""
        if self.counts is None:
            return NO_SEQUENCES
        return np.arange(size)[self.which][self.counts > 1]

    def add_chunk(self, state: RequestState, long_prefill_tokens: int, kept: int = 0) -> None:
        """Give a prefill as much of the token budget as it may have, except `kept` tokens."""
        count = min(state.pending, self.tokens_left - kept)
        if long_prefill_tokens:
            count = min(count, long_prefill_tokens)
        if count:
            self.chunks.append((state, count))
            self.tokens_left -= count


@dataclass(slots=True, eq=False)
class InFlight:
    """A batch that is not reported, its step and its draft, without the decodes that have ended since.

    `unknown` bool[n] are the decodes whose token is not known, because the batch before samples it, or None. `advanced`
    says that the progress of its sequences is counted, because the next batch was made. `ended` are sequences that
    ended with the report before, and are freed with that of this batch.
    """

    batch: ScheduledBatch
    step: StepPlan
    draft: Draft
    unknown: BoolArray | None = None
    advanced: bool = False
    ended: list[int] = field(default_factory=list)

    def advance(self, decodes: DecodeSet) -> None:
        """Count the progress of the batch, which does not depend on its tokens, unless it is counted."""
        if not self.advanced:
            self.advanced = True
            self.count(decodes, 1)

    def count(self, decodes: DecodeSet, sign: int) -> None:
        """Count the progress of the batch, or take it back with a sign of -1."""
        which, counts = self.draft.which, self.draft.counts
        if counts is not None:  # the progress of decodes with proposals depends on the report
            which = np.arange(len(decodes))[which][counts == 1]
        decodes.lengths[which] += sign
        decodes.generated[which] += sign
        for state, count in self.draft.chunks:
            state.pending -= sign * count

    def counts_token(self, at: int, size: int) -> bool:
        """Return whether the progress of the decode at this index of a decode set of this size is counted already."""
        if not self.advanced or not np.count_nonzero(np.arange(size)[self.draft.which] == at):
            return False
        return not np.count_nonzero(self.draft.speculative(size) == at)

    def keep(self, kept: BoolArray) -> None:
        """Follow a change of the decode set, of which only the decodes in `kept` bool[n] remain."""
        draft = self.draft
        mine = kept[draft.which]
        if draft.all_decodes:
            draft.decodes = draft.decodes[mine]
        else:
            draft.decodes = (np.cumsum(kept) - 1)[draft.decodes[mine]]
        if draft.counts is not None:
            draft.counts = draft.counts[mine]
        if self.unknown is not None:
            self.unknown = self.unknown[mine]


def add_proposals(decodes: DecodeSet, draft: Draft) -> None:
    """Add the proposals of a draft's decodes that the token budget and their limits allow."""
    which = draft.which
    left = decodes.limits[which] - decodes.generated[which] - 1
    wanted = np.minimum(decodes.proposed[which], left)
    allowed: Int64Array = np.clip(draft.tokens_left - (np.cumsum(wanted) - wanted), 0, wanted)
    decodes.proposed[which] = allowed
    if np.count_nonzero(allowed):
        draft.counts = allowed + 1
        draft.tokens_left -= int(allowed.sum())


def tokens_with_proposals(decodes: DecodeSet, draft: Draft) -> Int32Array:
    """Return the next token of each decode and its proposals: int32[sum(draft.counts)]."""
    assert draft.counts is not None, "the draft has proposals"
    which = draft.which
    tokens = np.concatenate([decodes.tokens[which][:, None], decodes.proposals[which]], axis=1)
    chosen: Int32Array = tokens[np.arange(tokens.shape[1]) < draft.counts[:, None]]
    return chosen
