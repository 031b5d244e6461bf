"""A pool of blocks seen as numbers: who holds each, which are free, which tokens lie in them.

`Tier` is what both pools need and all that the swap pool needs. `DeviceTier` adds the cached blocks: those that no
table holds any more but that the prefix index can still find. All arguments that name blocks are int64 arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from kvservice.blocks.ages import BlockAges
from kvservice.blocks.events import EventJournal
from kvservice.blocks.eviction import EvictionQueue
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array, Zeros
from kvservice.blocks.prefix import PrefixIndex

# A typed array of no dimension: NumPy takes it in half the time that it needs for Python's integer.
ONE = np.array(1, np.int32)


class Tier:
    """ref_count int32[num_blocks] is the number of tables that hold a block; token_ids int32[num_blocks, block_size].

    `hashes[block]` is the chain hash of a block that is full and computed; of any other block it means nothing.
    """

    def __init__(self, num_blocks: int, block_size: int, name: str, zeros: Zeros) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_count: Int32Array = zeros(f"{name}_ref_count", (num_blocks,), np.int32)
        self.token_ids = np.zeros((num_blocks, block_size), np.int32)
        self.token_slots = self.token_ids.reshape(-1)
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.num_active = 0
        self.num_shared = 0
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give."""
        return self.num_free

    def take(self, count: int) -> Int64Array:
        """Blocks that nobody holds, now held once each."""
        blocks = self._pop_free(count)
        self.ref_count[blocks] = 1
        self.num_active += count
        return blocks

    def hold(self, blocks: Int64Array, counts: Int64Array | int = 1) -> None:
        """Adds `counts` holders to each of these distinct blocks."""
        before = self.ref_count[blocks]
        after = before + counts
        self.ref_count[blocks] = after
        self.num_active += len(blocks) - int(np.count_nonzero(before))
        self.num_shared += int(np.count_nonzero(after > 1)) - int(np.count_nonzero(before > 1))

    def hold_active(self, table: Int32Array, more: Int32Array) -> None:
        """`hold` by `more` (int32 of no dimension, at least 1) for a table int32[n] whose blocks are held already: what
        forks do, on the fast path."""
        blocks = table.astype(np.int64)
        counts = self.ref_count[blocks]
        self.num_shared += int(np.count_nonzero(counts == ONE))
        counts += more
        self.ref_count[blocks] = counts

    def release(self, blocks: Int64Array, counts: Int64Array | int = 1) -> None:
        """Takes `counts` holders from each of these distinct blocks; those without any left become free."""
        unheld = self._unhold(blocks, counts)
        self._push_free(unheld)

    def _unhold(self, blocks: Int64Array, counts: Int64Array | int) -> Int64Array:
        before = self.ref_count[blocks]
        after = before - counts
        assert np.minimum.reduce(after, initial=0) >= 0, "a block was released more often than it was held"
        self.ref_count[blocks] = after
        unheld: Int64Array = blocks[after == 0]
        self.num_active -= len(unheld)
        self.num_shared -= int(np.count_nonzero(before > 1)) - int(np.count_nonzero(after > 1))
        return unheld

    def _pop_free(self, count: int) -> Int64Array:
        assert count <= self.num_free
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count][::-1].astype(np.int64)

    def _push_free(self, blocks: Int64Array) -> None:
        end = self.num_free + len(blocks)
        self._free[self.num_free : end] = blocks
        self.num_free = end

    def free_blocks(self, part: slice = slice(None)) -> Int64Array:
        """The free stack, bottom first, or a part of it."""
        return self._free[: self.num_free][part].astype(np.int64)


class DeviceTier(Tier):
    """The pool that attention reads. Blocks are free, active (held) or cached (not held, but in the prefix index)."""

    def __init__(
        self, num_blocks: int, block_size: int, clock: Callable[[], float], journal: EventJournal | None, zeros: Zeros
    ) -> None:
        super().__init__(num_blocks, block_size, "device", zeros)
        self.index = PrefixIndex(block_size)
        self.ages = BlockAges(num_blocks, clock, zeros)
        self.journal = journal
        self.indexed: BoolArray = zeros("indexed", (num_blocks,), np.bool_)
        self.pinned: BoolArray = zeros("pinned", (num_blocks,), np.bool_)
        self.evictable = EvictionQueue(num_blocks)
        self.num_pinned_unheld = 0
        self.evictions = 0

    @property
    def num_available(self) -> int:
        return self.num_free + len(self.evictable)

    @property
    def num_cached(self) -> int:
        return len(self.evictable) + self.num_pinned_unheld

    def take(self, count: int) -> Int64Array:
        """Free blocks first, then the least recently used cached ones, which are forgotten."""
        from_free = min(count, self.num_free)
        blocks = self._pop_free(from_free)
        if from_free < count:
            evicted = self.evictable.pop(count - from_free)
            self.ages.evict(evicted)
            self.forget(evicted)
            self.evictions += len(evicted)
            blocks = np.concatenate([blocks, evicted])
        self.ages.take(blocks)
        self.ref_count[blocks] = 1
        self.num_active += count
        return blocks

    def hold_found(self, blocks: Int64Array, counts: Int64Array | int = 1) -> None:
        """`hold` for distinct blocks that the index found: cached ones stop being evictable."""
        unheld = blocks[self.ref_count[blocks] == 0]
        if len(unheld):
            self.ages.reuse(unheld)
            pinned = self.pinned[unheld]
            self.num_pinned_unheld -= int(np.count_nonzero(pinned))
            self.evictable.remove(unheld[~pinned])
        self.hold(blocks, counts)

    def num_evictable(self, blocks: Int64Array) -> int:
        """How many of these distinct blocks `take` could give now."""
        return int(np.count_nonzero((self.ref_count[blocks] == 0) & self.indexed[blocks] & ~self.pinned[blocks]))

    def release(self, blocks: Int64Array, counts: Int64Array | int = 1) -> None:
        """As `Tier.release`, but what the index knows stays cached; the first of `blocks` will be evicted first."""
        unheld = self._unhold(blocks, counts)
        known = self.indexed[unheld]
        if not np.count_nonzero(known):
            self._give_up(unheld)
            return
        self._give_up(unheld[~known])
        cached = unheld[known]
        self.ages.cache(cached)
        pinned = self.pinned[cached]
        self.num_pinned_unheld += int(np.count_nonzero(pinned))
        self.evictable.add(cached[~pinned])

    def _give_up(self, blocks: Int64Array) -> None:
        self.ages.free(blocks)
        self._push_free(blocks)

    def make_findable(self, blocks: list[int], chain_hashes: list[bytes]) -> list[bool]:
        """Puts blocks that are full and computed into the index. Which of them are found by their hashes from now on:
        not those whose hash finds another block."""
        setdefault = self.index.blocks.setdefault
        found = [setdefault(chain_hash, block) == block for block, chain_hash in zip(blocks, chain_hashes, strict=True)]
        self.indexed[blocks if all(found) else list(itertools.compress(blocks, found))] = True
        return found

    def forget(self, blocks: Int64Array) -> None:
        """Takes blocks out of the index; their hashes stay, for the chains of those who hold them."""
        forgotten = self._take_from_index(blocks)
        if self.journal is not None and forgotten:
            self.journal.removed(forgotten)

    def _take_from_index(self, blocks: Int64Array) -> list[bytes]:
        """Returns their hashes."""
        # What is indexed has a hash, and is found by it; else this is a KeyError.
        forgotten: list[bytes] = list(map(self.hashes.__getitem__, blocks.tolist()))  # type: ignore[arg-type]
        for _ in map(self.index.blocks.pop, forgotten):
            pass
        self.indexed[blocks] = False
        return forgotten

    def pin(self, blocks: Int64Array) -> None:
        """Withholds distinct unpinned indexed blocks from eviction."""
        self.pinned[blocks] = True
        unheld = blocks[self.ref_count[blocks] == 0]
        self.evictable.remove(unheld)
        self.num_pinned_unheld += len(unheld)

    def unpin(self, blocks: Int64Array) -> None:
        """The reverse of `pin`; the first of `blocks` will be evicted first."""
        self.pinned[blocks] = False
        unheld = blocks[self.ref_count[blocks] == 0]
        self.evictable.add(unheld)
        self.num_pinned_unheld -= len(unheld)

    def unpinned(self) -> Int64Array:
        """The indexed blocks that no pin keeps."""
        return np.flatnonzero(self.indexed & ~self.pinned)

    def reset(self, blocks: Int64Array, *, whole: bool) -> int:
        """Forgets those of these blocks that are unpinned still. `whole`: they were all there are. Returns how many of
        them were cached and are free now."""
        blocks = blocks[self.indexed[blocks] & ~self.pinned[blocks]]
        unheld = blocks[self.ref_count[blocks] == 0]
        forgotten = self._take_from_index(blocks)
        if self.journal is not None and forgotten:
            if whole and not self.index.blocks:
                self.journal.cleared()
            else:
                self.journal.removed(forgotten)
        self.evictable.remove(unheld)
        self._give_up(unheld)
        return len(unheld)
