"""The draft of a batch, and the same batch while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvservice.blocks import StepPlan, SwapPlan
from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.scheduler.batches import NO_SEQUENCES, Preemption, ScheduledBatch
from kvservice.scheduler.decoding import DecodeSet
from kvservice.scheduler.requests import RequestState


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

    @property
    def which(self) -> slice | Int64Array:
        """Indices of the decodes in the decode set."""
        return slice(0, len(self.decodes)) if self.all_decodes else self.decodes

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
