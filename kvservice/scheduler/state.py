"""The queues of one engine, as one value that the parts of its scheduler share, and the draft of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvservice.blocks import BlockManager, SessionNamespace, StepPlan, SwapPlan
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.scheduler.batches import NO_SEQUENCES, Preemption, ScheduledBatch
from kvservice.scheduler.config import SchedulerConfig, Speeds
from kvservice.scheduler.decoding import DecodeSet
from kvservice.scheduler.requests import Phase, RequestGroup, RequestState
from kvservice.scheduler.stats import SchedulerCounters
from kvservice.scheduler.waiting import WaitingQueue


class EngineQueues:
    """All requests of one engine: `requests` by id, and the `states` of their samples by sequence id, each of them also
    in one of `waiting`, `prefilling`, `decodes` and `swapped`.

    `flight` are the batches that are not reported, the oldest first. `aborted` are the ids of aborted requests of which
    some samples are in one of them. `reserved` has the request of each sequence id that is not the first of its
    request. `computing` are the chain hashes of the blocks that running prefills compute.
    """

    def __init__(
        self,
        manager: BlockManager,
        namespace: SessionNamespace,
        config: SchedulerConfig,
        counters: SchedulerCounters,
    ) -> None:
        self.manager, self.namespace, self.config = manager, namespace, config
        self.requests: dict[int, RequestGroup] = {}
        self.states: dict[int, RequestState] = {}
        self.reserved: dict[int, RequestGroup] = {}
        self.waiting = WaitingQueue()
        self.prefilling: dict[int, RequestState] = {}
        capacity = min(config.max_running, manager.config.max_sequences)
        self.decodes = DecodeSet(capacity, manager.config, config.lookahead)
        self.swapped = WaitingQueue()
        self.computing: set[bytes] = set()
        self.speeds = Speeds(config.swap_block_s, config.compute_token_s)
        self.flight: list[InFlight] = []
        self.aborted: list[int] = []
        self.counters = counters
        self._num_prefilling = 0

    def clear(self) -> None:
        """Forget all samples, for an engine that is closed."""
        for container in (self.requests, self.states, self.reserved, self.prefilling, self.flight):
            container.clear()
        self.waiting, self.swapped = WaitingQueue(), WaitingQueue()

    @property
    def num_running(self) -> int:
        """Number of running sequences, with those that prompts will have when they are computed."""
        return len(self.decodes) + self._num_prefilling

    @property
    def num_promised(self) -> int:
        """Number of sequences that prompts will have when they are computed, besides those that they have."""
        return self._num_prefilling - len(self.prefilling)

    def held_blocks(self) -> int:
        """Return the table entries of the running sequences."""
        return int(self.decodes.blocks.sum()) + sum(state.blocks for state in self.prefilling.values())

    def blocks_of(self, unit: list[RequestState]) -> int:
        """Return the table entries of running sequences."""
        blocks = self.decodes.blocks
        return sum(
            state.blocks if state.phase is Phase.PREFILLING else int(blocks[self.decodes.index(state.sequence_id)])
            for state in unit
        )

    def tail_copies(self) -> tuple[BoolArray, int] | None:
        """Return which decodes write to a block that others share (bool[n]), and how many copies all of them need
        together; None if there is no such block."""
        decodes = self.decodes
        if not decodes.sharing or not len(decodes):
            return None
        blocks, holders = self.manager.tail_blocks(self.namespace, decodes.ids)
        shared = holders > 1
        decodes.sharing = bool(np.count_nonzero(shared))
        if not decodes.sharing:
            return None
        _, first, writers = np.unique(blocks[shared], return_index=True, return_counts=True)
        return shared, int((writers - (writers == holders[shared][first])).sum())

    def needed_blocks(self) -> int:
        """Return how many blocks all decodes need for their next tokens and the lookahead."""
        copies = self.tail_copies()
        return int(self.decodes.needs().sum()) + (copies[1] if copies else 0)

    def start_prefill(self, state: RequestState) -> None:
        """Add a sequence to the prefilling ones."""
        state.phase = Phase.PREFILLING
        self.prefilling[state.sequence_id] = state
        self._num_prefilling += state.num_places

    def end_prefill(self, state: RequestState) -> None:
        """Remove a sequence from the prefilling ones."""
        del self.prefilling[state.sequence_id]
        self._num_prefilling -= state.num_places
        self.computing.difference_update(state.hashes)

    def tokens_of(self, state: RequestState) -> Int32Array:
        """Return the tokens of a sample, int32[n]: the prompt and all that are generated."""
        if state.phase in (Phase.WAITING, Phase.PREFILLING):
            return np.append(state.tokens, np.int32(state.next_token)) if state.resumes else state.tokens
        (snapshot,) = self.manager.describe(self.namespace, [state.sequence_id], include_tokens=True)
        assert snapshot.token_ids is not None, "they were asked for"
        if state.phase is Phase.SWAPPED:
            return np.append(snapshot.token_ids, np.int32(state.next_token))
        at = self.decodes.index(state.sequence_id)
        length = int(self.decodes.lengths[at])
        if self.flight and self.flight[0].counts_token(at, len(self.decodes)):
            length -= 1  # the token after these is not reported yet
        return np.append(snapshot.token_ids[:length], self.decodes.tokens[at])

    def has_in_flight(self, sequence_ids: list[int]) -> bool:
        """Return whether a batch in flight computes one of these sequences."""
        return any(bool(np.isin(one.step.sequence_ids, sequence_ids).any()) for one in self.flight)

    def in_flight(self, group: RequestGroup) -> bool:
        """Return whether a batch in flight computes a sample of a request."""
        return bool(self.flight) and self.has_in_flight([state.sequence_id for state in group.members])

    def keep_decodes(self, kept: BoolArray) -> None:
        """Remove the decodes that are not in `kept` bool[n], also from the batches in flight."""
        for flight in self.flight:
            flight.keep(kept)
        self.decodes.keep(kept)

    def leave_decodes(self, state: RequestState) -> int:
        """Remove a sequence from the decoding ones, and note its progress. Returns its next token."""
        decodes = self.decodes
        at = decodes.index(state.sequence_id)
        state.generated, state.blocks = int(decodes.generated[at]), int(decodes.blocks[at])
        token, state.token_at_s = int(decodes.tokens[at]), decodes.times.at(at)
        kept = np.ones(len(decodes), np.bool_)
        kept[at] = False
        self.keep_decodes(kept)
        return token

    def running_by_rank(self) -> list[list[RequestState]]:
        """Return the running samples, the first of the queue's order first: each alone, but all beams of a request
        together."""
        running = [self.states[sequence_id] for sequence_id in self.decodes.ids.tolist()]
        ordered = sorted([*running, *self.prefilling.values()], key=lambda state: state.rank)
        return [state.unit for state in ordered if state is state.unit[0]]

    def owner(self, sequence_id: int) -> RequestGroup:
        """Return the request of a sequence, which may be a sample that is not forked yet."""
        return self.reserved.get(sequence_id) or self.requests[sequence_id]

    def add(self, state: RequestState) -> None:
        """Queue a new request, whose first sample this is."""
        group = state.group
        group.members.append(state)
        self.requests[group.request_id] = group
        self.reserved.update(dict.fromkeys(group.reserved_ids, group))
        self.states[state.sequence_id] = state
        self.waiting.add(state)

    def forget(self, group: RequestGroup) -> None:
        """Remove a request that has no samples any more."""
        del self.requests[group.request_id]
        for sequence_id in group.reserved_ids:
            del self.reserved[sequence_id]

    def withdraw(self, state: RequestState) -> None:
        """Remove a sample from its queue and from the block manager. No batch that has it is in progress."""
        if state.phase is Phase.WAITING:
            self.waiting.discard(state)
        else:
            if state.phase is Phase.PREFILLING:
                self.end_prefill(state)
            elif state.phase is Phase.DECODING:
                self.leave_decodes(state)
            else:
                self.swapped.discard(state)
            self.manager.free(self.namespace, [state.sequence_id])
        del self.states[state.sequence_id]


def checked_blocks(pending: int, block_size: int) -> int:
    """Return how many blocks a step checks at most, for a prompt with so many tokens that are not computed."""
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
        """The indices of the decodes in the decode set."""
        return slice(0, len(self.decodes)) if self.all_decodes else self.decodes

    def limit_pending(self, max_blocks: int, block_size: int) -> None:
        """Keep the first chunks whose prompts have at most so many blocks that are not computed, and at least one. A
        step checks all blocks of a prompt from the chunk on."""
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
    """A batch that is not reported, its step and its draft, whose decodes are those that have not ended since.

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
        """Follow a change of the decode set, of which only `kept` bool[n] remain."""
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
