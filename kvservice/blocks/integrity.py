"""Integrity checks: invariants recomputed from the block tables, at once for tests or in slices for a daemon.

An invariant of one block, one table entry or one part of a step is checked within one slice, so changes between slices
do not matter. Sums over the whole state (references to each row, and reference counts of blocks) must describe one
state, so their check starts again if an operation runs in between."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from kvservice.blocks.plans import BoolArray, Int64Array, LiveStep
from kvservice.blocks.pool import BlockPool, CachingBlockPool, token_bytes
from kvservice.blocks.slices import Slices, finish
from kvservice.blocks.state import (
    LENGTH,
    NAMESPACE,
    NUM_BLOCKS,
    NUM_COMPUTED,
    SEQUENCE_ID,
    SWAPPED,
    BlockState,
    SessionNamespace,
)
from kvservice.chain_hash import block_hash
from kvservice.errors import InternalError

# Table entries, rows or blocks that NumPy processes in one slice. It takes a fraction of a millisecond.
SLICE_ENTRIES: Final = 8192
# Cost of the work in Python for one block, in units of NumPy's work for one entry: an index lookup, and a hash.
_LOOKUP_COST: Final = 8
_HASH_COST: Final = 32
# How often one pass tries to check the sums.
MAX_TRIES: Final = 4


def check_integrity(state: BlockState) -> None:
    """Recompute every invariant from scratch, in O(pool). Raises InternalError naming the one that is violated."""
    finish(check_integrity_in_slices(state))


def check_integrity_in_slices(state: BlockState, size: int = SLICE_ENTRIES) -> Slices[bool]:
    """`check_integrity` in slices of about `size` table entries; other operations may run in between. Returns False
    if the sums could not be checked because the state changed too often. Raises InternalError."""
    complete = yield from _check_sums(state, size, MAX_TRIES)
    yield from _check_index(state, max(size // _LOOKUP_COST, 1))
    for namespace in tuple(state.namespaces):
        yield from _check_names(state, namespace, size)
        for step_id in tuple(namespace.steps):
            yield from _check_step(state, namespace, step_id, size)
    if state.config.enable_prefix_caching:
        yield from _check_chains(state, max(size // _HASH_COST, 1))
    return complete


def _check_index(state: BlockState, size: int) -> Slices[None]:
    device = state.device
    for window in windows(device.num_blocks, size):
        indexed = np.flatnonzero(device.indexed[window]) + window.start
        for block in indexed.tolist():
            found = device.index.blocks.get(device.hashes[block] or b"")
            require(found == block, f"block {block} is not found by its hash")
        kept = device.kept_hashes[indexed].tobytes()
        require(kept == b"".join(device.hashes[block] or b"" for block in indexed.tolist()), "a hash is not kept")
        yield


def _check_names(state: BlockState, namespace: SessionNamespace, size: int) -> Slices[None]:
    """Check that the states of a namespace's rows name it and its sequences, so that a restart finds them."""
    names = np.array(list(namespace.rows), np.int64)
    for window in windows(len(names), size):
        if namespace.closed:
            return
        part = names[window].tolist()
        rows = [(name, row) for name in part if (row := namespace.rows.get(name)) is not None]
        states = state.sequences.states[[row for _, row in rows]]
        require((states[:, NAMESPACE] == namespace.number).all(), "a row does not name its namespace")
        require(states[:, SEQUENCE_ID].tolist() == [name for name, _ in rows], "a row does not name its sequence")
        yield


def _check_step(state: BlockState, namespace: SessionNamespace, step_id: int, size: int) -> Slices[None]:
    """Check that a live step is the newest step of its sequences, apart from its follower, and that until it commits no
    other sequence can write or find its slots."""
    entry = namespace.steps.get(step_id)
    if entry is None:
        return  # the step ended after this pass listed the live steps
    step = entry.plan
    newest = state.sequences.steps[step.rows]
    replaced = newest != step_id
    require((newest[replaced] == entry.follower).all(), f"live step {step_id} is not its sequences' newest")
    require(replaced.any() == bool(entry.follower), f"step {step_id} has a follower that shares no sequence")
    _check_links(namespace, step_id, entry)
    names = [namespace.rows.get(sequence_id) for sequence_id in step.sequence_ids.tolist()]
    require(names == step.rows.tolist(), f"step {step_id} names the wrong rows")
    if not entry.committed:
        yield from _check_slots(state, namespace, entry, size)
    yield


def _check_links(namespace: SessionNamespace, step_id: int, entry: LiveStep) -> None:
    """Check that the steps that follow one another are at most two, and that each knows the other."""
    if entry.follows:
        followed = namespace.steps.get(entry.follows)
        require(followed is not None and followed.follower == step_id, f"the step that {step_id} follows is not live")
        require(followed is not None and not followed.follows, f"step {step_id} is the third in a row")
    if entry.follower:
        follower = namespace.steps.get(entry.follower)
        require(follower is not None and follower.follows == step_id, f"the follower of step {step_id} is not live")
    require(entry.tokens_known or not entry.committed, f"step {step_id} committed without its tokens")


def _check_slots(state: BlockState, namespace: SessionNamespace, entry: LiveStep, size: int) -> Slices[None]:
    """Check that the slots of a step are exclusive. The sequences of a live step get no tokens except the step's own,
    so the check may take any number of slices."""
    step, device = entry.plan, state.device
    starts = (step.context_lens - step.query_lens).astype(np.int64)
    computed, stops = state.sequences.num_computed[step.rows], step.context_lens.astype(np.int64)
    begins = computed <= starts if entry.follows else computed == starts
    require(begins.all(), f"step {step.step_id} covers computed tokens")
    first = starts // state.config.block_size
    counts = -(-np.maximum(stops, state.sequences.lengths[step.rows]) // state.config.block_size) - first
    for rows, entries in pieces(step.rows, first, counts, size):
        if namespace.steps.get(step.step_id) is not entry or entry.committed:
            return
        blocks = state.sequences.block_tables[rows, entries].astype(np.int64)
        require_range(blocks, device.num_blocks, "a block in a table")
        require((device.ref_count[blocks] == 1).all(), f"a slot of step {step.step_id} is shared")
        require(not device.indexed[blocks].any(), f"a block that step {step.step_id} writes can be found by its hash")
        yield


def _check_chains(state: BlockState, size: int) -> Slices[None]:
    """Check that the chain hashes along the tables match the tokens, so that the index finds the right content."""
    for window in windows(state.config.max_sequences, size * _HASH_COST):
        rows = np.arange(window.start, window.stop)
        counts = _num_hashed(state, rows)
        for which, entries in pieces(rows, np.zeros_like(counts), counts, size):
            still = entries < _num_hashed(state, which)
            _check_hashes(state, which[still], entries[still])
            yield


def _num_hashed(state: BlockState, rows: Int64Array) -> Int64Array:
    """Return int64[n]: how many blocks of each row's table have a hash on the device."""
    states = state.sequences.states
    num_full: Int64Array = states[rows, NUM_COMPUTED] // state.config.block_size * (states[rows, SWAPPED] == 0)
    return num_full


def _check_hashes(state: BlockState, rows: Int64Array, entries: Int64Array) -> None:
    """Check that each block's hash is computed from its tokens and the hash of the previous block in its table."""
    device, size = state.device, 4 * state.config.block_size
    blocks = state.sequences.block_tables[rows, entries].astype(np.int64)
    before = state.sequences.block_tables[rows, np.maximum(entries - 1, 0)].astype(np.int64)
    require_range(np.concatenate([blocks, before]), device.num_blocks, "a block in a table")
    data = token_bytes(device.token_ids[blocks])
    extra_keys = state.sequences.extra_keys.by_row
    for i, (row, entry, block, previous) in enumerate(
        zip(rows.tolist(), entries.tolist(), blocks.tolist(), before.tolist(), strict=True)
    ):
        parent = device.hashes[previous] if entry else device.index.root
        extra = extra_keys[row].get(entry, b"") if row in extra_keys else b""
        expected = block_hash(parent or b"", data[i * size : (i + 1) * size], extra)
        require(device.hashes[block] == expected, f"the hash of block {block} is not its content's")


# ---- Sums over the whole state


def _check_sums(state: BlockState, size: int, max_tries: int) -> Slices[bool]:
    """Check the sums in slices. It starts again if the state changed since the previous slice, with at most `max_tries`
    attempts. Returns whether an attempt finished. Raises InternalError."""
    for _ in range(max_tries):
        generation = state.generation
        for _ in _sums(state, size):
            yield
            if state.generation != generation:
                break
        else:
            return True
    return False


def _sums(state: BlockState, size: int) -> Slices[None]:
    yield from _check_rows(state, size)
    device, swap = _Holders(state.device), _Holders(state.swap)
    yield from _count_holders(state, device, swap, size)
    device.add_references(state.quarantine.held)
    for holders in (device, swap):
        yield from holders.mark_free(size)
        yield from holders.check(size)
    yield from _check_pins(state, size)
    _check_quarantine(state)


def _check_rows(state: BlockState, size: int) -> Slices[None]:
    """Check that each row is either free or has exactly one sequence id, and check the totals over the rows."""
    sequences, num_rows = state.sequences, state.config.max_sequences
    free, named = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.int32)
    for part in parts(sequences.free_rows, size):
        require_range(part, num_rows, "a free row")
        free[part] = True
        yield
    names = itertools.chain.from_iterable(namespace.rows.values() for namespace in state.namespaces)
    for part in parts(itertools.chain(names, sequences.ending), size):
        require_range(part, num_rows, "a named row")
        np.add.at(named, part, 1)
        yield
    for part in parts(sequences.extra_keys.by_row, size):
        require(not free[part].any(), "a free row has extra keys")
        yield
    num_tokens = num_swapped = 0
    for window in windows(num_rows, size):
        require((named[window] == ~free[window]).all(), "the rows in use do not have exactly one sequence id each")
        rows = state.sequences.states[window][~free[window]]
        _check_lengths(state, rows)
        num_tokens += int(rows[:, LENGTH].sum())
        num_swapped += int(rows[:, SWAPPED].sum())
        yield
    require(np.count_nonzero(free) == len(sequences.free_rows), "a row is free twice")
    require(num_tokens == sequences.num_tokens, "the token count is wrong")
    require(num_swapped == sequences.num_swapped, "the count of swapped sequences is wrong")
    num_on_disk = sum(len(namespace.on_disk) for namespace in state.namespaces)
    require(num_on_disk == sequences.num_on_disk, "the count of sequences on a disk is wrong")


def _check_lengths(state: BlockState, rows: Int64Array) -> None:
    """Check the sequence states int64[n, 8] of live rows."""
    length, computed, num_blocks = rows[:, LENGTH], rows[:, NUM_COMPUTED], rows[:, NUM_BLOCKS]
    require(((computed >= 0) & (computed <= length)).all(), "more tokens are computed than there are")
    require((num_blocks * state.config.block_size >= length).all(), "a table is too short")
    require((num_blocks <= state.sequences.block_tables.shape[1]).all(), "a table is too long")


class _Holders:
    """Per block of a pool: the number of tables that hold it, its entry in them, and whether it is free."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._counts = np.zeros(pool.num_blocks, np.int32)
        # The table entry plus 1, or 0 if no table holds the block.
        self._entries = np.zeros(pool.num_blocks, np.int32)
        self._free = np.zeros(pool.num_blocks, np.bool_)

    def add(self, blocks: Int64Array, entries: Int64Array) -> None:
        """Count table entries and the blocks in them."""
        require_range(blocks, self._pool.num_blocks, "a block in a table")
        before = self._entries[blocks]
        self._entries[blocks] = entries + 1
        same = (before == 0) | (before == entries + 1)
        same &= self._entries[blocks] == entries + 1
        require(same.all(), "a block is at two different entries of tables")
        np.add.at(self._counts, blocks, 1)

    def add_references(self, held: BoolArray) -> None:
        """Count a reference of each of these blocks bool[num_blocks] that is no table's."""
        self._counts += held

    def mark_free(self, size: int) -> Slices[None]:
        pool = self._pool
        require(0 <= pool.num_free <= pool.num_blocks, "the count of free blocks is wrong")
        for window in windows(pool.num_free, size):
            part = pool.free_blocks(window)
            require_range(part, pool.num_blocks, "a free block")
            self._free[part] = True
            yield

    def check(self, size: int) -> Slices[None]:
        """Compare the counts with the pool, after all entries were added."""
        pool, device = self._pool, self._pool if isinstance(self._pool, CachingBlockPool) else None
        owned: int | Int64Array = 0
        num_free = num_active = num_shared = num_queued = num_pinned = num_indexed = num_loading = 0
        for window in windows(pool.num_blocks, size):
            counts, free = self._counts[window], self._free[window]
            require(
                np.array_equal(counts, pool.ref_count[window]),
                "a block's ref count is not the number of tables that hold it, and of its quarantine",
            )
            states = free.astype(np.int8) + (counts > 0)
            if device is not None:
                cached, pinned = device.indexed[window] & (counts == 0), device.pinned[window]
                queued, loading = device.evictable.has(window), device.loading[window]
                require(
                    np.array_equal(queued, cached & ~pinned),
                    "the eviction queue is not the unpinned cached blocks, once each",
                )
                states += cached
                states += loading
                require(not (device.indexed[window] & loading).any(), "a block that is being loaded can be found")
                require((device.copied[window][~device.indexed[window]] == 0).all(), "a block keeps a copy's number")
                num_queued += int(np.count_nonzero(queued))
                num_pinned += int(np.count_nonzero(cached & pinned))
                num_indexed += int(np.count_nonzero(device.indexed[window]))
                num_loading += int(np.count_nonzero(loading))
                if device.owners is not None:
                    owned = owned + device.owners.counted(window, ~free, queued)
            require((states == 1).all(), "free + held + cached + loading are not all blocks, once each")
            num_free += int(np.count_nonzero(free))
            num_active += int(np.count_nonzero(counts))
            num_shared += int(np.count_nonzero(counts > 1))
            yield
        require(num_free == pool.num_free, "a block is free twice")
        require(num_active == pool.num_active, "the count of active blocks is wrong")
        require(num_shared == pool.num_shared, "the count of shared blocks is wrong")
        if device is not None:
            require(num_queued == len(device.evictable), "the eviction queue's length is wrong")
            require(num_pinned == device.num_pinned_cached, "the count of pinned cached blocks is wrong")
            require(num_indexed == len(device.index), "the index does not name the indexed blocks")
            require(num_loading == device.num_loading, "the count of blocks that are being loaded is wrong")
            require(device.owners is None or device.owners.agree(owned), "the counts of tenants' blocks are wrong")


def _count_holders(state: BlockState, device: _Holders, swap: _Holders, size: int) -> Slices[None]:
    for window in windows(state.config.max_sequences, size):
        counts = state.sequences.num_blocks[window]
        rows = np.arange(window.start, window.stop)
        for which, entries in pieces(rows, np.zeros_like(counts), counts, size):
            blocks = state.sequences.block_tables[which, entries].astype(np.int64)
            swapped = state.sequences.states[which, SWAPPED] == 1
            device.add(blocks[~swapped], entries[~swapped])
            swap.add(blocks[swapped], entries[swapped])
            yield


def _check_pins(state: BlockState, size: int) -> Slices[None]:
    num_pinned = 0
    for window in windows(state.config.num_blocks, size):
        pinned = state.device.pinned[window]
        require(not (pinned & ~state.device.indexed[window]).any(), "a pinned block cannot be found")
        require(np.array_equal(state.pins.counts[window] > 0, pinned), "the pins' blocks are not the pinned blocks")
        num_pinned += int(np.count_nonzero(pinned))
        yield
    require(num_pinned == state.pins.num_pinned, "the count of pinned blocks is wrong")
    require(state.pins.num_pinned <= state.config.max_pinned_blocks, "more blocks are pinned than may be")


def _check_quarantine(state: BlockState) -> None:
    held = [one.blocks for one in state.quarantine]
    blocks = np.sort(np.concatenate(held)) if held else np.zeros(0, np.int64)
    require(np.array_equal(blocks, np.flatnonzero(state.quarantine.held)), "a block in quarantine waits not once")
    require(len(blocks) == state.quarantine.num_blocks, "the count of blocks in quarantine is wrong")
    require(not state.device.indexed[blocks].any(), "a block in quarantine can be found")


# ---- Assertions, and iteration in slices


def require(invariant: bool | np.bool_, broken: str) -> None:
    """Raise InternalError unless the invariant holds."""
    if not invariant:
        raise InternalError(f"integrity: {broken}")


def require_range(numbers: Int64Array, stop: int, what: str) -> None:
    """Check that each of `numbers` int64[n] is an index below `stop`, before they are used as indices."""
    require(((numbers >= 0) & (numbers < stop)).all(), f"{what} is not from 0 to {stop - 1}")


def parts(numbers: Iterable[int], size: int) -> Iterator[Int64Array]:
    """Yield the numbers in arrays int64[n], n <= `size`."""
    left = iter(numbers)
    while len(part := np.fromiter(itertools.islice(left, size), np.int64)):
        yield part


def windows(stop: int, size: int) -> Iterator[slice]:
    """Yield the range 0, ..., stop - 1 in slices of at most `size`."""
    for first in range(0, stop, size):
        yield slice(first, min(first + size, stop))


def pieces(
    rows: Int64Array, first: Int64Array, counts: Int64Array, size: int
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield the table entries first[i], ..., first[i] + counts[i] - 1 of each row, at most `size` at a time, as (row
    int64[m], entry int64[m])."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    for window in windows(total, size):
        numbers = np.arange(window.start, window.stop)
        which = np.searchsorted(ends, numbers, side="right")
        yield rows[which], numbers - (ends - counts - first)[which]
