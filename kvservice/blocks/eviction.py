"""Eviction order of cached blocks: least recently used first.

The queue is a log of entries and not a linked list, so that adding, removing and popping many blocks takes a few NumPy
operations each. An entry is valid while the block's stamp is the entry's position; the entry of a removed block becomes
stale and is skipped once. When the log is full, the valid entries move to its front, at most once per `num_blocks`
added entries. Each operation therefore costs amortised O(blocks in it), independent of the pool size.
"""

from __future__ import annotations

import numpy as np

from kvservice.blocks.plans import ArrayMemory, BoolArray, Int64Array

# Stamp of a block that is not in the queue. Positions in the log begin at 1.
_NOWHERE = 0
_SLACK = 1024


class EvictionQueue:
    """Queue of a pool's cached blocks in the order of their release. The stamps are kept: they are the order."""

    def __init__(self, num_blocks: int, memory: ArrayMemory) -> None:
        self._log = np.zeros(1 + 2 * num_blocks + _SLACK, np.int64)
        self._stamp: Int64Array = memory.kept("eviction_stamps", (num_blocks,), np.int64, private=True)
        self._head = self._tail = 1
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, blocks: Int64Array) -> None:
        """Append distinct blocks that are not in the queue. The first of them is evicted first."""
        if self._tail + len(blocks) > len(self._log):
            self._compact()
        end = self._tail + len(blocks)
        self._log[self._tail : end] = blocks
        self._stamp[blocks] = np.arange(self._tail, end)
        self._tail = end
        self._size += len(blocks)

    def remove(self, blocks: Int64Array) -> None:
        """Remove distinct blocks that are in the queue."""
        self._stamp[blocks] = _NOWHERE
        self._size -= len(blocks)

    def peek(self, count: int) -> Int64Array:
        """Return the `count` blocks to evict first, in that order."""
        assert count <= self._size
        parts: list[Int64Array] = []
        head, left = self._head, count
        while left:
            stop = min(head + 2 * left + 64, self._tail)
            entries = self._log[head:stop]
            valid = np.flatnonzero(self._stamp[entries] == np.arange(head, stop))[:left]
            parts.append(entries[valid])
            left -= len(valid)
            head = stop
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def pop(self, count: int) -> Int64Array:
        """Remove and return the `count` blocks to evict first, in that order."""
        assert count <= self._size
        parts = []
        left = count
        while left:
            stop = min(self._head + 2 * left + 64, self._tail)
            entries = self._log[self._head : stop]
            valid = np.flatnonzero(self._stamp[entries] == np.arange(self._head, stop))[:left]
            parts.append(entries[valid])
            left -= len(valid)
            self._head = self._head + int(valid[-1]) + 1 if not left else stop
        popped = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        self.remove(popped)
        return popped

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
        self._head, self._tail, self._size = 1, 1 + len(order), len(order)

    def blocks(self) -> Int64Array:
        """Return all blocks in the queue, in eviction order."""
        entries = self._log[self._head : self._tail]
        valid: Int64Array = entries[self._stamp[entries] == np.arange(self._head, self._tail)]
        return valid

    def has(self, blocks: slice) -> BoolArray:
        """Return bool[n]: which of the blocks with these ids are in the queue."""
        stamps = self._stamp[blocks]
        inside = (stamps >= self._head) & (stamps < self._tail)
        entries = self._log[np.where(inside, stamps, 0)]
        found: BoolArray = inside & (entries == np.arange(blocks.start, blocks.stop))
        return found

    def _compact(self) -> None:
        valid = self.blocks()
        self._log[1 : 1 + len(valid)] = valid
        self._stamp[valid] = np.arange(1, 1 + len(valid))
        self._head, self._tail = 1, 1 + len(valid)
