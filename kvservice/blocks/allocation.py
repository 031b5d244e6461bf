"""Allocation of sequences. The computed blocks of a prompt are shared through the prefix index.

`can_allocate` and `allocate` compute the same plan, so they cannot contradict each other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice.blocks.arguments import extra_keys_by_block, int32_array, whole_number
from kvservice.blocks.namespaces import HIT_TOKENS, NO_STEP, QUERY_TOKENS, SessionNamespace
from kvservice.blocks.plans import Allocation, AllocationRequest, AllocStatus, Int32Array, Int64Array
from kvservice.blocks.slices import SLICE_SEQUENCES, Slices, in_turn
from kvservice.blocks.state import BlockState
from kvservice.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class _NewSequence:
    """A validated request.

    `tokens` is int32[n]. `extra` maps block numbers to extra keys. `found` are the prefix-cache hits of the prompt.
    `num_blocks` and `required` are the sizes of the block table without and with lookahead, in blocks.
    """

    sequence_id: int
    tokens: Int32Array
    extra: dict[int, bytes]
    found: Int64Array
    num_blocks: int
    required: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """`hits` are the non-empty arrays of prefix-cache hits. `required` is the number of blocks of all tables."""

    sequences: list[_NewSequence]
    hits: list[Int64Array]
    status: AllocStatus
    required: int


class Allocator:
    """Allocates sequences, and says whether they fit."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._sequences = state.device, state.sequences
        self._shift = state.config.block_shift

    def can_allocate(self, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> Slices[AllocStatus]:
        """See BlockManager.can_allocate. The answer describes the state at the last slice."""
        plan = yield from self._plan(namespace, requests)
        return plan.status

    def allocate(self, namespace: SessionNamespace, requests: Sequence[AllocationRequest]) -> Slices[list[Allocation]]:
        """See BlockManager.allocate. The last slice creates all sequences."""
        plan = yield from self._plan(namespace, requests)
        self._sequences.require_free_rows(len(plan.sequences), "requests")
        if plan.status is not AllocStatus.OK:
            never = plan.status is AllocStatus.NEVER
            raise self._device.out_of_blocks(plan.required, never=never, num_kept=self._config.watermark_blocks)
        if len(plan.hits) == 1:  # the hits are referenced before new blocks are allocated, so that they are not evicted
            self._device.incref_found(plan.hits[0])
        elif plan.hits:
            self._device.incref_found(*np.unique(np.concatenate(plan.hits), return_counts=True))
        return self._create(namespace, plan.sequences)

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
        required = sum(new.required for new in sequences)
        hits = [new.found for new in sequences if len(new.found)]
        num_consumed = required
        if hits:
            found = np.concatenate(hits)
            num_consumed += self._device.num_evictable(np.unique(found)) - len(found)
        return _Plan(sequences, hits, self._allocation_status(len(sequences), required, num_consumed), required)

    def _check_in_slices(self, requests: Sequence[AllocationRequest]) -> Slices[list[_NewSequence]]:
        """Validate the requests in slices. Prefix-cache hits count only if the index still has them after the last
        slice."""

        def checked() -> Iterator[tuple[_NewSequence, list[Any]]]:
            for i, request in enumerate(requests):
                new = self._check_request(request, f"requests[{i}]")
                yield new, [self._device.hashes[block] for block in new.found.tolist()]

        return [self._still_found(*one) for one in (yield from in_turn(checked()))]

    def _still_found(self, new: _NewSequence, hashes: list[bytes]) -> _NewSequence:
        found, index = new.found.tolist(), self._device.index.blocks
        gone = (
            i for i, (block, chain_hash) in enumerate(zip(found, hashes, strict=True)) if index.get(chain_hash) != block
        )
        first = next(gone, len(found))
        return new if first == len(found) else dataclasses.replace(new, found=new.found[:first])

    def _allocation_status(self, num_sequences: int, required: int, num_consumed: int) -> AllocStatus:
        fits = self._device.num_available - num_consumed >= self._config.watermark_blocks
        if fits and num_sequences <= len(self._sequences.free_rows):
            return AllocStatus.OK
        if num_sequences > self._config.max_sequences:
            return AllocStatus.NEVER
        if self._config.num_blocks - required < self._config.watermark_blocks and not fits:
            return AllocStatus.NEVER
        return AllocStatus.LATER

    def _check_request(self, request: AllocationRequest, field: str) -> _NewSequence:
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
        found: list[int] = []
        if self._config.enable_prefix_caching:
            found = self._find(request, tokens, extra)
        num_blocks = self._config.num_blocks_for(len(tokens))
        required = self._config.num_blocks_for(len(tokens) + lookahead)
        return _NewSequence(request.sequence_id, tokens, extra, np.array(found, np.int64), num_blocks, required)

    def _find(self, request: AllocationRequest, tokens: Int32Array, extra: dict[int, bytes]) -> list[int]:
        """Return the prefix-cache hits, of which the last token is none."""
        if request.chain_hashes is None:
            return self._device.index.match(tokens[:-1], extra)
        return self._device.index.match_hashes(request.chain_hashes[: (len(tokens) - 1) >> self._shift])

    def _create(self, namespace: SessionNamespace, sequences: list[_NewSequence]) -> list[Allocation]:
        """Build the block tables. The sequences are known to fit, and references to their hits are already counted."""
        counts = [new.num_blocks - len(new.found) for new in sequences]
        blocks, slots = self._device.allocate(sum(counts)), self._sequences
        self._fill(blocks, sequences, counts)
        rows, first = [], 0
        for new, count in zip(sequences, counts, strict=True):
            row = slots.free_rows.pop()
            num_found = len(new.found)
            if num_found:
                slots.block_tables[row, :num_found] = new.found
            slots.block_tables[row, num_found : new.num_blocks] = blocks[first : first + count]
            if new.extra:
                slots.extra_keys[row] = new.extra
            namespace.rows[new.sequence_id] = row
            rows.append(row)
            first += count
        allocations = [
            Allocation(new.sequence_id, len(new.tokens), len(new.found) << self._shift, new.num_blocks)
            for new in sequences
        ]
        slots.states[rows] = [
            (one.num_tokens, one.num_cached_tokens, one.num_blocks, NO_STEP, 0, namespace.number, one.sequence_id, 0)
            for one in allocations
        ]
        self._count(namespace, allocations)
        return allocations

    def _fill(self, blocks: Int64Array, sequences: list[_NewSequence], counts: list[int]) -> None:
        """Store the token ids of the new blocks. `blocks` lists the blocks sequence after sequence, counts[i] each."""
        size = self._config.block_size
        if len(sequences) == 1:
            tokens = sequences[0].tokens[len(sequences[0].found) << self._shift :]
            num_full = len(tokens) >> self._shift
            self._device.token_ids[blocks[:num_full]] = tokens[: num_full << self._shift].reshape(num_full, size)
            rest = tokens[num_full << self._shift :]
            if len(rest):
                self._device.token_ids[blocks[num_full], : len(rest)] = rest
            return
        slots, first = np.zeros(len(blocks) << self._shift, np.int32), 0
        for new, count in zip(sequences, counts, strict=True):
            tokens = new.tokens[len(new.found) << self._shift :]
            slots[first : first + len(tokens)] = tokens
            first += count << self._shift
        self._device.token_ids[blocks] = slots.reshape(len(blocks), size)

    def _count(self, namespace: SessionNamespace, allocations: list[Allocation]) -> None:
        counters = self._state.counters
        queried = hit = 0
        for one in allocations:
            queried += one.num_tokens
            hit += one.num_cached_tokens
        self._sequences.num_tokens += queried
        counters.prefix_cache_query_tokens += queried
        counters.prefix_cache_hit_tokens += hit
        namespace.counters[QUERY_TOKENS] += queried
        namespace.counters[HIT_TOKENS] += hit
