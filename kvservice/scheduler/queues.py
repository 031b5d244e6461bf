"""The queues of one engine, one value that the parts of its scheduler share, and descriptions of their requests."""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvservice.blocks import BlockManager, SessionNamespace
from kvservice.blocks.arguments import int64_array
from kvservice.blocks.plans import BoolArray, Int32Array
from kvservice.errors import InvalidArgumentError, UnknownSequenceError
from kvservice.scheduler.batches import DecodeSet, InFlight
from kvservice.scheduler.config import SchedulerConfig, Speeds
from kvservice.scheduler.requests import Phase, Request, RequestGroup, RequestState
from kvservice.scheduler.stats import SchedulerFigures


class Needs(NamedTuple):
    """The most blocks and sequences that a request has at one time, or that a tenant may have."""

    blocks: float
    sequences: float

    def within(self, limits: Needs) -> bool:
        return self.blocks <= limits.blocks and self.sequences <= limits.sequences


UNLIMITED: Final = Needs(math.inf, math.inf)


class _Waiting(NamedTuple):
    """A request of a queue. It stands for `num_samples` beams."""

    rank: tuple[int, float, int]
    state: RequestState
    num_samples: int
    needs: Needs


_rank = operator.attrgetter("rank")


class WaitingQueue:
    """Waiting requests in the order of their ranks, which are distinct. The first is admitted first. A sample waits
    alone; of beams that wait together the first stands for all. `num_samples` counts them all.

    Requests that need more than the limits, which were lowered after they came, are refused: they wait aside, where
    any number of them costs the others nothing, and return to their places when the limits allow them. Iteration leaves
    them out.
    """

    def __init__(self) -> None:
        self._admissible: list[_Waiting] = []
        self._refused: list[_Waiting] = []
        self._limits = UNLIMITED
        self.num_samples = 0

    def __len__(self) -> int:
        """Number of all requests, refused ones too."""
        return len(self._admissible) + len(self._refused)

    def __iter__(self) -> Iterator[RequestState]:
        return (waiting.state for waiting in self._admissible)

    def __contains__(self, state: object) -> bool:
        """Return whether a request is at its place in the queue, or among the refused ones."""
        return isinstance(state, RequestState) and self._find(state) is not None

    def limit(self, limits: Needs) -> None:
        """Refuse requests that need more than these limits, and no others. Costs time only if they have changed."""
        if limits == self._limits:
            return
        self._limits = limits
        everyone = sorted([*self._admissible, *self._refused], key=_rank)
        self._admissible = [waiting for waiting in everyone if waiting.needs.within(limits)]
        self._refused = [waiting for waiting in everyone if not waiting.needs.within(limits)]

    def add(self, state: RequestState, needs: Needs, num_samples: int = 1) -> None:
        """Insert a request at its place. It stands for `num_samples` beams."""
        waiting = self._admissible if needs.within(self._limits) else self._refused
        bisect.insort(waiting, _Waiting(state.rank, state, num_samples, needs), key=_rank)
        self.num_samples += num_samples

    def remove(self, state: RequestState) -> None:
        """Remove a request that is in the queue."""
        removed = self.discard(state)
        assert removed, "every waiting request is at its rank"

    def discard(self, state: RequestState) -> bool:
        """Remove a request if it is in the queue. Of beams, only the first is. Returns whether it was."""
        found = self._find(state)
        if found is None:
            return False
        waiting, at = found
        self.num_samples -= waiting.pop(at).num_samples
        return True

    def oldest_arrival_s(self) -> float:
        """Return the earliest arrival of the requests that are not refused, of which there is one."""
        return min(state.arrived_at_s for state in self)

    def _find(self, state: RequestState) -> tuple[list[_Waiting], int] | None:
        for waiting in (self._admissible, self._refused):
            at = bisect.bisect_left(waiting, state.rank, key=_rank)
            if at < len(waiting) and waiting[at].state is state:
                return waiting, at
        return None


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

    def wait(self, unit: list[RequestState]) -> None:
        """Add samples that wait together to the waiting ones."""
        self.waiting.add(unit[0], self._needs_of(unit), len(unit))

    def wait_swapped(self, unit: list[RequestState]) -> None:
        """Add samples that wait together to the swapped ones."""
        self.swapped.add(unit[0], self._needs_of(unit), len(unit))

    def _needs_of(self, unit: list[RequestState]) -> Needs:
        group = unit[0].group
        return self.needs(group.request, group.num_prompt_tokens, sum(state.num_places for state in unit))

    def needs(self, request: Request, num_tokens: int, num_sequences: int) -> Needs:
        """Return what a request with a prompt of `num_tokens` needs, of which so many samples run at one time."""
        blocks = self.manager.config.num_blocks_for(num_tokens + request.max_tokens + self.config.lookahead)
        return Needs(blocks * (num_sequences if request.beams else 1), num_sequences)

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
        self.wait(state.unit)

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
