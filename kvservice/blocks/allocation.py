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
from kvservice.blocks.core import Core
from kvservice.blocks.plans import Allocation, AllocationRequest, AllocStatus, Int32Array, Int64Array
from kvservice.blocks.sequences import HIT_TOKENS, NO_STEP, QUERY_TOKENS, SequenceSpace
from kvservice.blocks.slices import SLICE_SEQUENCES, Slices, finish, in_turn
from kvservice.errors import DuplicateSequenceError, InvalidArgumentError


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
    sequences: list[_NewSequence]
    status: AllocStatus
    required: int


class AllocationOps(Core):
    """can_allocate and allocate."""

    def can_allocate(self, space: SequenceSpace, requests: Sequence[AllocationRequest]) -> AllocStatus:
        """Return whether the whole batch fits above the watermark (the three answers of vLLM v0).

        OK: after the allocation at least `watermark_blocks` blocks remain available. A prefix-cache hit needs no new
        block, but a hit on an evictable block makes that block unavailable; each block is counted exactly once.
        NEVER: not OK, and `num_blocks - required < watermark_blocks`, where `required` is the number of blocks of all
        tables, ceil((tokens + lookahead) / block_size) each; or the batch has more than max_sequences sequences.
        LATER: otherwise. As in vLLM v0, this check includes the lookahead slots; the steps reserve them.
        Raises InvalidArgumentError, DuplicateSequenceError.
        """
        return finish(self.can_allocate_in_slices(space, requests))

    def can_allocate_in_slices(
        self, space: SequenceSpace, requests: Sequence[AllocationRequest]
    ) -> Slices[AllocStatus]:
        """`can_allocate` in slices. The answer describes the state at the last slice."""
        plan = yield from self._plan_allocation(space, requests)
        return plan.status

    def allocate(self, space: SequenceSpace, requests: Sequence[AllocationRequest]) -> list[Allocation]:
        """Allocate all sequences of the batch, or none.

        Full blocks of a prompt that are already computed under the same extra keys are shared (vLLM's automatic prefix
        caching). At least the last token is left to compute, because an engine needs its logits. Requests of one batch
        do not share each other's new blocks, since those are not computed yet. `open_step` covers the remaining
        tokens. Raises InvalidArgumentError, DuplicateSequenceError, QuotaExceededError, OutOfBlocksError.
        """
        return finish(self.allocate_in_slices(space, requests))

    def allocate_in_slices(
        self, space: SequenceSpace, requests: Sequence[AllocationRequest]
    ) -> Slices[list[Allocation]]:
        """`allocate` in slices; the last slice creates all sequences. Raises UnknownSessionError if the namespace is
        closed in the meantime."""
        plan = yield from self._plan_allocation(space, requests)
        self._require_rows(len(plan.sequences), "requests")
        if plan.status is not AllocStatus.OK:
            raise self._out_of_device_blocks(plan.required, never=plan.status is AllocStatus.NEVER)
        found = [new.found for new in plan.sequences if len(new.found)]
        if len(found) == 1:  # the hits are referenced before new blocks are allocated, so that they are not evicted
            self.device.hold_found(found[0])
        elif found:
            self.device.hold_found(*np.unique(np.concatenate(found), return_counts=True))
        return self._make(space, plan.sequences)

    def _plan_allocation(self, space: SequenceSpace, requests: Sequence[AllocationRequest]) -> Slices[_Plan]:
        """Compute the plan in slices. It describes the state at the last slice."""
        self._enter(space)
        if not requests:
            raise InvalidArgumentError("must not be empty", field="requests")
        if len(requests) <= SLICE_SEQUENCES:
            sequences = [self._check_request(request, f"requests[{i}]") for i, request in enumerate(requests)]
        else:
            sequences = yield from self._check_in_slices(requests)
            self._enter(space)
        self._check_new_ids(space, [new.sequence_id for new in sequences], "requests[{}].sequence_id")
        required = sum(new.required for new in sequences)
        found = [new.found for new in sequences if len(new.found)]
        to_take = required - sum(len(blocks) for blocks in found)
        if found:
            to_take += self.device.num_evictable(np.unique(np.concatenate(found)))
        return _Plan(sequences, self._allocation_status(len(sequences), required, to_take), required)

    def _check_in_slices(self, requests: Sequence[AllocationRequest]) -> Slices[list[_NewSequence]]:
        """Validate the requests in slices. Prefix-cache hits count only if the index still has them after the last
        slice."""

        def checked() -> Iterator[tuple[_NewSequence, list[Any]]]:
            for i, request in enumerate(requests):
                new = self._check_request(request, f"requests[{i}]")
                yield new, [self.device.hashes[block] for block in new.found.tolist()]

        return [self._still_found(*one) for one in (yield from in_turn(checked()))]

    def _still_found(self, new: _NewSequence, hashes: list[bytes]) -> _NewSequence:
        found, index = new.found.tolist(), self.device.index.blocks
        gone = (
            i for i, (block, chain_hash) in enumerate(zip(found, hashes, strict=True)) if index.get(chain_hash) != block
        )
        first = next(gone, len(found))
        return new if first == len(found) else dataclasses.replace(new, found=new.found[:first])

    def _allocation_status(self, num_sequences: int, required: int, to_take: int) -> AllocStatus:
        fits = self.device.num_available - to_take >= self.config.watermark_blocks
        if fits and num_sequences <= len(self.sequences.free_rows):
            return AllocStatus.OK
        if num_sequences > self.config.max_sequences:
            return AllocStatus.NEVER
        if self.config.num_blocks - required < self.config.watermark_blocks and not fits:
            return AllocStatus.NEVER
        return AllocStatus.LATER

    def _check_request(self, request: AllocationRequest, field: str) -> _NewSequence:
        tokens = int32_array(request.token_ids, f"{field}.token_ids")
        limit = self.config.max_sequence_tokens
        if len(tokens) > limit:
            raise InvalidArgumentError(
                f"has {len(tokens)} tokens, more than max_sequence_tokens = {limit}", field=f"{field}.token_ids"
            )
        lookahead = whole_number(request.lookahead, f"{field}.lookahead", 0, limit - len(tokens))
        extra: dict[int, bytes] = {}
        if request.extra_keys:
            extra = extra_keys_by_block(request.extra_keys, f"{field}.extra_keys", self.config.block_size, limit)
        found: list[int] = []
        if self.config.enable_prefix_caching:
            found = self.device.index.match(tokens[:-1], extra)
        num_blocks, required = self._blocks_for(len(tokens)), self._blocks_for(len(tokens) + lookahead)
        return _NewSequence(request.sequence_id, tokens, extra, np.array(found, np.int64), num_blocks, required)

    def _check_new_ids(self, space: SequenceSpace, ids: list[int], field: str) -> None:
        """Check that the ids are valid and unused. `field` is a format string for the index of an id. Raises
        InvalidArgumentError, DuplicateSequenceError."""
        if len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < 2**63 and ids[0] not in space.rows:
            return
        seen: set[int] = set()
        for i, sequence_id in enumerate(ids):
            whole_number(sequence_id, field.format(i), 0, 2**63 - 1)
            if sequence_id in space.rows or sequence_id in seen:
                where = "is in use" if sequence_id in space.rows else "appears twice"
                raise DuplicateSequenceError(
                    f"sequence {sequence_id} {where}", field=field.format(i), sequence_id=sequence_id
                )
            seen.add(sequence_id)

    def _make(self, space: SequenceSpace, sequences: list[_NewSequence]) -> list[Allocation]:
        """Build the block tables. The sequences are known to fit, and references to their hits are already counted."""
        counts = [new.num_blocks - len(new.found) for new in sequences]
        taken = self.device.take(sum(counts))
        self._fill(taken, sequences, counts)
        rows, first = [], 0
        for new, count in zip(sequences, counts, strict=True):
            row = self.sequences.free_rows.pop()
            num_found = len(new.found)
            if num_found:
                self.block_tables[row, :num_found] = new.found
            self.block_tables[row, num_found : new.num_blocks] = taken[first : first + count]
            if new.extra:
                self.sequences.extra_keys[row] = new.extra
            space.rows[new.sequence_id] = row
            rows.append(row)
            first += count
        allocations = [
            Allocation(new.sequence_id, len(new.tokens), len(new.found) << self._shift, new.num_blocks)
            for new in sequences
        ]
        self.meta[rows] = [
            (one.num_tokens, one.num_cached_tokens, one.num_blocks, NO_STEP, 0, space.number, one.sequence_id, 0)
            for one in allocations
        ]
        self._count(space, allocations)
        return allocations

    def _fill(self, taken: Int64Array, sequences: list[_NewSequence], counts: list[int]) -> None:
        """Store the token ids of the new blocks. `taken` lists the blocks sequence after sequence, counts[i] each."""
        size = self.config.block_size
        if len(sequences) == 1:
            tokens = sequences[0].tokens[len(sequences[0].found) << self._shift :]
            num_full = len(tokens) >> self._shift
            self.device.token_ids[taken[:num_full]] = tokens[: num_full << self._shift].reshape(num_full, size)
            rest = tokens[num_full << self._shift :]
            if len(rest):
                self.device.token_ids[taken[num_full], : len(rest)] = rest
            return
        slots, first = np.zeros(len(taken) << self._shift, np.int32), 0
        for new, count in zip(sequences, counts, strict=True):
            tokens = new.tokens[len(new.found) << self._shift :]
            slots[first : first + len(tokens)] = tokens
            first += count << self._shift
        self.device.token_ids[taken] = slots.reshape(len(taken), size)

    def _count(self, space: SequenceSpace, allocations: list[Allocation]) -> None:
        queried = sum(one.num_tokens for one in allocations)
        hit = sum(one.num_cached_tokens for one in allocations)
        self.sequences.num_tokens += queried
        self.prefix_query_tokens += queried
        self.prefix_hit_tokens += hit
        space.counters[QUERY_TOKENS] += queried
        space.counters[HIT_TOKENS] += hit
