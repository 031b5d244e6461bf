"""The samples of a request, which are forked from the first when the prompt is computed, and end one by one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

import numpy as np

from kvservice.scheduler.requests import RUNNING, Phase, RequestGroup, RequestState
from kvservice.scheduler.state import EngineQueues

# Preempted requests at the head of the queue whose cached blocks are kept longest.
_MAX_TOUCHED: Final = 8


class Samples:
    """Starts and ends the samples of an engine's requests."""

    def __init__(self, queues: EngineQueues) -> None:
        self._queues, self._config = queues, queues.config
        self._manager, self._namespace = queues.manager, queues.namespace

    def start(self, first: RequestState, tokens: list[int], finished: set[int]) -> list[int]:
        """Let a sequence decode whose prefill has ended. Before the fork, the other samples of its request start with
        it, and `tokens` has a token for each sample. A beam that resumes gets none. Returns the sequences that are
        over already."""
        first.phase = Phase.DECODING
        if first.resumes:
            first.resumes = False
            self._queues.decodes.add(first, len(first.tokens), first.next_token)
            return []
        first.generated += 1
        forks = len(tokens) > 1
        if forks and self._config.lookahead:  # the samples do not share the blocks that are reserved for the first
            self._manager.truncate(self._namespace, [first.sequence_id], [len(first.tokens)])
            first.blocks = self._manager.config.num_blocks_for(len(first.tokens))
        self._queues.decodes.add(first, len(first.tokens), tokens[0])
        over = first.generated >= first.limit or first.sequence_id in finished
        if forks:
            self._fork(first, self._others(first, tokens[1:], finished), over)
        first.group.forked = True
        return [first.sequence_id] if over else []

    def _others(self, first: RequestState, tokens: list[int], finished: set[int]) -> list[RequestState]:
        """Make the other samples, except those that this token ends."""
        group, others = first.group, list[RequestState]()
        for i, token in enumerate(tokens, start=1):
            sample = first.sibling(i)
            if sample.limit <= 1 or sample.sequence_id in finished:
                group.ended[sample.sequence_id] = np.append(first.tokens, np.int32(token))
                continue
            sample.next_token = token
            group.members.append(sample)
            self._queues.states[sample.sequence_id] = sample
            others.append(sample)
        return others

    def _fork(self, first: RequestState, others: list[RequestState], over: bool) -> None:
        """Fork the other samples. If there is no room for a sequence, its sample waits, and with beams all do."""
        queues, room = self._queues, len(self._manager.sequences.free_rows)
        if first.group.request.beams and room < len(others):
            self._park(others if over else [first, *others])
            return
        for sample in others[:room]:
            self._manager.fork(self._namespace, [first.sequence_id], [sample.sequence_id])
            queues.decodes.add(sample, len(first.tokens), sample.next_token)
            queues.decodes.sharing = True
        for sample in others[room:]:
            tokens = np.append(first.tokens, np.int32(sample.next_token))
            sample.continue_with(tokens, self._manager.config)
            sample.phase, sample.preempted, sample.lost = Phase.WAITING, True, len(first.tokens)
            queues.waiting.add(sample)

    def _park(self, beams: list[RequestState]) -> None:
        """Let beams wait together, which have a computed prompt and their first token."""
        for beam in beams:
            if beam.sequence_id in self._namespace:
                beam.next_token = self._queues.leave_decodes(beam)
                self._manager.free(self._namespace, [beam.sequence_id])
            beam.phase, beam.blocks, beam.resumes = Phase.WAITING, 0, True
            beam.preempted, beam.lost, beam.looked_up = True, len(beam.tokens), False
        self._queues.waiting.add(beams[0], len(beams))

    def rearrange(self, parents: dict[int, int]) -> None:
        """Let beams continue their `parents`, which are beams of the same request after the same step."""
        queues, decodes = self._queues, self._queues.decodes
        by_request: dict[int, list[int]] = {}
        for sequence_id in parents:
            by_request.setdefault(queues.states[sequence_id].group.request_id, []).append(sequence_id)
        for ids in by_request.values():
            self._manager.rearrange(self._namespace, ids, [parents[sequence_id] for sequence_id in ids])
            for sequence_id, one in zip(ids, self._manager.describe(self._namespace, ids), strict=True):
                decodes.blocks[decodes.index(sequence_id)] = one.num_blocks
        decodes.sharing = True

    def end(self, over: Iterable[int], aborted: list[int]) -> list[int]:
        """Remove running sequences, and all samples of aborted requests. Returns the ids of the requests that are
        over."""
        queues = self._queues
        states = [queues.states[sequence_id] for sequence_id in over]
        groups = [queues.requests[request_id] for request_id in aborted]
        for state in itertools.chain.from_iterable(group.members for group in groups):
            if state.phase in RUNNING:
                states.append(state)
            else:
                queues.withdraw(state)
        states = list(dict.fromkeys(states))
        for state in states:
            del queues.states[state.sequence_id]
            if state.phase is Phase.PREFILLING:
                queues.end_prefill(state)
            state.group.members.remove(state)
            if state.group.members:
                state.group.ended[state.sequence_id] = queues.tokens_of(state)
        if states:
            self._free([state.sequence_id for state in states])
        ended = dict.fromkeys([*(state.group for state in states if not state.group.members), *groups])
        for group in ended:
            queues.forget(group)
        return [group.request_id for group in ended]

    def withdraw_idle(self, group: RequestGroup) -> None:
        """Remove the samples of an aborted request that are in no batch in flight."""
        for state in [state for state in group.members if not self._queues.has_in_flight([state.sequence_id])]:
            group.ended[state.sequence_id] = self._queues.tokens_of(state)
            group.members.remove(state)
            self._queues.withdraw(state)

    def _free(self, sequence_ids: list[int]) -> None:
        """Remove decodes, and free their sequences. A sequence of a batch in flight is freed with its report."""
        queues = self._queues
        queues.keep_decodes(~np.isin(queues.decodes.ids, sequence_ids))
        for flight in queues.flight:
            computed = set(sequence_ids).intersection(flight.step.sequence_ids.tolist())
            flight.ended += computed
            sequence_ids = [name for name in sequence_ids if name not in computed]
        if sequence_ids:
            self._manager.free(self._namespace, sequence_ids)
        for state in itertools.islice(self._queues.waiting, _MAX_TOUCHED):
            if state.preempted:  # it runs again soon, so blocks of the finished requests are evicted before its own
                self._manager.touch(state.hashes)
