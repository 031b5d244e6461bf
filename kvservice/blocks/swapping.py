"""Swapping: move a group of sequences between the device tier and the swap tier. Each shared block moves once.

After a swap-out, the device's copy of a computed full block stays cached until it is evicted, and a swap-in reuses it
through the prefix index instead of copying.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import whole_number
from kvservice.blocks.block_pool import counted
from kvservice.blocks.events import EventJournal, StoredBlock
from kvservice.blocks.intents import DROP
from kvservice.blocks.limits import check_request_blocks, check_sequence_lengths
from kvservice.blocks.namespaces import SessionNamespace
from kvservice.blocks.plans import AllocStatus, Int64Array, SwapPlan
from kvservice.blocks.prefix import token_bytes
from kvservice.blocks.ranges import ragged
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED
from kvservice.blocks.state import BlockState
from kvservice.errors import OutOfBlocksError, SequenceNotSwappedError

_MISSING = -1


@dataclass(frozen=True, slots=True)
class _Group:
    """Table entries of a group of sequences.

    Entry i of m is at (rows[which[i]], entries[i]) and names block blocks[inverse[i]]. `holders` counts, per distinct
    block, the tables of the group that hold it.
    """

    rows: Int64Array
    states: Int64Array
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


class Swapper:
    """Moves groups of sequences between the tiers."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config = state, state.config
        self._device, self._swap, self._sequences = state.device, state.swap, state.sequences
        self._shift, self._mask = state.config.block_shift, state.config.block_mask

    def can_swap_out(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> bool:
        """See BlockManager.can_swap_out."""
        self._state.enter(namespace)
        return len(self._swap_out_group(namespace, sequence_ids).blocks) <= self._swap.num_free

    def swap_out(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> SwapPlan:
        """See BlockManager.swap_out."""
        self._state.enter(namespace)
        group = self._swap_out_group(namespace, sequence_ids)
        src = group.blocks
        if len(src) > self._swap.num_free:
            needed = counted(len(src), "swap block")
            raise OutOfBlocksError(
                f"{needed} needed and {self._swap.num_free} of {self._swap.num_blocks} are free",
                tier="swap", required=len(src), free=self._swap.num_free, total=self._swap.num_blocks,
                never=len(src) > self._swap.num_blocks,
            )  # fmt: skip
        self._state.intents.begin(DROP, group.rows)
        dst = self._swap.allocate_shared(group.holders)
        self._swap.token_ids[dst] = self._device.token_ids[src]
        hashes = self._computed_hashes(group)
        for to, chain_hash in zip(dst.tolist(), hashes, strict=True):
            self._swap.hashes[to] = chain_hash
        self._swap.keep_hashes_of(dst, self._device, src)
        if None in hashes:
            self._swap.kept_hashes[dst[[chain_hash is None for chain_hash in hashes]]] = 0
        self._sequences.end_steps(namespace, group.rows)
        self._device.decref_entries(*self._sequences.table_entries(group.rows))
        self._sequences.block_tables[group.rows[group.which], group.entries] = dst[group.inverse]
        self._sequences.states[group.rows, SWAPPED] = 1
        self._sequences.num_swapped += len(group.rows)
        self._state.counters.swapped_out_sequences += len(group.rows)
        self._state.counters.swapped_out_blocks += len(src)
        return SwapPlan(src.astype(np.int32), dst.astype(np.int32))

    def can_swap_in(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int) -> AllocStatus:
        """See BlockManager.can_swap_in."""
        self._state.enter(namespace)
        return self._plan_swap_in(namespace, sequence_ids, lookahead).status

    def swap_in(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int) -> SwapPlan:
        """See BlockManager.swap_in."""
        self._state.enter(namespace)
        plan = self._plan_swap_in(namespace, sequence_ids, lookahead)
        if plan.status is not AllocStatus.OK:
            never = plan.status is AllocStatus.NEVER
            raise self._device.out_of_blocks(plan.required, never=never, num_kept=self._config.watermark_blocks)
        group = plan.group
        self._state.intents.begin(DROP, group.rows)
        copied = plan.found == _MISSING
        self._incref_found(plan.found[~copied], group.holders[~copied])
        to = plan.found.copy()
        to[copied] = self._device.allocate_shared(group.holders[copied])
        src, dst = group.blocks[copied], to[copied]
        self._device.token_ids[dst] = self._swap.token_ids[src]
        self._state.unsubmitted[dst] = True
        hashed = [
            (block, chain_hash)
            for back, block in zip(src.tolist(), dst.tolist(), strict=True)
            if (chain_hash := self._swap.hashes[back]) is not None
        ]
        for block, chain_hash in hashed:
            self._device.hashes[block] = chain_hash
        blocks = np.array([block for block, _ in hashed], np.int64)
        chain_hashes = [chain_hash for _, chain_hash in hashed]
        self._device.keep_hashes_of(dst, self._swap, src)
        found = self._device.add_to_index(blocks, chain_hashes)
        findable = blocks[found].tolist()
        self._sequences.block_tables[group.rows[group.which], group.entries] = to[group.inverse]
        if self._device.journal is not None and findable:
            self._record_stored(self._device.journal, group, to, findable)
        new = self._device.allocate(int(plan.grown.sum()))
        self._sequences.append_blocks(group.rows, group.states[:, NUM_BLOCKS], plan.grown, new)
        self._swap.decref(group.blocks, group.holders)
        self._sequences.states[group.rows, SWAPPED] = 0
        self._sequences.num_swapped -= len(group.rows)
        self._state.counters.swapped_in_sequences += len(group.rows)
        self._state.counters.swapped_in_blocks += len(src)
        return SwapPlan(src.astype(np.int32), dst.astype(np.int32))

    def submitted(self, plan: SwapPlan) -> None:
        """See BlockManager.submitted."""
        self._state.unsubmitted[plan.dst] = False

    def _record_stored(self, journal: EventJournal, group: _Group, to: Int64Array, findable: list[int]) -> None:
        """Record blocks that returned to the prefix index, each with its parent, the previous block of a table."""
        blocks, first = np.unique(to[group.inverse], return_index=True)
        rows, entries = group.rows[group.which[first]], group.entries[first]
        before = self._sequences.block_tables[rows, np.maximum(entries - 1, 0)]
        parents = {
            block: self._device.hashes[parent] if entry else None
            for block, entry, parent in zip(blocks.tolist(), entries.tolist(), before.tolist(), strict=True)
        }
        stored: list[StoredBlock] = []
        for block in findable:
            chain_hash = self._device.hashes[block]
            assert chain_hash is not None, "it is in the index"
            tokens = token_bytes(self._device.token_ids[block]) if journal.with_tokens else b""
            stored.append((chain_hash, parents[block], tokens))
        journal.stored(stored)

    def _swap_out_group(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike) -> _Group:
        ids, rows = namespace.lookup(sequence_ids)
        states = self._sequences.resident_states(ids, rows)
        return self._group(rows, states)

    def _group(self, rows: Int64Array, states: Int64Array) -> _Group:
        check_request_blocks(self._config, int(np.add.reduce(states[:, NUM_BLOCKS])), "sequence_ids")
        which, entries = ragged(np.zeros(len(rows), np.int64), states[:, NUM_BLOCKS])
        held = self._sequences.block_tables[rows[which], entries].astype(np.int64)
        blocks, inverse, holders = np.unique(held, return_inverse=True, return_counts=True)
        return _Group(rows, states, which, entries, blocks, inverse, holders)

    def _computed_hashes(self, group: _Group) -> list[bytes | None]:
        """Return the chain hash of each distinct block that is full and computed in one of the sequences, else
        None."""
        hashes: list[bytes | None] = [None] * len(group.blocks)
        if not self._config.enable_prefix_caching:
            return hashes
        num_full = group.states[group.which, NUM_COMPUTED] >> self._shift
        for i in group.inverse[group.entries < num_full].tolist():
            hashes[i] = self._device.hashes[int(group.blocks[i])]
        return hashes

    def _plan_swap_in(self, namespace: SessionNamespace, sequence_ids: npt.ArrayLike, lookahead: int) -> _SwapIn:
        ids, rows = namespace.lookup(sequence_ids)
        lookahead = whole_number(lookahead, "lookahead", 0, self._config.max_sequence_tokens)
        states = self._sequences.states.take(rows, axis=0)
        resident = states[:, SWAPPED] == 0
        if np.count_nonzero(resident):
            i = int(resident.argmax())
            raise SequenceNotSwappedError(
                f"sequence {ids[i]} is not swapped out", field=f"sequence_ids[{i}]", sequence_id=int(ids[i])
            )
        check_sequence_lengths(self._config, states[:, LENGTH], lookahead)
        group = self._group(rows, states)
        reach = (states[:, LENGTH] + (lookahead + self._mask)) >> self._shift
        grown = np.maximum(reach - states[:, NUM_BLOCKS], 0)
        found = np.array([self._find(block) for block in group.blocks.tolist()], np.int64)
        required = len(found) + int(grown.sum())
        there = found[found != _MISSING]
        num_consumed = required - len(there) + self._device.num_evictable(np.unique(there))
        return _SwapIn(group, found, grown, self._swap_in_status(required, num_consumed), required)

    def _swap_in_status(self, required: int, num_consumed: int) -> AllocStatus:
        if self._device.num_available - num_consumed >= self._config.watermark_blocks:
            return AllocStatus.OK
        if self._config.num_blocks - required < self._config.watermark_blocks:
            return AllocStatus.NEVER
        return AllocStatus.LATER

    def _find(self, swap_block: int) -> int:
        chain_hash = self._swap.hashes[swap_block]
        return _MISSING if chain_hash is None else self._device.index.blocks.get(chain_hash, _MISSING)

    def _incref_found(self, blocks: Int64Array, holders: Int64Array) -> None:
        """Add references to device blocks that the index found. Two swap blocks with the same content may find the same
        device block, which then gets the references of both."""
        distinct, inverse = np.unique(blocks, return_inverse=True)
        counts = np.zeros(len(distinct), np.int64)
        np.add.at(counts, inverse, holders)
        self._device.incref_found(distinct, counts)
