"""Block pools: reference counts, free blocks, the tokens in each block, and the cached blocks of the device's pool.

`BlockPool` is all that the swap tier needs. `CachingBlockPool`, the pool on the device, adds cached blocks, which no
table holds but which are still in the prefix index (vLLM v0 calls the two NaiveBlockAllocator and
PrefixCachingBlockAllocator). It finds blocks with its `PrefixIndex`, evicts them in the order of its `EvictionQueue`,
and keeps histograms of their `BlockAges`. All arguments that name blocks are int64 arrays.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvservice._ext import add_references, drop_references, match_hashes
from kvservice.blocks.events import EventJournal
from kvservice.blocks.plans import ArrayMemory, BoolArray, Int32Array, Int64Array
from kvservice.blocks.quotas import NOBODY, BlockOwners, TenantQuota, places_within
from kvservice.chain_hash import block_hash, root_hash
from kvservice.errors import OutOfBlocksError, ResourceExhaustedError

_NO_BLOCKS = np.zeros(0, np.int64)
HASH_BYTES: Final = 32
_HASH_RECORD = np.dtype((np.void, HASH_BYTES))
# The value of `CachingBlockPool.copied` for a block of which no copy is known.
NOT_COPIED: Final = 0
# Stamp of a block that is not in the queue, and the first position in its log.
_NOWHERE, _BEGIN = 0, 1
_SLACK = 1024
LIFETIME, IDLE_BEFORE_EVICTION, REUSE_GAP = range(3)
NUM_HISTOGRAMS = 3
BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 14400, 86400)
# The blocks of so few owners are found faster one owner after another than all at once.
_FEW_OWNERS = 4
_MISCOUNTED = "an owner has fewer blocks in the queue than are counted"
# Limits on the records that wait for `fold`: their number, and the number of blocks in them.
_MAX_NOTES = 256
_MAX_NOTED_BLOCKS = 65536

Float64Array = npt.NDArray[np.float64]


class BlockPool:
    """Blocks of one pool.

    `ref_count` int32[num_blocks] is the number of tables that hold each block. `token_ids` is
    int32[num_blocks, block_size], and `tokens_by_slot` a flat view of it. `hashes[block]` is the chain hash of a full,
    computed block; it is undefined for other blocks. `kept_hashes` uint8[num_blocks, 32] holds the same hashes, and
    zeros for None.
    """

    def __init__(self, num_blocks: int, block_size: int, name: str, memory: ArrayMemory) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_count: Int32Array = memory.zeros(f"{name}_ref_count", (num_blocks,), np.int32)
        self.token_ids: Int32Array = memory.kept(f"{name}_token_ids", (num_blocks, block_size), np.int32, private=True)
        self.tokens_by_slot = self.token_ids.reshape(-1)
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.kept_hashes: npt.NDArray[np.uint8] = memory.kept(
            f"{name}_hashes", (num_blocks, HASH_BYTES), np.uint8, private=True
        )
        self._hash_records = self.kept_hashes.reshape(-1).view(_HASH_RECORD)
        self.num_active = 0
        self.num_shared = 0
        self._free_stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.num_free = num_blocks

    @property
    def num_available(self) -> int:
        """Number of blocks that `allocate` can allocate."""
        return self.num_free

    def allocate(self, count: int) -> Int64Array:
        """Allocate blocks, with reference count 1 each."""
        blocks = self._pop_free(count)
        self.ref_count[blocks] = 1
        self.num_active += count
        return blocks

    def allocate_shared(self, ref_counts: Int64Array) -> Int64Array:
        """Allocate one block for each of these reference counts int64[n], each at least 1."""
        blocks = self.allocate(len(ref_counts))
        self.ref_count[blocks] = ref_counts
        self.num_shared += int(np.count_nonzero(ref_counts > 1))
        return blocks

    def incref(self, blocks: Int64Array) -> None:
        """Add a reference to each of these blocks, as often as it occurs."""
        self._add_references(blocks)

    def decref(self, blocks: Int64Array) -> None:
        """Drop a reference of each of these blocks, as often as it occurs. Blocks without references become free."""
        self._push_free(self._drop_references(blocks))

    def decref_entries(self, entries: Int64Array, blocks: Int64Array) -> None:
        """Drop the references of table entries int64[n] to their blocks int64[n]. The deepest blocks become the first
        to be evicted.

        A block that several tables share is at the same entry in all of them.
        """
        one_table = not np.count_nonzero(entries[1:] <= entries[:-1])
        self.decref(blocks[::-1] if one_table else blocks[np.argsort(-entries, kind="stable")])

    def _add_references(self, blocks: Int64Array) -> Int64Array:
        """Return the blocks that had no reference."""
        first: Int64Array
        first, num_shared = add_references(self.ref_count, blocks)
        self.num_active += len(first)
        self.num_shared += num_shared
        return first

    def _drop_references(self, blocks: Int64Array) -> Int64Array:
        """Return the blocks that have no reference any more."""
        unreferenced: Int64Array
        unreferenced, num_unshared = drop_references(self.ref_count, blocks)
        self.num_active -= len(unreferenced)
        self.num_shared -= num_unshared
        return unreferenced

    def _pop_free(self, count: int) -> Int64Array:
        assert count <= self.num_free
        self.num_free -= count
        return self._free_stack[self.num_free : self.num_free + count][::-1].astype(np.int64)

    def _push_free(self, blocks: Int64Array) -> None:
        end = self.num_free + len(blocks)
        self._free_stack[self.num_free : end] = blocks
        self.num_free = end

    def keep_hashes(self, blocks: Int64Array, chain_hashes: list[bytes]) -> None:
        """Store the entries of `hashes` of these blocks in `kept_hashes`."""
        self._hash_records[blocks] = np.frombuffer(b"".join(chain_hashes), _HASH_RECORD)

    def keep_hashes_of(self, blocks: Int64Array, other: BlockPool, others: Int64Array) -> None:
        """Copy the kept hashes of the blocks `others` int64[n] of another pool to these blocks int64[n]."""
        self._hash_records[blocks] = other._hash_records[others]

    def recover(self, entries: Int64Array) -> None:
        """Derive all counts and free blocks from the blocks in all tables int64[m], once for each table, and the hashes
        from their kept form."""
        self.ref_count[:] = np.bincount(entries, minlength=self.num_blocks)
        self.num_active = int(np.count_nonzero(self.ref_count))
        self.num_shared = int(np.count_nonzero(self.ref_count > 1))
        data, size = self.kept_hashes.tobytes(), HASH_BYTES
        hashed = np.flatnonzero(self.kept_hashes.any(axis=1)).tolist()
        self.hashes = [None] * self.num_blocks
        for block in hashed:
            self.hashes[block] = data[block * size : (block + 1) * size]
        self._set_free(self.ref_count == 0)

    def _set_free(self, free: BoolArray) -> None:
        blocks = np.flatnonzero(free)[::-1]
        self.num_free = 0
        self._push_free(blocks)

    def free_blocks(self, part: slice = slice(None)) -> Int64Array:
        """Return the stack of free blocks, bottom first, or a slice of it."""
        return self._free_stack[: self.num_free][part].astype(np.int64)


class CachingBlockPool(BlockPool):
    """The pool that attention reads. A block is free, active (referenced), cached (unreferenced, but indexed) or being
    loaded.

    `copied` int64[num_blocks] is the number of the copy that is being made of a block, or negative if there is a copy,
    see loading.py. It is in use from the first copy on, when `has_copies` is set.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        clock: Callable[[], float],
        journal: EventJournal | None,
        memory: ArrayMemory,
    ) -> None:
        super().__init__(num_blocks, block_size, "device", memory)
        self.index = PrefixIndex(block_size)
        self.ages = BlockAges(num_blocks, clock, memory)
        self.journal = journal
        self.indexed: BoolArray = memory.kept("indexed", (num_blocks,), np.bool_)
        self.pinned: BoolArray = memory.zeros("pinned", (num_blocks,), np.bool_)
        self.evictable = EvictionQueue(num_blocks, memory)
        self.num_pinned_cached = 0
        self.num_evicted = 0
        self.loading: BoolArray = np.zeros(num_blocks, np.bool_)
        self.num_loading = 0
        self.copied: Int64Array = np.zeros(num_blocks, np.int64)
        self.has_copies = False
        # The quota of the current operation's tenant, and the available blocks that are kept from it: `reserved` are
        # those that other tenants have guaranteed.
        self.quota: TenantQuota | None = None
        self.withheld = self.reserved = 0
        # None if the daemon has one tenant.
        self.owners: BlockOwners | None = None

    @property
    def num_available(self) -> int:
        # More may be withheld than is left: others hold what a tenant has guaranteed since the file was read again.
        return max(0, self.num_free + self.evictable.size - self.withheld)

    def room(self, num_kept: int) -> int:
        """Return how many blocks the operation may take so that `num_kept` stay available."""
        return self.num_free + self.evictable.size - max(self.withheld, num_kept)

    @property
    def num_cached(self) -> int:
        """Number of cached blocks that can be evicted."""
        return len(self.evictable)

    def require_available(self, required: int) -> None:
        """Raise OutOfBlocksError, or QuotaExceededError, unless `allocate` can allocate this many blocks."""
        if required > self.num_available:
            raise self.out_of_blocks(required, never=required > self.num_blocks)

    def out_of_blocks(self, required: int, *, never: bool, num_kept: int = 0) -> ResourceExhaustedError:
        """Return the error for a batch that needs this many blocks, now or (`never`) in any state of the pool.
        `num_kept` is the number of blocks that the watermark keeps from it."""
        free = self.num_available
        if self.quota is not None and self.withheld > max(num_kept, self.reserved):
            return self.quota.blocks_exceeded(required, free)
        kept = f"; the watermark keeps {num_kept} free" if num_kept else ""
        if self.reserved > num_kept:
            kept = f"; {self.reserved} more are guaranteed to other tenants"
        return OutOfBlocksError(
            f"{counted(required, 'block')} needed and {free} of {self.num_blocks} are available{kept}",
            tier="device", required=required, free=free, total=self.num_blocks, never=never,
        )  # fmt: skip

    def allocate(self, count: int) -> Int64Array:
        """Allocate free blocks first, then evict the least recently used cached blocks."""
        blocks = self._take(count)
        self.ref_count[blocks] = 1
        self.num_active += count
        return blocks

    def begin_loading(self, count: int) -> Int64Array:
        """Take blocks as `allocate` does, without a reference. They are being loaded until `end_loading`."""
        blocks = self._take(count)
        self.loading[blocks] = True
        self.num_loading += count
        return blocks

    def end_loading(self, blocks: Int64Array) -> None:
        """End the loading of blocks. `cache_unused` or `free_unused` says what they are next."""
        self.loading[blocks] = False
        self.num_loading -= len(blocks)

    def _take(self, count: int) -> Int64Array:
        from_free = min(count, self.num_free)
        blocks = self._pop_free(from_free)
        if from_free < count:
            evicted = self.evictable.pop(count - from_free)
            self.ages.evict(evicted)
            self.remove_from_index(evicted)
            self.num_evicted += len(evicted)
            blocks = np.concatenate([blocks, evicted])
        self.ages.allocate(blocks)
        if self.owners is not None:
            self.owners.take(blocks)
        return blocks

    def incref(self, blocks: Int64Array) -> None:
        """Add references as `BlockPool.incref`. Cached blocks leave the eviction queue."""
        unreferenced = self._add_references(blocks)
        if len(unreferenced):
            self._reuse(unreferenced)

    def _reuse(self, blocks: Int64Array) -> None:
        """Take cached blocks that get their first reference out of the eviction queue."""
        self.ages.reuse(blocks)
        pinned = self.pinned[blocks]
        num_pinned = int(np.count_nonzero(pinned))
        self.num_pinned_cached -= num_pinned
        queued = blocks[~pinned] if num_pinned else blocks
        self.evictable.remove(queued)
        if self.owners is not None:
            self.owners.take_over(queued)

    def match_hashes(self, chain_hashes: list[bytes], limit: int) -> tuple[Int64Array, int]:
        """Return (the blocks int64[n] that at most `limit` of these chain hashes find, up to the first miss; how many
        of them have references)."""
        if not limit or not chain_hashes or chain_hashes[0] not in self.index.blocks:
            return _NO_BLOCKS, 0
        found: tuple[Int64Array, int] = match_hashes(self.index.blocks, chain_hashes, limit, self.ref_count)
        return found

    def num_evictable(self, blocks: Int64Array) -> int:
        """Return how many of these distinct blocks `allocate` could evict now."""
        return int(np.count_nonzero((self.ref_count[blocks] == 0) & self.indexed[blocks] & ~self.pinned[blocks]))

    def decref(self, blocks: Int64Array) -> None:
        """Drop references as `BlockPool.decref`. Indexed blocks stay cached; the first of `blocks` is evicted first."""
        unreferenced = self._drop_references(blocks)
        if not len(unreferenced):
            return
        known = self.indexed[unreferenced]
        if not np.count_nonzero(known):
            self._free(unreferenced)
            return
        self._free(unreferenced[~known])
        self.cache_unused(unreferenced[known])

    def cache_unused(self, blocks: Int64Array) -> None:
        """Let indexed blocks without references be cached from now on. The first of them is evicted first."""
        self.ages.cache(blocks)
        pinned = self.pinned[blocks]
        self.num_pinned_cached += int(np.count_nonzero(pinned))
        self.evictable.add(blocks[~pinned])

    def free_unused(self, blocks: Int64Array) -> None:
        """Free blocks that are neither referenced nor indexed."""
        self._free(blocks)

    def _free(self, blocks: Int64Array) -> None:
        self.ages.free(blocks)
        if self.owners is not None:
            self.owners.free(blocks)
        self._push_free(blocks)

    def add_to_index(self, blocks: Int64Array, chain_hashes: list[bytes]) -> list[bool]:
        """Add full, computed blocks, whose hashes are kept, to the index. Returns, for each, whether its hash finds it;
        False means that the hash already finds another block."""
        names = blocks.tolist()
        finding = list(map(self.index.blocks.setdefault, chain_hashes, names))
        if finding == names:  # as nearly always
            self.indexed[blocks] = True
            return [True] * len(names)
        found = list(map(operator.eq, finding, names))
        self.indexed[blocks[found]] = True
        return found

    def remove_from_index(self, blocks: Int64Array) -> None:
        """Remove blocks from the index. Their hashes stay, because the chains of their holders need them."""
        forgotten = self._pop_from_index(blocks)
        if self.journal is not None and forgotten:
            self.journal.removed(forgotten, self.domains_of(blocks))

    def _pop_from_index(self, blocks: Int64Array) -> list[bytes]:
        """Remove blocks from the index without a journal entry. Returns their hashes."""
        # Every indexed block has a hash that finds it; otherwise this raises KeyError.
        forgotten: list[bytes] = list(map(self.hashes.__getitem__, blocks.tolist()))  # type: ignore[arg-type]
        for _ in map(self.index.blocks.pop, forgotten):
            pass
        self.indexed[blocks] = False
        if self.has_copies:
            self.copied[blocks] = NOT_COPIED
        return forgotten

    def pin(self, blocks: Int64Array) -> None:
        """Keep distinct indexed blocks, not pinned so far, from eviction."""
        self.pinned[blocks] = True
        unreferenced = blocks[self.ref_count[blocks] == 0]
        self.evictable.remove(unreferenced)
        if self.owners is not None:
            self.owners.take_over(unreferenced)
        self.num_pinned_cached += len(unreferenced)

    def unpin(self, blocks: Int64Array) -> None:
        """Undo `pin`. The first of `blocks` is evicted first."""
        self.pinned[blocks] = False
        unreferenced = blocks[self.ref_count[blocks] == 0]
        self.evictable.add(unreferenced)
        self.num_pinned_cached -= len(unreferenced)

    def recover_cache(self, entries: Int64Array, depths: Int64Array) -> None:
        """Do as `recover`, and derive the index and the queue of cached blocks from `indexed`, before any block is
        pinned. Blocks that were not in the earlier process's queue are evicted last, and of these the deepest first:
        `depths` int64[num_blocks]."""
        self.recover(entries)
        chain_hashes = map(self.hashes.__getitem__, indexed := np.flatnonzero(self.indexed).tolist())
        self.index.blocks = dict(zip(chain_hashes, indexed, strict=True))  # type: ignore[arg-type]  # see add_to_index
        unreferenced = self.ref_count == 0
        self._set_free(unreferenced & ~self.indexed)
        cached = np.flatnonzero(unreferenced & self.indexed)
        self.evictable.recover(cached[np.argsort(-depths[cached], kind="stable")])

    def domains_of(self, blocks: Int64Array, found: list[bool] | None = None) -> str | list[str]:
        """Return the domains of the tenants of these blocks, or of those that are `found`, at least one; or the one of
        all of them."""
        if self.owners is None:
            return ""
        return self.owners.domains_of(blocks if found is None else blocks[found])

    def set_owners(self, owners: BlockOwners) -> None:
        """Tell the blocks of tenants apart. `owners` knows whose each block is, and counts them here."""
        used = np.ones(self.num_blocks, np.bool_)
        used[self.free_blocks()] = False
        owners.count(used, self.evictable.has(slice(0, self.num_blocks)))
        self.owners = owners
        self.evictable.divide(owners)

    def unpinned(self) -> Int64Array:
        """Return the indexed blocks that are not pinned."""
        return np.flatnonzero(self.indexed & ~self.pinned)

    def reset(self, blocks: Int64Array, *, whole: bool) -> int:
        """Remove those of these blocks from the index that are still indexed and not pinned. `whole` says that `blocks`
        were all such blocks of the pool. Returns how many of them were cached and are free now."""
        blocks = blocks[self.indexed[blocks] & ~self.pinned[blocks]]
        unreferenced = blocks[self.ref_count[blocks] == 0]
        forgotten = self._pop_from_index(blocks)
        if self.journal is not None and forgotten:
            if whole and not self.index.blocks:
                self.journal.cleared()
            else:
                self.journal.removed(forgotten, self.domains_of(blocks))
        self.evictable.remove(unreferenced)
        self._free(unreferenced)
        return len(unreferenced)


def counted(count: int, noun: str) -> str:
    """Return for example "1 block is" or "2 blocks are"."""
    return f"1 {noun} is" if count == 1 else f"{count} {noun}s are"


# ---- Cached blocks: how they are found, in which order they are evicted, how old they are


def token_bytes(token_ids: Int32Array) -> bytes:
    """Return the token ids as little-endian int32, on any machine."""
    return token_ids.astype("<i4", copy=False).tobytes()


class PrefixIndex:
    """Map from chain hashes to device blocks with that content. Each hash has one block, and each block one hash."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = root_hash(block_size)
        self.blocks: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def match(self, token_ids: Int32Array, extra: Mapping[int, bytes]) -> Int64Array:
        """Return the blocks of the longest cached prefix of these tokens, in order: int64[n]. It stops hashing at the
        first miss."""
        size = 4 * self.block_size
        data = token_bytes(token_ids)
        blocks, parent = self.blocks, self.root
        found: list[int] = []
        for entry, start in enumerate(range(0, len(data) - size + 1, size)):
            parent = block_hash(parent, data[start : start + size], extra.get(entry, b"") if extra else b"")
            block = blocks.get(parent)
            if block is None:
                break
            found.append(block)
        return np.array(found, np.int64) if found else _NO_BLOCKS

    def match_hashes(self, chain_hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks that these chain hashes find, in order, up to the first miss."""
        if not chain_hashes or chain_hashes[0] not in self.blocks:
            return []
        found = list(map(self.blocks.get, chain_hashes))
        return found[: found.index(None)] if None in found else found  # type: ignore[return-value]  # without None


class EvictionQueue:
    """Queue of a pool's `size` cached blocks in the order of their release. The stamps are kept: they are the order.

    With owners, each owner has a head of its own in the same log, so that an eviction from one owner does not read what
    lies before its oldest block again. When many owners lose blocks together, the log is read once for all of them.
    """

    def __init__(self, num_blocks: int, memory: ArrayMemory) -> None:
        self._log = np.zeros(1 + 2 * num_blocks + _SLACK, np.int64)
        self._stamp: Int64Array = memory.kept("eviction_stamps", (num_blocks,), np.int64, private=True)
        self._tail = _BEGIN
        self._owners: BlockOwners | None = None
        # The positions in the log before which each owner has no blocks. Without owners all blocks are nobody's.
        self._heads = [_BEGIN]
        self.size = 0

    def divide(self, owners: BlockOwners) -> None:
        """Take the next blocks to evict from the owners that lose some."""
        self._owners = owners
        self._compact()

    def __len__(self) -> int:
        return self.size

    def add(self, blocks: Int64Array) -> None:
        """Append distinct blocks that are not in the queue. The first of them is evicted first."""
        if self._tail + len(blocks) > len(self._log):
            self._compact()
        end = self._tail + len(blocks)
        self._log[self._tail : end] = blocks
        self._stamp[blocks] = np.arange(self._tail, end)
        self._tail = end
        self.size += len(blocks)
        if self._owners is not None:
            self._owners.queue(blocks)

    def remove(self, blocks: Int64Array) -> None:
        """Remove distinct blocks that are in the queue."""
        self._stamp[blocks] = _NOWHERE
        self.size -= len(blocks)
        if self._owners is not None:
            self._owners.unqueue(blocks)

    def peek(self, count: int) -> Int64Array:
        """Return the `count` blocks to evict first, in that order."""
        losing, positions = self._next(count)
        if self._owners is not None and len(losing) > 1:
            positions = positions[self._owners.order_of_losing(losing)]
        return self._log[positions]

    def pop(self, count: int) -> Int64Array:
        """Remove and return the `count` blocks to evict first, those of one owner after those of another."""
        losing, positions = self._next(count)
        popped = self._log[positions]
        end = 0
        for owner, number in losing:
            end += number
            self._heads[owner] = int(positions[end - 1]) + 1
            if self._owners is not None:
                self._owners.lose(owner, number)
        self._stamp[popped] = _NOWHERE
        self.size -= count
        return popped

    def _next(self, count: int) -> tuple[list[tuple[int, int]], Int64Array]:
        """Return who loses how many of the `count` blocks to evict first, and the positions of these blocks in the log
        int64[count], those of one owner after those of another."""
        assert count <= self.size
        if self._owners is not None:
            losing = self._owners.losing(count)
            if len(losing) > _FEW_OWNERS:
                return losing, self._first_of_each(losing, self._owners)
            return losing, _joined([self._first(owner, number) for owner, number in losing])
        return [(NOBODY, count)], self._first(NOBODY, count)

    def _first(self, owner: int, count: int) -> Int64Array:
        """Return the positions in the log of an owner's first `count` blocks."""
        parts, head, left, width = [], self._heads[owner], count, 2 * count + 64
        while left:
            assert head < self._tail, _MISCOUNTED
            stop = min(head + width, self._tail)
            entries = self._log[head:stop]
            valid = self._stamp[entries] == np.arange(head, stop)
            if self._owners is not None:
                valid &= self._owners.of[entries] == owner
            found = np.flatnonzero(valid)[:left]
            parts.append(head + found)
            left -= len(found)
            width *= 2
            head = stop
        return _joined(parts)

    def _first_of_each(self, losing: list[tuple[int, int]], owners: BlockOwners) -> Int64Array:
        """Return the same for each of these owners and counts, one owner after another."""
        numbers, counts = np.array(losing).T
        missing = np.zeros(owners.num_owners, np.int64)
        missing[numbers] = counts
        found: list[Int64Array] = []
        parts: list[npt.NDArray[np.int16]] = []
        head, width = min(self._heads[owner] for owner, _ in losing), 2 * int(counts.sum()) + 64
        while (missing > 0).any():
            assert head < self._tail, _MISCOUNTED
            stop = min(head + width, self._tail)
            entries = self._log[head:stop]
            valid = np.flatnonzero(self._stamp[entries] == np.arange(head, stop))
            found.append(head + valid)
            parts.append(owners.of[entries[valid]])
            missing -= np.bincount(parts[-1], minlength=len(missing))
            width *= 2
            head = stop
        positions, of = np.concatenate(found), np.concatenate(parts)
        order = np.argsort(of, kind="stable")
        first = np.searchsorted(of[order], numbers.astype(of.dtype))
        return positions[order[np.repeat(first, counts) + places_within(counts)]]

    def recover(self, blocks: Int64Array) -> None:
        """Fill the queue with distinct blocks int64[n], in the order of the stamps of an earlier process. Blocks that
        were not in its queue become the last, in the given order."""
        stamps = self._stamp[blocks]
        stamps[stamps == _NOWHERE] = len(self._log)
        order = blocks[np.argsort(stamps, kind="stable")]
        fresh = np.full_like(self._stamp, _NOWHERE)
        fresh[order] = np.arange(1, 1 + len(order))
        self._stamp[:] = fresh
        self._log[1 : 1 + len(order)] = order
        self._tail, self.size = 1 + len(order), len(order)

    def blocks(self) -> Int64Array:
        """Return all blocks in the queue, in the order of their release."""
        entries = self._log[_BEGIN : self._tail]
        valid: Int64Array = entries[self._stamp[entries] == np.arange(_BEGIN, self._tail)]
        return valid

    def has(self, blocks: slice) -> BoolArray:
        """Return bool[n]: which of the blocks with these ids are in the queue."""
        stamps = self._stamp[blocks]
        inside = (stamps >= _BEGIN) & (stamps < self._tail)
        entries = self._log[np.where(inside, stamps, 0)]
        found: BoolArray = inside & (entries == np.arange(blocks.start, blocks.stop))
        return found

    def _compact(self) -> None:
        valid = self.blocks()
        self._log[1 : 1 + len(valid)] = valid
        positions = np.arange(1, 1 + len(valid))
        self._stamp[valid] = positions
        self._tail = 1 + len(valid)
        self._heads = [_BEGIN]
        if self._owners is not None:
            heads = np.full(self._owners.num_owners, self._tail)
            heads[self._owners.of[valid[::-1]]] = positions[::-1]  # of the positions of an owner, the first stays
            self._heads = heads.tolist()


def _joined(parts: list[Int64Array]) -> Int64Array:
    """Return one array of all parts, which is the first if there is no other, as nearly always."""
    return parts[0] if len(parts) == 1 else np.concatenate([_NO_BLOCKS, *parts])


class BlockAges:
    """Timestamps of blocks and histograms of their ages.

    `allocated_at` and `released_at` are float64[num_blocks] in seconds of the clock. `counts` int64[3, buckets + 1] and
    `seconds` float64[3] are the histograms, in the order of the constants above.
    """

    def __init__(self, num_blocks: int, clock: Callable[[], float], memory: ArrayMemory) -> None:
        self.allocated_at: Float64Array = memory.kept("allocated_at", (num_blocks,), np.float64)
        self.released_at: Float64Array = memory.kept("released_at", (num_blocks,), np.float64)
        self.counts: Int64Array = memory.zeros("age_counts", (NUM_HISTOGRAMS, len(BUCKETS_S) + 1), np.int64)
        self.seconds: Float64Array = memory.zeros("age_seconds", (NUM_HISTOGRAMS,), np.float64)
        self._clock = clock
        self._notes: list[tuple[int, Float64Array, float]] = []
        self._num_noted_blocks = 0

    def allocate(self, blocks: Int64Array) -> None:
        """Record the allocation of these blocks."""
        self.allocated_at[blocks] = self._clock()

    def cache(self, blocks: Int64Array) -> None:
        """Record that these blocks lost their last reference and are cached from now on."""
        self.released_at[blocks] = self._clock()

    def reuse(self, blocks: Int64Array) -> None:
        """Record a prefix-cache hit on these cached blocks."""
        self._note(REUSE_GAP, self.released_at[blocks], self._clock())

    def evict(self, blocks: Int64Array) -> None:
        """Record the eviction of these cached blocks."""
        now = self._clock()
        self._note(IDLE_BEFORE_EVICTION, self.released_at[blocks], now)
        self._note(LIFETIME, self.allocated_at[blocks], now)

    def free(self, blocks: Int64Array) -> None:
        """Record that these blocks were freed."""
        self._note(LIFETIME, self.allocated_at[blocks], self._clock())

    def _note(self, histogram: int, begun: Float64Array, now: float) -> None:
        self._notes.append((histogram, begun, now))
        self._num_noted_blocks += len(begun)
        if len(self._notes) > _MAX_NOTES or self._num_noted_blocks > _MAX_NOTED_BLOCKS:
            self.fold()

    def fold(self) -> None:
        """Add the pending records to the histograms."""
        notes, self._notes, self._num_noted_blocks = self._notes, [], 0
        for histogram in range(NUM_HISTOGRAMS):
            ages = [now - begun for which, begun, now in notes if which == histogram]
            if ages:
                seconds = np.concatenate(ages)
                buckets = np.searchsorted(BUCKETS_S, seconds)
                self.counts[histogram] += np.bincount(buckets, minlength=len(BUCKETS_S) + 1)
                self.seconds[histogram] += seconds.sum()
