"""Allocation of sequences. The computed blocks of a prompt are shared through the prefix index.

`can_allocate` and `allocate` compute the same plan, so they cannot contradict each other.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvservice._ext import fill_sequences
from kvservice.blocks.arguments import extra_keys_by_block, int32_array, whole_number
from kvservice.blocks.namespaces import HIT_TOKENS, NO_STEP, QUERY_TOKENS, SessionNamespace
from kvservice.blocks.plans import Allocation, AllocationRequest, AllocStatus, Int32Array, Int64Array
from kvservice.blocks.sequences import SCHEDULED
from kvservice.blocks.slices import SLICE_SEQUENCES, Slices, Waits, in_turn
from kvservice.blocks.state import BlockState
from kvservice.errors import InvalidArgumentError

_NO_BLOCKS = np.zeros(0, np.int64)


class NewSequence(NamedTuple):
    """A validated request.

    `tokens` is int32[n]. `extra` maps block numbers to extra keys. `found` are the prefix-cache hits of the prompt, of
    which sequences hold at least `num_held`. `num_blocks` and `required` are the sizes of the block table without and
    with lookahead, in blocks.
    """

    sequence_id: int
    tokens: Int32Array
    extra: dict[int, bytes]
    found: Int64Array
    num_blocks: int
    required: int
    num_held: int = 0


# Called with new sequences before they are allocated. Returns what to wait for, or None. More of their blocks may be
# cached then.
BeforeAllocation: TypeAlias = Callable[[list[NewSequence]], Awaitable[object] | None]


class FoundPrompt(NamedTuple):
    """A prompt and its prefix-cache hits, from BlockManager.find_prompt. The hits are current in one `generation` of
    the state; `chain_hashes` find them again in a later one."""

    new: NewSequence
    chain_hashes: list[bytes]
    generation: int

    @property
    def num_found(self) -> int:
        """Number of prefix-cache hits, in blocks."""
        return len(self.new.found)

    @property
    def num_consumed(self) -> int:
        """Number of available blocks that the sequence takes at most, with its lookahead."""
        return self.new.required - self.new.num_held


@dataclass(frozen=True, slots=True)
class _Plan:
    """`hits` are the prefix-cache hits of all sequences. `required` is the number of blocks of all tables."""

    sequences: list[NewSequence]
    hits: Int64Array
    status: AllocStatus
    required: int


class Allocator:
    """Allocates sequences, and says whether they fit."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._sequences = state.device, state.sequences
        self._shift, self._mask = state.config.block_shift, state.config.block_mask

    def can_allocate(self, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> Slices[AllocStatus]:
        """See BlockManager.can_allocate. The answer describes the state at the last slice."""
        plan = yield from self._plan(namespace, requests)
        return plan.status

    def allocate(
        self, namespace: SessionNamespace, requests: Sequence[AllocationRequest], before: BeforeAllocation | None
    ) -> Waits[list[Allocation]]:
        """See BlockManager.allocate_in_slices. The last slice creates all sequences."""
        plan = yield from self._plan(namespace, requests)
        if before is not None and (event := before(plan.sequences)) is not None:
            yield event
            plan = yield from self._plan(namespace, requests)
        self._execute(namespace, plan)
        return [
            Allocation(new.sequence_id, len(new.tokens), len(new.found) << self._shift, new.num_blocks)
            for new in plan.sequences
        ]

    def find_prompt(
        self, sequence_id: int, tokens: Int32Array, extra: dict[int, bytes], chain_hashes: list[bytes], lookahead: int
    ) -> FoundPrompt:
        """See BlockManager.find_prompt."""
        found, num_held = self._device.match_hashes(chain_hashes, (len(tokens) - 1) >> self._shift)
        num_blocks, required = self._num_blocks(len(tokens)), self._num_blocks(len(tokens) + lookahead)
        new = NewSequence(sequence_id, tokens, extra, found, num_blocks, required, num_held)
        return FoundPrompt(new, chain_hashes, self._state.generation)

    def _num_blocks(self, num_tokens: int) -> int:
        return (num_tokens + self._mask) >> self._shift

    def allocate_found(self, namespace: SessionNamespace, prompts: list[FoundPrompt]) -> list[NewSequence]:
        """See BlockManager.allocate_found."""
        generation = self._state.generation
        sequences = [one.new if one.generation == generation else self._find_again(one) for one in prompts]
        self._state.enter(namespace)
        namespace.check_new_ids([new.sequence_id for new in sequences], "requests[{}].sequence_id")
        self._execute(namespace, self._plan_for(sequences), SCHEDULED)
        return sequences

    def _find_again(self, prompt: FoundPrompt) -> NewSequence:
        """Look up the hits of a prompt as they are now."""
        found, num_held = self._device.match_hashes(prompt.chain_hashes, (len(prompt.new.tokens) - 1) >> self._shift)
        return prompt.new._replace(found=found, num_held=num_held)

    def _execute(self, namespace: SessionNamespace, plan: _Plan, flags: int = 0) -> None:
        """Create the sequences of a plan that describes the current state, with these flags."""
        self._sequences.require_free_rows(len(plan.sequences), "requests")
        if plan.status is not AllocStatus.OK:
            never = plan.status is AllocStatus.NEVER
            raise self._device.out_of_blocks(plan.required, never=never, num_kept=self._config.watermark_blocks)
        if len(plan.hits):  # the hits are referenced before new blocks are allocated, so that they are not evicted
            self._device.incref_hits(plan.hits)
        self._create(namespace, plan.sequences, len(plan.hits), flags)

    def _plan(self, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> Slices[_Plan]:
        """Make the plan in slices. It describes the state at the last slice."""
        self._state.enter(namespace)
        if not requests:
            raise InvalidArgumentError("must not be empty", field="requests")
        if len(requests) <= SLICE_SEQUENCES:
            sequences = [self._check_request(request, f"requests[{i}]") for i, request in enumerate(requests)]
        else:
            sequences = yield from self._check_in_slices(requests)
            self._state.enter(namespace)
        namespace.check_new_ids([new.sequence_id for new in sequences], "requests[{}].sequence_id")
        return self._plan_for(sequences)

    def _plan_for(self, sequences: list[NewSequence]) -> _Plan:
        """Plan the allocation of sequences whose hits are those of the current state."""
        required = sum([new.required for new in sequences])
        hits = [new.found for new in sequences if len(new.found)]
        found = hits[0] if len(hits) == 1 else np.concatenate(hits) if hits else _NO_BLOCKS
        most_consumed = required - sum([new.num_held for new in sequences])
        status = self._allocation_status(len(sequences), required, most_consumed)
        if status is not AllocStatus.OK and hits:
            num_consumed = required + self._device.num_evictable(np.unique(found)) - len(found)
            status = self._allocation_status(len(sequences), required, num_consumed)
        return _Plan(sequences, found, status, required)

    def _check_in_slices(self, requests: Sequence[AllocationRequest]) -> Slices[list[NewSequence]]:
        """Validate the requests in slices. Prefix-cache hits count only if the index still has them after the last
        slice."""

        def checked() -> Iterator[tuple[NewSequence, list[Any]]]:
            for i, request in enumerate(requests):
                new = self._check_request(request, f"requests[{i}]")
                yield new, [self._device.hashes[block] for block in new.found.tolist()]

        return [self._still_found(*one) for one in (yield from in_turn(checked()))]

    def _still_found(self, new: NewSequence, hashes: list[bytes]) -> NewSequence:
        found, index = new.found.tolist(), self._device.index.blocks
        gone = (
            i for i, (block, chain_hash) in enumerate(zip(found, hashes, strict=True)) if index.get(chain_hash) != block
        )
        first = next(gone, len(found))
        return new if first == len(found) else new._replace(found=new.found[:first])

    def _allocation_status(self, num_sequences: int, required: int, num_consumed: int) -> AllocStatus:
        fits = self._device.num_available - num_consumed >= self._config.watermark_blocks
        if fits and num_sequences <= len(self._sequences.free_rows):
            return AllocStatus.OK
        if num_sequences > self._config.max_sequences:
            return AllocStatus.NEVER
        if self._config.num_blocks - required < self._config.watermark_blocks and not fits:
            return AllocStatus.NEVER
        return AllocStatus.LATER

    def _check_request(self, request: AllocationRequest, field: str) -> NewSequence:
        tokens = int32_array(request.token_ids, f"{field}.token_ids")
        limit = self._config.max_sequence_tokens
        if len(tokens) > limit:
            raise InvalidArgumentError(
                f"has {len(tokens)} tokens, more than max_sequence_tokens = {limit}", field=f"{field}.token_ids"
            )
        lookahead = whole_number(request.lookahead, f"{field}.lookahead", 0, limit - len(tokens))
        extra: dict[int, bytes] = {}
        if request.extra_keys:
            extra = extra_keys_by_block(request.extra_keys, f"{field}.extra_keys", self._config.block_size, limit)
        found = _NO_BLOCKS
        if self._config.enable_prefix_caching:  # the last token is always computed
            found = np.array(self._device.index.match(tokens[:-1], extra), np.int64)
        num_blocks, required = self._num_blocks(len(tokens)), self._num_blocks(len(tokens) + lookahead)
        return NewSequence(request.sequence_id, tokens, extra, found, num_blocks, required)

    def _create(self, namespace: SessionNamespace, sequences: list[NewSequence], num_hits: int, flags: int) -> None:
        """Build the block tables. The sequences are known to fit, and references to their hits are already counted."""
        slots, shift = self._sequences, self._shift
        blocks = self._device.allocate(sum([new.num_blocks - len(new.found) for new in sequences]))
        rows = [slots.free_rows.pop() for _ in sequences]
        fill_sequences(
            slots.block_tables,
            self._device.token_ids,
            rows,
            [new.found for new in sequences],
            [new.tokens for new in sequences],
            blocks,
        )
        self._state.intents.begin_new(rows)
        states, number = slots.states, namespace.number
        for new, row in zip(sequences, rows, strict=True):
            if new.extra:
                slots.set_extra_keys(row, new.extra)
            namespace.rows[new.sequence_id] = row
            length, computed, made = len(new.tokens), len(new.found) << shift, slots.new_flags(flags)
            states[row] = (length, computed, new.num_blocks, NO_STEP, 0, number, new.sequence_id, made)
        if namespace.lost:
            self._state.create_lost(namespace, [new.sequence_id for new in sequences])
        self._count(namespace, sum([len(new.tokens) for new in sequences]), num_hits << shift)

    def _count(self, namespace: SessionNamespace, queried: int, hit: int) -> None:
        """Count tokens that were looked up in the prefix cache, and those found there."""
        counters = self._state.counters
        self._sequences.num_tokens += queried
        counters.prefix_cache_query_tokens += queried
        counters.prefix_cache_hit_tokens += hit
        namespace.counters[QUERY_TOKENS] += queried
        namespace.counters[HIT_TOKENS] += hit
