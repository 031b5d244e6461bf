"""Relief when blocks are short: some decodes stall for a step, and the last request of the order is preempted.

A stalled sequence keeps its blocks and misses a step. A preempted one loses them, but its computed blocks stay in the
prefix cache, and the deepest are evicted first: when it runs again, only what others took meanwhile is recomputed.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.scheduler.batches import NO_SEQUENCES, Preemption
from kvservice.scheduler.config import PreemptionMode
from kvservice.scheduler.requests import Phase, RequestState
from kvservice.scheduler.state import Draft, EngineQueues


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
        eligible = self._eligible() if draft.ahead else None
        if eligible is None and len(decodes) <= draft.tokens_left and needed <= self._manager.num_available:
            draft.decodes, draft.growth, draft.all_decodes = decodes.ids, growth, True
        else:
            chosen = self._choose(draft, eligible)
            draft.decodes, draft.growth = chosen, decodes.needs()[chosen]
            needed = int(self._needs()[chosen].sum())
        draft.needed += needed
        draft.tokens_left -= len(draft.decodes)

    def _eligible(self) -> BoolArray | None:
        """Return which decodes may be in a batch while another one is in flight: bool[n], or None if all may."""
        queues, decodes = self._queues, self._queues.decodes
        eligible: BoolArray = decodes.generated < decodes.limits
        if queues.aborted:
            members = itertools.chain.from_iterable(queues.requests[one].members for one in queues.aborted)
            eligible &= ~np.isin(decodes.ids, [state.sequence_id for state in members])
        return None if eligible.all() else eligible

    def _choose(self, draft: Draft, eligible: BoolArray | None) -> Int64Array:
        """Return the indices of the eligible decodes to run; preempt until few enough of them lack a block."""
        decodes = self._queues.decodes
        while len(decodes) and not draft.blocked:
            order = decodes.by_rank()
            if eligible is not None:
                order = order[eligible[order]]
            order = order[: draft.tokens_left]
            growth = self._needs()[order]
            served = (np.cumsum(growth) <= self._manager.num_available) | (growth == 0)
            unserved = int(np.count_nonzero(~served))
            if not unserved or (unserved <= self._max_stalled(len(order)) and unserved < len(order)):
                draft.num_stalled = unserved
                draft.short |= unserved > 0
                return np.sort(order[served])
            self.preempt_one(draft)
        return NO_SEQUENCES

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
        victims = [state for state in self._queues.running_by_rank() if state.rank[0] > above[0]]
        chosen: list[RequestState] = []
        while num_missing > 0 and victims:
            state = victims.pop()
            chosen.append(state)
            num_missing -= self._queues.blocks_of(state)
        if num_missing > 0:
            return False
        if draft.ahead:
            draft.blocked = bool(chosen)
            return False
        for state in chosen:
            self.preempt(state, draft)
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
        lowest = [state for state in running[1:] if state.rank[0] == running[-1].rank[0]] or running
        self.preempt(min(reversed(lowest), key=self._queues.blocks_of), draft)

    def preempt(self, state: RequestState, draft: Draft) -> None:
        """Preempt a running sequence by swap or by recomputation."""
        queues = self._queues
        if state.phase is Phase.PREFILLING:
            self.recompute(state, draft)
            return
        length = int(queues.decodes.lengths[queues.decodes.index(state.sequence_id)])
        if not self._swap_is_better(state, length):
            self.recompute(state, draft)
            return
        state.next_token = queues.leave_decodes(state)
        draft.swapped_out.append(self._manager.swap_out(self._namespace, [state.sequence_id]))
        state.phase = Phase.SWAPPED
        queues.swapped.add(state)
        draft.preempted.append(Preemption(state.sequence_id, length, swapped=True))

    def recompute(self, state: RequestState, draft: Draft) -> None:
        """Preempt a running sequence, which computes its tokens again when it goes on."""
        queues = self._queues
        if state.phase is Phase.PREFILLING:
            queues.end_prefill(state)
            computed = len(state.tokens) - state.pending
        else:
            state.continue_with(queues.tokens_of(state), self._manager.config)
            queues.leave_decodes(state)
            computed = len(state.tokens) - 1
        self._manager.free(self._namespace, [state.sequence_id])
        state.phase, state.pending, state.blocks, state.preempted = Phase.WAITING, 0, 0, True
        state.lost = computed
        self._queues.waiting.add(state)
        draft.preempted.append(Preemption(state.sequence_id, computed, swapped=False))

    def _swap_is_better(self, state: RequestState, length: int) -> bool:
        mode, config = self._config.preemption, self._config
        if mode is PreemptionMode.RECOMPUTE or not self._manager.config.num_swap_blocks:
            return False
        costs_less = 2 * self._queues.blocks_of(state) * config.swap_block_s < length * config.compute_token_s
        wanted = mode is PreemptionMode.SWAP or costs_less
        return wanted and self._manager.can_swap_out(self._namespace, [state.sequence_id])
