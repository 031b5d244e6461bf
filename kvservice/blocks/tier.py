"""Block allocator of a pool: reference counts, free blocks, and the tokens in each block.

`Tier` is the common part and all that the swap pool needs. `DeviceTier` adds cached blocks, which no table holds but
which are still in the prefix index. All arguments that name blocks are int64 arrays.
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

# A zero-dimensional array with a dtype. NumPy processes it in half the time of a Python integer.
ONE = np.array(1, np.int32)


class Tier:
    """Blocks of one pool.

    `ref_count` int32[num_blocks] is the number of tables that hold each block. `token_ids` is
    int32[num_blocks, block_size]. `hashes[block]` is the chain hash of a full, computed block; it is undefined for
    other blocks.
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
        """Number of blocks that `take` can allocate."""
        return self.num_free

    def take(self, count: int) -> Int64Array:
        """Allocate blocks, with reference count 1 each."""
        blocks = self._pop_free(count)
        self.ref_count[blocks] = 1
        self.num_active += count
        return blocks

    def hold(self, blocks: Int64Array, counts: Int64Array | int = 1) -> None:
        """Add `counts` references to each of these distinct blocks."""
        before = self.ref_count[blocks]
        after = before + counts
        self.ref_count[blocks] = after
        self.num_active += len(blocks) - int(np.count_nonzero(before))
        self.num_shared += int(np.count_nonzero(after > 1)) - int(np.count_nonzero(before > 1))

    def hold_active(self, table: Int32Array, more: Int32Array) -> None:
        """Add `more` references (a zero-dimensional int32, at least 1) to each block of a table int32[n]. All blocks
        have references already. This is the fast path of forks."""
        blocks = table.astype(np.int64)
        counts = self.ref_count[blocks]
        self.num_shared += int(np.count_nonzero(counts == ONE))
        counts += more
        self.ref_count[blocks] = counts

    def release(self, blocks: Int64Array, counts: Int64Array | int = 1) -> None:
        """Drop `counts` references of each of these distinct blocks. Blocks without references become free."""
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
        """Return the stack of free blocks, bottom first, or a slice of it."""
        return self._free[: self.num_free][part].astype(np.int64)


class DeviceTier(Tier):
    """The pool that attention reads. A block is free, active (referenced) or cached (unreferenced, but indexed)."""

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
        """Allocate free blocks first, then evict the least recently used cached blocks."""
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
        """Add references to distinct blocks that the index found. Cached blocks leave the eviction queue."""
        unheld = blocks[self.ref_count[blocks] == 0]
        if len(unheld):
            self.ages.reuse(unheld)
            pinned = self.pinned[unheld]
            self.num_pinned_unheld -= int(np.count_nonzero(pinned))
            self.evictable.remove(unheld[~pinned])
        self.hold(blocks, counts)

    def num_evictable(self, blocks: Int64Array) -> int:
        """Return how many of these distinct blocks `take` could evict now."""
        return int(np.count_nonzero((self.ref_count[blocks] == 0) & self.indexed[blocks] & ~self.pinned[blocks]))

    def release(self, blocks: Int64Array, counts: Int64Array | int = 1) -> None:
        """Drop references as `Tier.release`. Indexed blocks stay cached, and the first of `blocks` is evicted first."""
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
        """Add full, computed blocks to the index. Returns, for each, whether its hash finds it; False means that the
        hash already finds another block."""
        setdefault = self.index.blocks.setdefault
        found = [setdefault(chain_hash, block) == block for block, chain_hash in zip(blocks, chain_hashes, strict=True)]
        self.indexed[blocks if all(found) else list(itertools.compress(blocks, found))] = True
        return found

    def forget(self, blocks: Int64Array) -> None:
        """Remove blocks from the index. Their hashes stay, because the chains of their holders need them."""
        forgotten = self._take_from_index(blocks)
        if self.journal is not None and forgotten:
            self.journal.removed(forgotten)

    def _take_from_index(self, blocks: Int64Array) -> list[bytes]:
        """Remove blocks from the index without a journal entry. Returns their hashes."""
        # Every indexed block has a hash that finds it; otherwise this raises KeyError.
        forgotten: list[bytes] = list(map(self.hashes.__getitem__, blocks.tolist()))  # type: ignore[arg-type]
        for _ in map(self.index.blocks.pop, forgotten):
            pass
        self.indexed[blocks] = False
        return forgotten

    def pin(self, blocks: Int64Array) -> None:
        """Keep distinct indexed blocks, not pinned so far, from eviction."""
        self.pinned[blocks] = True
        unheld = blocks[self.ref_count[blocks] == 0]
        self.evictable.remove(unheld)
        self.num_pinned_unheld += len(unheld)

    def unpin(self, blocks: Int64Array) -> None:
        """Undo `pin`. The first of `blocks` is evicted first."""
        self.pinned[blocks] = False
        unheld = blocks[self.ref_count[blocks] == 0]
        self.evictable.add(unheld)
        self.num_pinned_unheld -= len(unheld)

    def unpinned(self) -> Int64Array:
        """Return the indexed blocks that are not pinned."""
        return np.flatnonzero(self.indexed & ~self.pinned)

    def reset(self, blocks: Int64Array, *, whole: bool) -> int:
        """Remove those of these blocks from the index that are still indexed and not pinned. `whole` says that `blocks`
        were all such blocks of the pool. Returns how many of them were cached and are free now."""
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
