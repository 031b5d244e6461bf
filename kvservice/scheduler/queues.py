"""The queues of one engine, one value that the parts of its scheduler share, and descriptions of their requests."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlockManager, SessionNamespace
from kvservice.blocks.arguments import int64_array
from kvservice.blocks.plans import BoolArray, Int32Array
from kvservice.errors import InvalidArgumentError, UnknownSequenceError
from kvservice.scheduler.batches import DecodeSet, InFlight
from kvservice.scheduler.config import SchedulerConfig, Speeds
from kvservice.scheduler.requests import Phase, RequestGroup, RequestState
from kvservice.scheduler.stats import SchedulerFigures


class WaitingQueue:
    """Waiting requests in the order of their ranks, which are distinct. The first is admitted first. A sample waits
    alone; of beams that wait together the first stands for all. `num_samples` counts them all."""

    def __init__(self) -> None:
        self._ranks: list[tuple[int, float, int]] = []
        self._states: list[RequestState] = []
        self._sizes: list[int] = []
        self.num_samples = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def __contains__(self, state: object) -> bool:
        """Return whether a request is at its place in the queue."""
        if not isinstance(state, RequestState):
            return False
        at = bisect.bisect_left(self._ranks, state.rank)
        return at < len(self._states) and self._states[at] is state

    def add(self, state: RequestState, num_samples: int = 1) -> None:
        """Insert a request at its place. It stands for `num_samples` beams."""
        at = bisect.bisect_left(self._ranks, state.rank)
        self._ranks.insert(at, state.rank)
        self._states.insert(at, state)
        self._sizes.insert(at, num_samples)
        self.num_samples += num_samples

    def remove(self, state: RequestState) -> None:
        """Remove a request that is in the queue."""
        at = bisect.bisect_left(self._ranks, state.rank)
        assert self._states[at] is state, "every waiting request is at its rank"
        del self._ranks[at]
        del self._states[at]
        self.num_samples -= self._sizes.pop(at)

    def discard(self, state: RequestState) -> None:
        """Remove a request if it is in the queue. Of beams, only the first is."""
        if state in self:
            self.remove(state)

    def oldest_arrival_s(self) -> float:
        """Return the earliest arrival of the queue, which is not empty."""
        return min(state.arrived_at_s for state in self._states)


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
        counters: SchedulerFigures,
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


# ---- Descriptions of requests, with all their tokens: an engine that starts again goes on from them


@dataclass(frozen=True, slots=True, eq=False)
class SampleSnapshot:
    """Description of a sample. `token_ids` int32[n] are the prompt and all `num_generated` reported tokens. A finished
    sample of a request that goes on has no blocks any more."""

    sequence_id: int
    finished: bool
    num_generated: int
    token_ids: Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class RequestSnapshot:
    """Description of a request: the phase of its first sample that is not finished, all samples in the order of their
    ids, and the extra keys of the request."""

    request_id: int
    phase: Phase
    samples: tuple[SampleSnapshot, ...]
    extra_keys: Sequence[tuple[int, bytes]]


def describe_requests(
    queues: EngineQueues, request_ids: npt.ArrayLike | None, first: int, limit: int | None
) -> list[RequestSnapshot]:
    """See EngineScheduler.describe."""
    if request_ids is None:
        chosen = itertools.islice(queues.requests.values(), min(first, len(queues.requests)), None)
        return [_describe(queues, group) for group in itertools.islice(chosen, limit)]
    ids = int64_array(request_ids, "request_ids").tolist()
    for i, request_id in enumerate(ids):
        if request_id < 0:
            raise InvalidArgumentError("must not be negative", field=f"request_ids[{i}]")
        if request_id not in queues.requests:
            raise UnknownSequenceError(
                f"request {request_id} is unknown or finished", field=f"request_ids[{i}]", sequence_id=request_id
            )
    return [_describe(queues, queues.requests[request_id]) for request_id in ids]


def _describe(queues: EngineQueues, group: RequestGroup) -> RequestSnapshot:
    """Describe one request."""
    samples = []
    for sequence_id in range(group.request_id, group.request_id + group.request.width):
        state, finished = queues.states.get(sequence_id), sequence_id in group.ended
        if finished:
            tokens = group.ended[sequence_id]
        else:  # before the fork, all samples have the first one's tokens
            tokens = queues.tokens_of(group.members[0] if state is None else state)
        samples.append(SampleSnapshot(sequence_id, finished, len(tokens) - group.num_prompt_tokens, tokens))
    request = group.request
    return RequestSnapshot(group.request_id, group.members[0].phase, tuple(samples), request.extra_keys)
