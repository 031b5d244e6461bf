"""Preemption: when blocks are short, some decodes stall for a step, and the last request of the order is preempted.

A stalled sequence keeps its blocks and misses a step. A preempted one loses them, but its computed blocks stay in the
prefix cache, and the deepest are evicted first: when it runs again, only what others took meanwhile is recomputed, or
loaded by the server if a tier below the pool has it and that is faster.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.scheduler.batches import NO_SEQUENCES, Draft, Preemption, add_proposals
from kvservice.scheduler.config import PreemptionMode
from kvservice.scheduler.queues import EngineQueues
from kvservice.scheduler.requests import Phase, RequestState


class Preemptor:
    """Chooses the decodes of a step, and preempts requests."""

    def __init__(self, queues: EngineQueues) -> None:
        self._queues, self._config = queues, queues.config
        self._manager, self._namespace = queues.manager, queues.namespace

    def choose_decodes(self, draft: Draft) -> None:
        """Put all decodes into the draft that the token budget and the blocks allow."""
        decodes = self._queues.decodes
        growth = decodes.needs()
        needed = int(np.add.reduce(growth))
        copies = self._queues.tail_copies() if decodes.sharing else None
        if copies:
            needed += copies[1]
        restricted = (draft.ahead or decodes.has_beams) and not self._eligible(draft).all()
        if not restricted and len(decodes) <= draft.tokens_left and needed <= self._manager.device.num_available:
            draft.decodes, draft.growth, draft.all_decodes = decodes.ids, growth, True
        else:
            chosen = self._choose(draft, restricted)
            draft.decodes, draft.growth = chosen, decodes.needs()[chosen]
            needed = int(self._needs()[chosen].sum())
        draft.needed += needed
        draft.tokens_left -= len(draft.decodes)
        if decodes.speculating:
            add_proposals(decodes, draft)

    def _eligible(self, draft: Draft) -> BoolArray:
        """Return which decodes may be in a batch: bool[n]. Beams wait for others of their request
        that are in their prefill. While another batch is in flight, no beams may be in this one, nor sequences whose
        last token is sampled, nor samples of aborted requests."""
        queues, decodes = self._queues, self._queues.decodes
        eligible: BoolArray = decodes.generated < decodes.limits
        if decodes.has_beams:
            held = [state.group.number for state in queues.prefilling.values() if state.resumes]
            eligible &= decodes.beams == 0 if draft.ahead else ~np.isin(decodes.beams, held)
        if queues.flight:
            eligible[queues.flight[0].draft.speculative(len(decodes))] = False
        if queues.aborted:
            members = itertools.chain.from_iterable(queues.requests[one].members for one in queues.aborted)
            eligible &= ~np.isin(decodes.ids, [state.sequence_id for state in members])
        return eligible

    def _choose(self, draft: Draft, restricted: bool) -> Int64Array:
        """Return the indices of the decodes to run, with `restricted` only eligible ones; preempt until few enough of
        them lack a block."""
        decodes = self._queues.decodes
        while len(decodes) and not draft.blocked:
            order = decodes.by_rank()
            if restricted:
                order = order[self._eligible(draft)[order]]
            order = self._within(order, draft.tokens_left)
            growth = self._needs()[order]
            served = decodes.whole(order[(np.cumsum(growth) <= self._manager.device.num_available) | (growth == 0)])
            unserved = len(order) - len(served)
            if not unserved or (unserved <= self._max_stalled(len(order)) and unserved < len(order)):
                draft.num_stalled = unserved
                draft.short |= unserved > 0
                return np.sort(served)
            self.preempt_one(draft)
        return NO_SEQUENCES

    def _within(self, order: Int64Array, num_tokens: int) -> Int64Array:
        """Return the first of these decodes, one token each, but no beams of which not all fit."""
        decodes = self._queues.decodes
        while True:
            first = order[:num_tokens]
            chosen = decodes.whole(first)
            if len(chosen) == len(first):
                return chosen
            order = order[~np.isin(decodes.beams[order], np.setdiff1d(decodes.beams[first], decodes.beams[chosen]))]

    def _needs(self) -> Int64Array:
        """Return how many blocks each decode may need at most, copies of shared blocks included: int64[n]."""
        growth, copies = self._queues.decodes.needs(), self._queues.tail_copies()
        return growth + copies[0] if copies else growth

    def _max_stalled(self, num_decodes: int) -> int:
        fraction = self._config.max_stalled_fraction
        return max(1, int(fraction * num_decodes)) if fraction else 0

    def make_room(self, draft: Draft, num_missing: int, above: tuple[int, float, int]) -> bool:
        """Preempt requests of lower priority than that of the rank `above` for this many missing blocks. Returns False,
        with nothing changed, if all of them together do not hold enough."""
        victims = [unit for unit in self._queues.running_by_rank() if unit[0].rank[0] > above[0]]
        chosen: list[list[RequestState]] = []
        while num_missing > 0 and victims:
            unit = victims.pop()
            chosen.append(unit)
            num_missing -= self._queues.blocks_of(unit)
        if num_missing > 0:
            return False
        if draft.ahead:
            draft.blocked = bool(chosen)
            return False
        for unit in chosen:
            self.preempt(unit, draft)
        return bool(chosen)

    def preempt_one(self, draft: Draft) -> None:
        """Preempt one running request, because its blocks are needed: of the lowest priority, the one with the fewest
        blocks, so that least is recomputed. The first of the order is only preempted if it is alone, so it always goes
        on, and no request starves."""
        draft.short = True
        if draft.ahead:
            draft.blocked = True
            return
        running = self._queues.running_by_rank()
        lowest = [unit for unit in running[1:] if unit[0].rank[0] == running[-1][0].rank[0]] or running
        self.preempt(min(reversed(lowest), key=self._queues.blocks_of), draft)

    def preempt(self, unit: list[RequestState], draft: Draft) -> None:
        """Preempt a running sequence, or all beams of a request, by swap or by recomputation."""
        queues, decodes = self._queues, self._queues.decodes
        ids = [state.sequence_id for state in unit]
        if any(state.phase is Phase.PREFILLING for state in unit):
            self.recompute(unit, draft)
            return
        lengths = [int(decodes.lengths[decodes.index(sequence_id)]) for sequence_id in ids]
        if not self._swap_is_better(unit, ids, sum(lengths)):
            self.recompute(unit, draft)
            return
        draft.swapped_out.append(self._manager.swap_out(self._namespace, ids))  # if it fails, nothing has changed
        for state, length in zip(unit, lengths, strict=True):
            state.next_token = queues.leave_decodes(state)
            state.phase = Phase.SWAPPED
            draft.preempted.append(Preemption(state.sequence_id, length, swapped=True))
        queues.wait_swapped(unit)

    def recompute(self, unit: list[RequestState], draft: Draft) -> None:
        """Preempt running sequences, which compute their tokens again when they go on."""
        queues = self._queues
        decoded = {one.sequence_id: queues.tokens_of(one) for one in unit if one.phase is Phase.DECODING}
        self._manager.free(self._namespace, [state.sequence_id for state in unit])  # if it fails, nothing has changed
        for state in unit:
            if state.phase is Phase.PREFILLING:
                queues.end_prefill(state)
                computed = len(state.tokens) - state.pending
            else:
                tokens = decoded[state.sequence_id]
                queues.leave_decodes(state)
                computed = len(tokens) - 1
                state.resumes, state.next_token = state.group.request.beams, int(tokens[-1])
                state.continue_with(tokens[:-1] if state.resumes else tokens, self._manager.config)
            state.phase, state.pending, state.blocks, state.preempted = Phase.WAITING, 0, 0, True
            state.lost, state.looked_up = computed, False
            draft.preempted.append(Preemption(state.sequence_id, computed, swapped=False))
        queues.wait(unit)

    def _swap_is_better(self, unit: list[RequestState], ids: list[int], num_tokens: int) -> bool:
        mode, speeds = self._config.preemption, self._queues.speeds
        if mode is PreemptionMode.RECOMPUTE or not self._manager.config.num_swap_blocks:
            return False
        costs_less = 2 * self._queues.blocks_of(unit) * speeds.swap_block_s < num_tokens * speeds.compute_token_s
        wanted = mode is PreemptionMode.SWAP or costs_less
        return wanted and self._manager.can_swap_out(self._namespace, ids)
