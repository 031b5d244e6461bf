"""Allocate: make sequences, sharing the blocks of their prompts that are computed already.

can_allocate and allocate draw up the same plan, so the one cannot contradict the other.
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
    """A checked request: int32[n] tokens, extra keys by block, the cached blocks of its prompt, its table's size now
    and with its lookahead."""

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
        """Whether the whole batch fits above the watermark (vLLM v0's three answers).

        OK: after it `watermark_blocks` blocks still could be taken. A block of the prompt that the prefix index finds
        need not be taken, but if it is cached and evictable it no longer could be, either; both are counted exactly,
        each block once. NEVER: not OK, and `num_blocks - required < watermark_blocks`, with required the blocks of
        all tables, ceil((tokens + lookahead) / block_size) each, or more sequences than max_sequences. Else LATER.
        As in v0, room for the lookahead is asked for here and reserved by the steps.
        Raises InvalidArgumentError, DuplicateSequenceError.
        """
        return finish(self.can_allocate_in_slices(space, requests))

    def can_allocate_in_slices(
        self, space: SequenceSpace, requests: Sequence[AllocationRequest]
    ) -> Slices[AllocStatus]:
        """`can_allocate`, as of the last slice."""
        plan = yield from self._plan_allocation(space, requests)
        return plan.status

    def allocate(self, space: SequenceSpace, requests: Sequence[AllocationRequest]) -> list[Allocation]:
        """Makes all these sequences or none.

        Full blocks of a prompt that are computed already, under the same extra keys, are shared and not filled again
        (vLLM's automatic prefix caching); at least the last token is left to compute, since an engine needs its
        logits. Requests of one batch do not find each other's blocks: they are not computed. To compute the rest, see
        open_step. Raises InvalidArgumentError, DuplicateSequenceError, QuotaExceededError, OutOfBlocksError.
        """
        return finish(self.allocate_in_slices(space, requests))

    def allocate_in_slices(
        self, space: SequenceSpace, requests: Sequence[AllocationRequest]
    ) -> Slices[list[Allocation]]:
        """`allocate`, whose last slice makes all the sequences. UnknownSessionError if the space is closed
        meanwhile."""
        plan = yield from self._plan_allocation(space, requests)
        self._require_rows(len(plan.sequences), "requests")
        if plan.status is not AllocStatus.OK:
            raise self._out_of_device_blocks(plan.required, never=plan.status is AllocStatus.NEVER)
        found = [new.found for new in plan.sequences if len(new.found)]
        if len(found) == 1:  # before any block is taken, so that none that was found is evicted
            self.device.hold_found(found[0])
        elif found:
            self.device.hold_found(*np.unique(np.concatenate(found), return_counts=True))
        return self._make(space, plan.sequences)

    def _plan_allocation(self, space: SequenceSpace, requests: Sequence[AllocationRequest]) -> Slices[_Plan]:
        """The plan is as of the last slice."""
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
        """What was found for a request counts as far as the prefix index still has it after the last slice."""

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
        """`field` has a place for the index. Raises InvalidArgumentError, DuplicateSequenceError."""
        if len(ids) == 1 and type(ids[0]) is int and 0 <= ids[0] < 2**63 and ids[0] not in space.rows:
            return
        seen: set[int] = set()
        for i, sequence_id in enumerate(ids):
            whole_number(sequence_id, field.format(i), 0, 2**63 - 1)
            if sequence_id in space.rows or sequence_id in seen:
                where = "is in use" if sequence_id in space.rows else "is there twice"
                raise DuplicateSequenceError(
                    f"sequence {sequence_id} {where}", field=field.format(i), sequence_id=sequence_id
                )
            seen.add(sequence_id)

    def _make(self, space: SequenceSpace, sequences: list[_NewSequence]) -> list[Allocation]:
        """Builds the tables of sequences that are known to fit, and whose found blocks are held."""
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
        """Notes the tokens that are not cached in the taken blocks, of which each sequence has so many in turn."""
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
