"""Invariants that are sums over the whole state: references to each row, and reference counts of blocks.

The sums must describe one state, so a check in slices starts again if an operation runs in between.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvservice.blocks.block_pool import BlockPool, CachingBlockPool
from kvservice.blocks.invariants import parts, pieces, require, require_range, windows
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED
from kvservice.blocks.slices import Slices
from kvservice.blocks.state import BlockState


def check_sums(state: BlockState, size: int, max_tries: int) -> Slices[bool]:
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
    for holders in (device, swap):
        yield from holders.mark_free(size)
        yield from holders.check(size)
    yield from _check_pins(state, size)


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
    for part in parts(sequences.extra_keys, size):
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
        num_free = num_active = num_shared = num_queued = num_pinned = num_indexed = num_loading = 0
        for window in windows(pool.num_blocks, size):
            counts, free = self._counts[window], self._free[window]
            require(
                np.array_equal(counts, pool.ref_count[window]),
                "a block's ref count is not the number of tables that hold it",
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
