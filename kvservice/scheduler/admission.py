"""Admission and preemption decide who runs: swapped and waiting requests join the batch while there are blocks, and
give way when blocks are short.

When blocks are short, some decodes stall for a step, and the last request of the order is preempted. A stalled sequence
keeps its blocks and misses a step. A preempted one loses them, but its computed blocks stay in the prefix cache, and
the deepest are evicted first: when it runs again, only what others took meanwhile is recomputed, or loaded by the
server if a tier below the pool has it and that is faster.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

import numpy as np

from kvservice.blocks import AllocStatus, FoundPrompt, SequenceSnapshot
from kvservice.blocks.allocation import NewSequence
from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.errors import KVServiceError, OutOfBlocksError
from kvservice.scheduler.batches import NO_SEQUENCES, Draft, Preemption, add_proposals, checked_blocks
from kvservice.scheduler.config import BatchPolicy, PreemptionMode, QueueOrder
from kvservice.scheduler.queues import UNLIMITED, EngineQueues, Needs, WaitingQueue
from kvservice.scheduler.requests import Phase, Request, RequestState

# Waiting requests that one step looks at, so that requests held back cannot make a step slow.
_MAX_LOOKED_AT: Final = 64
# Requests that one step admits, or a few more, so that no step takes long.
_MAX_ADMITTED: Final = 256


# ---- Decodes and preemptions


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


# ---- Admission


class Admission:
    """Brings swapped and waiting requests into a draft, in their order, while the budgets and the blocks last."""

    def __init__(self, queues: EngineQueues, preemptor: Preemptor, max_blocks: int) -> None:
        self._queues, self._config, self._preemptor = queues, queues.config, preemptor
        # The most blocks that the prompts of one step may have.
        self._max_blocks = max_blocks
        self._manager, self._namespace = queues.manager, queues.namespace
        self._blocks_config = queues.manager.config
        self._last_prefill_at_s: float | None = None
        self._last_prefill_s = 0.0

    def refusal(self, request: Request, num_tokens: int, num_sequences: int) -> KVServiceError | None:
        """Return the error if the engine's tenant may never have what a request with a prompt of `num_tokens` needs, of
        which so many samples run at one time."""
        quota, blocks, owners = self._namespace.quota, self._blocks_config, self._manager.device.owners
        if quota is None:
            return None
        required = int(self._queues.needs(request, num_tokens, num_sequences).blocks)
        available = blocks.num_blocks - (0 if owners is None else owners.guaranteed_to_others(quota))
        if (error := quota.never(required, num_sequences)) or required <= available:
            return error
        return OutOfBlocksError(
            f"prompt and max_tokens need {required} blocks, and all but {available} are guaranteed to other tenants",
            tier="device", required=required, free=available, total=blocks.num_blocks, never=True, field="max_tokens",
        )  # fmt: skip

    def admissible(self, queue: WaitingQueue) -> Iterator[RequestState]:
        """Yield the requests of a queue in their order, without those that would be refused if they came now, because
        quotas are lower or guarantees higher than when they came. They wait until that changes, or they are
        aborted."""
        queue.limit(self._limits())
        return iter(queue)

    def _limits(self) -> Needs:
        """Return the most that the engine's tenant may ever have. A request that needs more has a `refusal`."""
        quota, owners = self._namespace.quota, self._manager.device.owners
        if quota is None:
            return UNLIMITED
        available = self._blocks_config.num_blocks - (0 if owners is None else owners.guaranteed_to_others(quota))
        return Needs(
            available if quota.max_blocks is None else min(available, quota.max_blocks),
            math.inf if quota.max_sequences is None else quota.max_sequences,
        )

    def preempt_for_priority(self, draft: Draft) -> None:
        """Preempt requests of lower priority if the first waiting request lacks blocks or a place."""
        if self._config.order is not QueueOrder.PRIORITY:
            return
        first = next(self.admissible(self._queues.waiting), None)
        if first is None:
            return
        missing = sum(self._find(state).num_consumed for state in first.unit)
        missing -= self._room(self._queues.needed_blocks(), 0)
        if self._queues.num_running + _places(first.unit) > draft.max_running:
            missing = max(missing, 1)
        if missing > 0:
            self._preemptor.make_room(draft, missing, first.rank)

    def admit(self, draft: Draft, now_s: float) -> None:
        """Bring in swapped requests, then waiting ones. Waiting ones wait for swapped ones of the same priority."""
        self._resume(draft)
        if next(self.admissible(self._queues.waiting), None) is None or self._delayed(now_s):
            return
        before = len(draft.chunks)
        while (
            draft.tokens_left > 0
            and len(draft.chunks) - before < _MAX_ADMITTED
            and len(self._queues.waiting)
            and (picked := self._pick(draft))
        ):
            self._start(picked, draft)
        if len(draft.chunks) > before:
            self._last_prefill_at_s = now_s

    def _resume(self, draft: Draft) -> None:
        """Swap in what fits and is not less urgent than a waiting request. The sequences decode from the next step
        on."""
        queues = self._queues
        first = next(self.admissible(queues.waiting), None)
        for state in list(itertools.islice(self.admissible(queues.swapped), _MAX_LOOKED_AT)):
            if first is not None and state.rank[0] > first.rank[0]:
                return
            unit = state.unit
            ids = [one.sequence_id for one in unit]
            required = sum(map(self._blocks_to_decode, self._manager.describe(self._namespace, ids)))
            room = self._room(draft.needed, len(queues.decodes))
            if queues.num_running + len(unit) > draft.max_running or room < required:
                return
            try:
                if self._manager.can_swap_in(self._namespace, ids) is not AllocStatus.OK:
                    return
                draft.swapped_in.append(self._manager.swap_in(self._namespace, ids))
            except Exception as error:  # it stays swapped out
                draft.failed[state.group] = error
                continue
            queues.swapped.remove(state)
            queues.decodes.sharing |= len(unit) > 1
            for one, snapshot in zip(unit, self._manager.describe(self._namespace, ids), strict=True):
                one.phase, one.blocks = Phase.DECODING, snapshot.num_blocks
                queues.decodes.add(one, snapshot.length, one.next_token)

    def _blocks_to_decode(self, swapped: SequenceSnapshot) -> int:
        """Return how many blocks a sequence needs to go on: those of its table, and of its next token and the lookahead
        past it."""
        length = swapped.length + 1 + self._config.lookahead
        return max(swapped.num_blocks, self._blocks_config.num_blocks_for(length))

    def _room(self, needed: int, num_running: int) -> int:
        """Return how many blocks new requests may take beside `needed` ones: above the watermark, and above what the
        running sequences need soon. With nothing running, only the watermark counts."""
        kept = self._blocks_config.watermark_blocks
        if num_running:
            kept = max(kept, self._queues.decodes.needs_within(self._config.reserve_steps))
        return self._manager.device.room(kept) - needed

    def _find(self, state: RequestState) -> FoundPrompt:
        """Look a waiting request up in the prefix cache."""
        return self._manager.find_prompt(
            state.sequence_id, state.tokens, state.extra, state.hashes, self._config.lookahead
        )

    def _pick(self, draft: Draft) -> list[tuple[RequestState, FoundPrompt]]:
        """Remove the requests from the queue that fit now, and return them with their prefix-cache hits."""
        queues, config = self._queues, self._config
        size, picked = self._blocks_config.block_size, list[tuple[RequestState, FoundPrompt]]()
        room = self._room(draft.needed, queues.num_running)
        places = min(draft.max_running - queues.num_running, self._manager.sequences.num_free - queues.num_promised)
        tokens_left, num_long = draft.tokens_left, self._num_long()
        checked = sum(checked_blocks(state.pending, size) for state, _ in draft.chunks)
        swapped = next(self.admissible(queues.swapped), None)
        for state in itertools.islice(self.admissible(queues.waiting), _MAX_LOOKED_AT):
            waits_for_swapped = swapped is not None and state.rank[0] >= swapped.rank[0]
            unit = state.unit
            if tokens_left < len(unit) or _places(unit) > places or waits_for_swapped:
                break
            prompts = [(one, self._find(one)) for one in unit]
            consumed = sum(prompt.num_consumed for _, prompt in prompts)
            pending = sum(len(one.tokens) - prompt.num_found * size for one, prompt in prompts)
            if any(self._is_held_back(one, prompt, num_long) for one, prompt in prompts):
                continue
            started = picked or draft.chunks
            if consumed > room or (config.batches is BatchPolicy.PREFILL_FIRST and pending > tokens_left and started):
                break
            checked += sum(checked_blocks(len(one.tokens) - prompt.num_found * size, size) for one, prompt in prompts)
            if checked > self._max_blocks and started:
                break  # a chunk of each is in this step, which then reserves its lookahead
            if consumed > draft.max_new_blocks and (picked or queues.num_running):
                break  # a request above the engine's share runs there alone
            picked += prompts
            places -= _places(unit)
            draft.max_new_blocks -= consumed
            room -= consumed
            for one, prompt in prompts:
                queues.computing.update(one.hashes[prompt.num_found :])
                room -= one.num_places * (-len(one.tokens) % size < config.reserve_steps)
                tokens_left -= self._chunk(len(one.tokens) - prompt.num_found * size)
                num_long += self._is_long(len(one.tokens) - prompt.num_found * size)
        for state, _ in picked:
            queues.waiting.discard(state)
        return picked

    def _start(self, picked: list[tuple[RequestState, FoundPrompt]], draft: Draft) -> None:
        """Allocate the sequences of picked requests, and give them their first chunks."""
        shift = self._blocks_config.block_shift
        started = self._allocate(picked, draft)
        left = Counter(state.group for state, _ in started)
        for state, new in started:
            num_cached = len(new.found) << shift
            self._queues.counters.count_admission(state, num_cached)
            state.preempted = False
            state.pending = len(state.tokens) - num_cached
            state.blocks = new.required
            draft.needed += new.required - new.num_blocks
            self._queues.start_prefill(state)
            left[state.group] -= 1  # each of the beams that follow gets a token
            draft.add_chunk(state, self._config.long_prefill_tokens, left[state.group])

    def _allocate(
        self, picked: list[tuple[RequestState, FoundPrompt]], draft: Draft
    ) -> list[tuple[RequestState, NewSequence]]:
        """Allocate the sequences of picked requests. A request for which that fails, fails alone."""
        states, prompts = [state for state, _ in picked], [prompt for _, prompt in picked]
        try:
            return list(zip(states, self._manager.allocate_found(self._namespace, prompts), strict=True))
        except Exception as error:  # nothing was allocated
            if len(states) == len(states[0].unit):
                draft.failed[states[0].group] = error
                for state, prompt in picked:
                    self._queues.computing.difference_update(state.hashes[prompt.num_found :])
                return []
        units = itertools.groupby(picked, lambda one: one[0].unit[0])
        return [one for _, unit in units for one in self._allocate(list(unit), draft)]

    def _is_held_back(self, state: RequestState, prompt: FoundPrompt, num_long: int) -> bool:
        """Return whether others may pass this request, because its next block is being computed or loaded, or because
        it is one long prompt too many."""
        limit, found = self._config.max_long_prefills, prompt.num_found
        pending = len(state.tokens) - found * self._blocks_config.block_size
        if limit and num_long >= limit and self._is_long(pending):
            return True
        if self._queues.loading and found < len(state.hashes) and state.hashes[found] in self._queues.loading:
            return True
        shares = self._config.share_prefixes and found < len(state.hashes)
        return shares and state.hashes[found] in self._queues.computing

    def _is_long(self, pending: int) -> bool:
        return 0 < self._config.long_prefill_tokens < pending

    def _num_long(self) -> int:
        if not self._config.max_long_prefills:
            return 0
        return sum(self._is_long(state.pending) for state in self._queues.prefilling.values())

    def _chunk(self, pending: int) -> int:
        limit = self._config.long_prefill_tokens
        return min(pending, limit) if limit else pending

    def _delayed(self, now_s: float) -> bool:
        """Apply the delay factor: while others run, collect prompts before the next prefill (vLLM v0)."""
        if not self._config.delay_factor:
            return False
        if self._last_prefill_at_s is not None:
            self._last_prefill_s, self._last_prefill_at_s = now_s - self._last_prefill_at_s, None
        if not self._queues.num_running:
            return False
        waited_s = now_s - self._queues.waiting.oldest_arrival_s()
        return waited_s <= self._config.delay_factor * self._last_prefill_s


def _places(unit: list[RequestState]) -> int:
    """Return how many sequences these samples are, or become when their prompt is computed."""
    return sum(state.num_places for state in unit)
