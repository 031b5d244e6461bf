"""Admission chooses the swapped and waiting requests that join the batch."""

from __future__ import annotations

import itertools
from typing import Final

from kvservice.blocks import AllocStatus, FoundPrompt, SequenceSnapshot
from kvservice.scheduler.batches import Draft, checked_blocks
from kvservice.scheduler.config import BatchPolicy, QueueOrder
from kvservice.scheduler.preemption import Preemptor
from kvservice.scheduler.queues import EngineQueues
from kvservice.scheduler.requests import Phase, RequestState

# Waiting requests that one step looks at, so that requests held back cannot make a step slow.
_MAX_LOOKED_AT: Final = 64
# Requests that one step admits, or a few more, so that no step takes long.
_MAX_ADMITTED: Final = 256


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

    def preempt_for_priority(self, draft: Draft) -> None:
        """Preempt requests of lower priority if the first waiting request lacks blocks or a place."""
        first = next(iter(self._queues.waiting), None)
        if first is None or self._config.order is not QueueOrder.PRIORITY:
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
        if not len(self._queues.waiting) or self._delayed(now_s):
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
        most_urgent = min((state.rank[0] for state in itertools.islice(queues.waiting, 1)), default=None)
        for state in list(itertools.islice(queues.swapped, _MAX_LOOKED_AT)):
            if most_urgent is not None and state.rank[0] > most_urgent:
                return
            unit = state.unit
            ids = [one.sequence_id for one in unit]
            required = sum(map(self._blocks_to_decode, self._manager.describe(self._namespace, ids)))
            room = self._room(draft.needed, len(queues.decodes))
            if queues.num_running + len(unit) > draft.max_running or room < required:
                return
            if self._manager.can_swap_in(self._namespace, ids) is not AllocStatus.OK:
                return
            draft.swapped_in.append(self._manager.swap_in(self._namespace, ids))
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
        swapped = next(iter(queues.swapped), None)
        for state in itertools.islice(queues.waiting, _MAX_LOOKED_AT):
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
        sequences = self._manager.allocate_found(self._namespace, [prompt for _, prompt in picked])
        for i, ((state, _), new) in enumerate(zip(picked, sequences, strict=True), start=1):
            num_cached = len(new.found) << shift
            self._queues.counters.count_admission(state, num_cached)
            state.preempted = False
            state.pending = len(state.tokens) - num_cached
            state.blocks = new.required
            draft.needed += new.required - new.num_blocks
            self._queues.start_prefill(state)
            others = sum(other.group is state.group for other, _ in picked[i:])  # each of the beams gets a token
            draft.add_chunk(state, self._config.long_prefill_tokens, others)

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
