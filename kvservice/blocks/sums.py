"""Invariants that are sums over the whole state: references to each row, and reference counts of blocks.

The sums must describe one state, so a check in slices starts again if an operation runs in between.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvservice.blocks.core import Core
from kvservice.blocks.invariants import hold, hold_range, parts, pieces, windows
from kvservice.blocks.plans import Int64Array
from kvservice.blocks.sequences import LENGTH, NUM_BLOCKS, NUM_COMPUTED, SWAPPED
from kvservice.blocks.slices import Slices
from kvservice.blocks.tier import DeviceTier, Tier


def check_sums(core: Core, size: int, max_tries: int) -> Slices[bool]:
    """Check the sums in slices. It starts again if the state changed since the previous slice, with at most `max_tries`
    attempts. Returns whether an attempt finished. Raises InternalError."""
    for _ in range(max_tries):
        generation = core.generation
        for _ in _sums(core, size):
            yield
            if core.generation != generation:
                break
        else:
            return True
    return False


def _sums(core: Core, size: int) -> Slices[None]:
    yield from _check_rows(core, size)
    device, swap = _Holders(core.device), _Holders(core.swap)
    yield from _count_holders(core, device, swap, size)
    for holders in (device, swap):
        yield from holders.mark_free(size)
        yield from holders.check(size)
    yield from _check_pins(core, size)


def _check_rows(core: Core, size: int) -> Slices[None]:
    """Check that each row is either free or has exactly one sequence id, and check the totals over the rows."""
    sequences, num_rows = core.sequences, core.config.max_sequences
    free, named = np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.int32)
    for part in parts(sequences.free_rows, size):
        hold_range(part, num_rows, "a free row")
        free[part] = True
        yield
    names = itertools.chain.from_iterable(space.rows.values() for space in core.spaces)
    for part in parts(itertools.chain(names, sequences.ending), size):
        hold_range(part, num_rows, "a named row")
        np.add.at(named, part, 1)
        yield
    for part in parts(sequences.extra_keys, size):
        hold(not free[part].any(), "a free row has extra keys")
        yield
    num_tokens = num_swapped = 0
    for window in windows(num_rows, size):
        hold((named[window] == ~free[window]).all(), "the rows in use do not have exactly one sequence id each")
        rows = core.meta[window][~free[window]]
        _check_lengths(core, rows)
        num_tokens += int(rows[:, LENGTH].sum())
        num_swapped += int(rows[:, SWAPPED].sum())
        yield
    hold(np.count_nonzero(free) == len(sequences.free_rows), "a row is free twice")
    hold(num_tokens == sequences.num_tokens, "the token count is wrong")
    hold(num_swapped == sequences.num_swapped, "the count of swapped sequences is wrong")


def _check_lengths(core: Core, rows: Int64Array) -> None:
    """Check the sequence states int64[n, 8] of live rows."""
    length, computed, num_blocks = rows[:, LENGTH], rows[:, NUM_COMPUTED], rows[:, NUM_BLOCKS]
    hold(((computed >= 0) & (computed <= length)).all(), "more tokens are computed than there are")
    hold((num_blocks * core.config.block_size >= length).all(), "a table is too short")
    hold((num_blocks <= core.block_tables.shape[1]).all(), "a table is too long")


class _Holders:
    """Per block of a tier: the number of tables that hold it, its entry in them, and whether it is free."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._counts = np.zeros(tier.num_blocks, np.int32)
        # The table entry plus 1, or 0 if no table holds the block.
        self._entries = np.zeros(tier.num_blocks, np.int32)
        self._free = np.zeros(tier.num_blocks, np.bool_)

    def add(self, blocks: Int64Array, entries: Int64Array) -> None:
        """Count table entries and the blocks in them."""
        hold_range(blocks, self._tier.num_blocks, "a block in a table")
        before = self._entries[blocks]
        self._entries[blocks] = entries + 1
        same = (before == 0) | (before == entries + 1)
        same &= self._entries[blocks] == entries + 1
        hold(same.all(), "a block is at two different entries of tables")
        np.add.at(self._counts, blocks, 1)

    def mark_free(self, size: int) -> Slices[None]:
        tier = self._tier
        hold(0 <= tier.num_free <= tier.num_blocks, "the count of free blocks is wrong")
        for window in windows(tier.num_free, size):
            part = tier.free_blocks(window)
            hold_range(part, tier.num_blocks, "a free block")
            self._free[part] = True
            yield

    def check(self, size: int) -> Slices[None]:
        """Compare the counts with the tier, after all entries were added."""
        tier, device = self._tier, self._tier if isinstance(self._tier, DeviceTier) else None
        num_free = num_active = num_shared = num_queued = num_pinned = num_indexed = 0
        for window in windows(tier.num_blocks, size):
            counts, free = self._counts[window], self._free[window]
            hold(
                np.array_equal(counts, tier.ref_count[window]),
                "a block's ref count is not the number of tables that hold it",
            )
            states = free.astype(np.int8) + (counts > 0)
            if device is not None:
                cached, pinned = device.indexed[window] & (counts == 0), device.pinned[window]
                queued = device.evictable.has(window)
                hold(
                    np.array_equal(queued, cached & ~pinned),
                    "the eviction queue is not the unpinned cached blocks, once each",
                )
                states += cached
                num_queued += int(np.count_nonzero(queued))
                num_pinned += int(np.count_nonzero(cached & pinned))
                num_indexed += int(np.count_nonzero(device.indexed[window]))
            hold((states == 1).all(), "free + held + cached are not all blocks, once each")
            num_free += int(np.count_nonzero(free))
            num_active += int(np.count_nonzero(counts))
            num_shared += int(np.count_nonzero(counts > 1))
            yield
        hold(num_free == tier.num_free, "a block is free twice")
        hold(num_active == tier.num_active, "the count of active blocks is wrong")
        hold(num_shared == tier.num_shared, "the count of shared blocks is wrong")
        if device is not None:
            hold(num_queued == len(device.evictable), "the eviction queue's length is wrong")
            hold(num_pinned == device.num_pinned_unheld, "the count of pinned cached blocks is wrong")
            hold(num_indexed == len(device.index), "the index does not name the indexed blocks")


def _count_holders(core: Core, device: _Holders, swap: _Holders, size: int) -> Slices[None]:
    for window in windows(core.config.max_sequences, size):
        counts = core.sequences.num_blocks[window]
        rows = np.arange(window.start, window.stop)
        for which, entries in pieces(rows, np.zeros_like(counts), counts, size):
            blocks = core.block_tables[which, entries].astype(np.int64)
            swapped = core.meta[which, SWAPPED] == 1
            device.add(blocks[~swapped], entries[~swapped])
            swap.add(blocks[swapped], entries[swapped])
            yield


def _check_pins(core: Core, size: int) -> Slices[None]:
    num_pinned = 0
    for window in windows(core.config.num_blocks, size):
        pinned = core.device.pinned[window]
        hold(not (pinned & ~core.device.indexed[window]).any(), "a pinned block cannot be found")
        hold(np.array_equal(core.pin_counts[window] > 0, pinned), "the pins' blocks are not the pinned blocks")
        num_pinned += int(np.count_nonzero(pinned))
        yield
    hold(num_pinned == core.num_pinned, "the count of pinned blocks is wrong")
    hold(core.num_pinned <= core.config.max_pinned_blocks, "more blocks are pinned than may be")
