"""Swapping: move a group of sequences between the device tier and the swap tier. Each shared block moves once.

After a swap-out, the device's copy of a computed full block stays cached until it is evicted, and a swap-in reuses it
through the prefix index instead of copying.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import whole_number
from kvservice.blocks.core import Core, ragged
from kvservice.blocks.events import EventJournal, StoredBlock
from kvservice.blocks.plans import AllocStatus, Int64Array, SwapPlan
from kvservice.blocks.prefix import token_bytes
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED, SequenceSpace
from kvservice.errors import OutOfBlocksError, SequenceNotSwappedError

_MISSING = -1


@dataclass(frozen=True, slots=True)
class _Group:
    """Table entries of a group of sequences.

    Entry i of m is at (rows[which[i]], entries[i]) and names block blocks[inverse[i]]. `holders` counts, per distinct
    block, the tables of the group that hold it.
    """

    rows: Int64Array
    meta: Int64Array
    which: Int64Array
    entries: Int64Array
    blocks: Int64Array
    inverse: Int64Array
    holders: Int64Array


@dataclass(frozen=True, slots=True)
class _SwapIn:
    """Plan of a swap-in. `found` int64[distinct blocks] are the device blocks that the index still has, or _MISSING.
    `grown` int64[n] are the new blocks for lookahead."""

    group: _Group
    found: Int64Array
    grown: Int64Array
    status: AllocStatus
    required: int


class SwapOps(Core):
    """can_swap_out, swap_out, can_swap_in, swap_in."""

    def can_swap_out(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> bool:
        """Return whether the swap tier has room for the group. The answer is exact; the swap tier has no watermark."""
        self._enter(space)
        return len(self._swap_out_group(space, sequence_ids).blocks) <= self.swap.num_free

    def swap_out(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> SwapPlan:
        """Move a group of sequences to the swap tier (vLLM v0: swap_out).

        sequence_ids int64[n], distinct. Returns device blocks src int32[m] and swap blocks dst int32[m]; the device
        copies them before anything else is written to the device pool. A block that several sequences of the group
        share moves once and stays shared. The steps of the group become stale. Raises InvalidArgumentError,
        UnknownSequenceError, SequenceSwappedError, OutOfBlocksError with tier "swap".
        """
        self._enter(space)
        group = self._swap_out_group(space, sequence_ids)
        src = group.blocks
        if len(src) > self.swap.num_free:
            raise OutOfBlocksError(
                f"{len(src)} swap blocks are needed and {self.swap.num_free} of {self.swap.num_blocks} are free",
                tier="swap", required=len(src), free=self.swap.num_free, total=self.swap.num_blocks,
                never=len(src) > self.swap.num_blocks,
            )  # fmt: skip
        dst = self._taken(self.swap, group.holders)
        self.swap.token_ids[dst] = self.device.token_ids[src]
        for to, chain_hash in zip(dst.tolist(), self._computed_hashes(group), strict=True):
            self.swap.hashes[to] = chain_hash
        self._supersede(space, group.rows)
        self._release_entries(self.device, *self._table_entries(group.rows))
        self.block_tables[group.rows[group.which], group.entries] = dst[group.inverse]
        self.meta[group.rows, SWAPPED] = 1
        self.sequences.num_swapped += len(group.rows)
        self.swapped_out_sequences += len(group.rows)
        self.swapped_out_blocks += len(src)
        return SwapPlan(src.astype(np.int32), dst.astype(np.int32))

    def can_swap_in(self, space: SequenceSpace, sequence_ids: npt.ArrayLike, lookahead: int = 0) -> AllocStatus:
        """Return one of the three answers of can_allocate for a swapped-out group, with the device tier's watermark.

        The required blocks are the distinct blocks of the group and the lookahead blocks. A block that the index still
        finds on the device needs no new block.
        """
        self._enter(space)
        return self._plan_swap_in(space, sequence_ids, lookahead).status

    def swap_in(self, space: SequenceSpace, sequence_ids: npt.ArrayLike, lookahead: int = 0) -> SwapPlan:
        """Move a group of swapped-out sequences back to the device (vLLM v0: swap_in).

        sequence_ids int64[n], distinct. Returns swap blocks src int32[m] and device blocks dst int32[m], only for
        blocks that are no longer on the device. Raises InvalidArgumentError, UnknownSequenceError,
        SequenceNotSwappedError, OutOfBlocksError.
        """
        self._enter(space)
        plan = self._plan_swap_in(space, sequence_ids, lookahead)
        if plan.status is not AllocStatus.OK:
            raise self._out_of_device_blocks(plan.required, never=plan.status is AllocStatus.NEVER)
        group = plan.group
        copied = plan.found == _MISSING
        self._hold_found(plan.found[~copied], group.holders[~copied])
        to = plan.found.copy()
        to[copied] = self._taken(self.device, group.holders[copied])
        src, dst = group.blocks[copied], to[copied]
        self.device.token_ids[dst] = self.swap.token_ids[src]
        hashed = [
            (block, chain_hash)
            for back, block in zip(src.tolist(), dst.tolist(), strict=True)
            if (chain_hash := self.swap.hashes[back]) is not None
        ]
        for block, chain_hash in hashed:
            self.device.hashes[block] = chain_hash
        blocks = [block for block, _ in hashed]
        found = self.device.make_findable(blocks, [chain_hash for _, chain_hash in hashed])
        findable = list(itertools.compress(blocks, found))
        self.block_tables[group.rows[group.which], group.entries] = to[group.inverse]
        if self.device.journal is not None and findable:
            self._note_findable(self.device.journal, group, to, findable)
        self._reserve(group.rows, plan.grown)
        self.swap.release(group.blocks, group.holders)
        self.meta[group.rows, SWAPPED] = 0
        self.sequences.num_swapped -= len(group.rows)
        self.swapped_in_sequences += len(group.rows)
        self.swapped_in_blocks += len(src)
        return SwapPlan(src.astype(np.int32), dst.astype(np.int32))

    def _note_findable(self, journal: EventJournal, group: _Group, to: Int64Array, findable: list[int]) -> None:
        """Record blocks that returned to the prefix index, each with its parent, the previous block of a table."""
        blocks, first = np.unique(to[group.inverse], return_index=True)
        rows, entries = group.rows[group.which[first]], group.entries[first]
        before = self.block_tables[rows, np.maximum(entries - 1, 0)]
        parents = {
            block: self.device.hashes[parent] if entry else None
            for block, entry, parent in zip(blocks.tolist(), entries.tolist(), before.tolist(), strict=True)
        }
        stored: list[StoredBlock] = []
        for block in findable:
            chain_hash = self.device.hashes[block]
            assert chain_hash is not None, "it is in the index"
            tokens = token_bytes(self.device.token_ids[block]) if journal.with_tokens else b""
            stored.append((chain_hash, parents[block], tokens))
        journal.stored(stored)

    def _swap_out_group(self, space: SequenceSpace, sequence_ids: npt.ArrayLike) -> _Group:
        ids, rows = space.lookup(sequence_ids)
        meta = self._resident(ids, rows)
        return self._group(rows, meta)

    def _group(self, rows: Int64Array, meta: Int64Array) -> _Group:
        self._check_request_blocks(int(np.add.reduce(meta[:, NUM_BLOCKS])), "sequence_ids")
        which, entries = ragged(np.zeros(len(rows), np.int64), meta[:, NUM_BLOCKS])
        held = self.block_tables[rows[which], entries].astype(np.int64)
        blocks, inverse, holders = np.unique(held, return_inverse=True, return_counts=True)
        return _Group(rows, meta, which, entries, blocks, inverse, holders)

    def _computed_hashes(self, group: _Group) -> list[bytes | None]:
        """Return the chain hash of each distinct block that is full and computed in one of the sequences, else
        None."""
        hashes: list[bytes | None] = [None] * len(group.blocks)
        if not self.config.enable_prefix_caching:
            return hashes
        num_full = group.meta[group.which, NUM_COMPUTED] >> self._shift
        for i in group.inverse[group.entries < num_full].tolist():
            hashes[i] = self.device.hashes[int(group.blocks[i])]
        return hashes

    def _plan_swap_in(self, space: SequenceSpace, sequence_ids: npt.ArrayLike, lookahead: int) -> _SwapIn:
        ids, rows = space.lookup(sequence_ids)
        lookahead = whole_number(lookahead, "lookahead", 0, self.config.max_sequence_tokens)
        meta = self.meta.take(rows, axis=0)
        resident = meta[:, SWAPPED] == 0
        if np.count_nonzero(resident):
            i = int(resident.argmax())
            raise SequenceNotSwappedError(
                f"sequence {ids[i]} is not swapped out", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
            )
        self._check_reach(meta[:, LENGTH], lookahead)
        group = self._group(rows, meta)
        reach = (meta[:, LENGTH] + (lookahead + self._mask)) >> self._shift
        grown = np.maximum(reach - meta[:, NUM_BLOCKS], 0)
        found = np.array([self._find(block) for block in group.blocks.tolist()], np.int64)
        required = len(found) + int(grown.sum())
        there = found[found != _MISSING]
        to_take = required - len(there) + self.device.num_evictable(np.unique(there))
        return _SwapIn(group, found, grown, self._swap_in_status(required, to_take), required)

    def _swap_in_status(self, required: int, to_take: int) -> AllocStatus:
        if self.device.num_available - to_take >= self.config.watermark_blocks:
            return AllocStatus.OK
        if self.config.num_blocks - required < self.config.watermark_blocks:
            return AllocStatus.NEVER
        return AllocStatus.LATER

    def _find(self, swap_block: int) -> int:
        chain_hash = self.swap.hashes[swap_block]
        return _MISSING if chain_hash is None else self.device.index.blocks.get(chain_hash, _MISSING)

    def _hold_found(self, blocks: Int64Array, holders: Int64Array) -> None:
        """Add references to device blocks that the index found. Two swap blocks with the same content may find the same
        device block, which then gets the references of both."""
        distinct, inverse = np.unique(blocks, return_inverse=True)
        counts = np.zeros(len(distinct), np.int64)
        np.add.at(counts, inverse, holders)
        self.device.hold_found(distinct, counts)
