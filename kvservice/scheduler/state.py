"""The queues of one engine, one value that the parts of its scheduler share."""

from __future__ import annotations

import numpy as np

from kvservice.blocks import BlockManager, SessionNamespace
from kvservice.blocks.plans import BoolArray, Int32Array
from kvservice.scheduler.config import SchedulerConfig, Speeds
from kvservice.scheduler.decoding import DecodeSet
from kvservice.scheduler.drafts import InFlight
from kvservice.scheduler.requests import Phase, RequestGroup, RequestState
from kvservice.scheduler.stats import SchedulerCounters
from kvservice.scheduler.waiting import WaitingQueue


class EngineQueues:
    """All requests of one engine: `requests` by id, and the `states` of their samples by sequence id, each of them also
    in one of `waiting`, `prefilling`, `decodes` and `swapped`.

    `flight` are the batches that are not reported, the oldest first. `aborted` are the ids of aborted requests of which
    some samples are in one of them. `reserved` has the request of each sequence id that is not the first of its
    request. `computing` are the chain hashes of the blocks that running prefills compute, and `loading` those that are
    being loaded into the pool.
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
        self.loading: set[bytes] = set()
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
