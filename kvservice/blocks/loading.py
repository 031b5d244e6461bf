"""Blocks that come into the pool from outside, and copies of blocks that leave it.

A run of blocks that continues a cached prefix is loaded in two operations: `begin_load` takes blocks for it, which
nobody else can use or find meanwhile, and `end_load` publishes them when their bytes are there. If the process ends in
between, the next one finds the blocks free, because neither a table nor the prefix index has them.

A copy of blocks holds nothing back. `begin_copy` writes the number of the copy beside each block, and a block that
leaves the prefix index loses it. A block leaves the index before its content changes, so at `end_copy` the copy of a
block that still has the number is whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvservice.blocks.arguments import extra_keys_by_block, int32_array
from kvservice.blocks.plans import BoolArray, Int32Array, Int64Array
from kvservice.blocks.pool import NOT_COPIED, token_bytes
from kvservice.blocks.quotas import TenantQuota
from kvservice.blocks.state import BlockState
from kvservice.chain_hash import block_hash


@dataclass(frozen=True, eq=False)
class MissingBlocks:
    """Full blocks of a prompt that are not in the pool, in order, with their tokens int32[n, block_size]. They continue
    the cached blocks `prefix` int64[m]; `parent` is the hash before the first missing one. `quota` is that of the
    prompt's tenant."""

    prefix: Int64Array
    parent: bytes
    chain_hashes: list[bytes]
    tokens: Int32Array
    quota: TenantQuota | None = None

    def __len__(self) -> int:
        return len(self.chain_hashes)

    def first(self, count: int) -> MissingBlocks:
        """Return the first `count` of these blocks."""
        return MissingBlocks(self.prefix, self.parent, self.chain_hashes[:count], self.tokens[:count], self.quota)


@dataclass(frozen=True, eq=False)
class PoolLoad:
    """Blocks int64[n] that are being filled with the missing blocks of a prompt."""

    blocks: Int64Array
    missing: MissingBlocks

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(frozen=True, eq=False)
class PoolCopy:
    """Blocks int64[n] of which copies are being made, and their chain hashes."""

    number: int
    blocks: Int64Array
    chain_hashes: list[bytes]

    def __len__(self) -> int:
        return len(self.blocks)


class Loader:
    """Fills blocks of the pool from outside, and tells which blocks a copy is right for."""

    def __init__(self, state: BlockState) -> None:
        self._state, self._config, self._device = state, state.config, state.device
        self._numbers = itertools.count(1)
        self._era = 1

    # ---- into the pool

    def missing(
        self,
        tokens: Int32Array,
        extra: Mapping[int, bytes],
        found: Int64Array,
        most: int,
        quota: TenantQuota | None = None,
    ) -> MissingBlocks | None:
        """Return at most `most` blocks of a prompt int32[n] after the `found` ones int64[m], or None if none is
        missing. `extra` are its encoded extra keys by block. The block of the last token is never among them, because
        the last token is always computed."""
        size, first = self._config.block_size, len(found)
        count = min((len(tokens) - 1) // size - first, most)
        if count <= 0 or not self._config.enable_prefix_caching:
            return None
        parent = self._device.hashes[int(found[-1])] if first else self._device.index.root
        assert parent is not None, "the index has just found this block"
        part = np.asarray(tokens[first * size : (first + count) * size], np.int32).reshape(count, size)
        return MissingBlocks(found, parent, _block_hashes(parent, part, extra, first), part, quota)

    def missing_prefix(
        self,
        token_ids: npt.ArrayLike,
        extra_keys: Sequence[tuple[int, bytes]],
        most: int,
        quota: TenantQuota | None = None,
    ) -> MissingBlocks | None:
        """Return the missing blocks of a prefix, of which every full block counts. Raises InvalidArgumentError."""
        tokens, limit = int32_array(token_ids, "token_ids"), self._config.max_sequence_tokens
        extra = extra_keys_by_block(extra_keys, "extra_keys", self._config.block_size, limit)
        found = self._device.index.match(tokens, extra)
        return self.missing(np.append(tokens, np.int32(0)), extra, found, most, quota)

    def missing_of(
        self, tokens: Int32Array, chain_hashes: list[bytes], most: int, quota: TenantQuota | None = None
    ) -> MissingBlocks | None:
        """Return the same for a prompt whose chain hashes are known."""
        size, device = self._config.block_size, self._device
        count = min((len(tokens) - 1) // size, len(chain_hashes))
        found = np.array(device.index.match_hashes(chain_hashes[:count]), np.int64)
        first, stop = len(found), min(count, len(found) + most)
        if first >= stop:
            return None
        parent = chain_hashes[first - 1] if first else device.index.root
        part = np.asarray(tokens[first * size : stop * size], np.int32).reshape(stop - first, size)
        return MissingBlocks(found, parent, chain_hashes[first:stop], part, quota)

    def begin_load(self, missing: MissingBlocks, num_kept: int = 0) -> PoolLoad | None:
        """Take blocks for the first of the missing blocks. Returns None if there is room for none, or if their prefix
        is not cached any more.

        At least `num_kept` blocks, or those of the watermark if they are more, stay available besides the prefix,
        which is evicted last from now on.
        """
        device, prefix = self._device, missing.prefix
        known = device.index.blocks
        if len(prefix) and known.get(missing.parent) != prefix[-1]:
            return None
        self._state.enter_for(missing.quota)
        absent = list(itertools.takewhile(lambda chain_hash: chain_hash not in known, missing.chain_hashes))
        cached = prefix[(device.ref_count[prefix] == 0) & device.indexed[prefix] & ~device.pinned[prefix]]
        num_kept = max(num_kept, self._config.watermark_blocks) + len(cached)
        count = min(len(absent), device.num_available - num_kept)
        if count <= 0:
            return None
        device.evictable.remove(cached)
        device.evictable.add(cached[::-1])
        return PoolLoad(device.begin_loading(count), missing.first(count))

    def end_load(self, load: PoolLoad, num_loaded: int) -> int:
        """Publish the first `num_loaded` blocks of a load, whose bytes are in the pool, and free the others. Returns
        how many can be found now; a block that was computed meanwhile is there already."""
        self._state.enter(None)
        device, missing = self._device, load.missing.first(num_loaded)
        device.end_loading(load.blocks)
        blocks = load.blocks[:num_loaded]
        device.token_ids[blocks] = missing.tokens
        for block, chain_hash in zip(blocks.tolist(), missing.chain_hashes, strict=True):
            device.hashes[block] = chain_hash
        device.keep_hashes(blocks, missing.chain_hashes)
        new = np.array(device.add_to_index(blocks, missing.chain_hashes), np.bool_)
        device.cache_unused(blocks[new][::-1])
        device.free_unused(np.concatenate([blocks[~new], load.blocks[num_loaded:]]))
        self.mark_copied(blocks[new])
        self._record(missing, blocks, new)
        return int(np.count_nonzero(new))

    def _record(self, missing: MissingBlocks, blocks: Int64Array, new: BoolArray) -> None:
        """Record the blocks that can be found from now on in the journal."""
        journal = self._device.journal
        if journal is None or not new.any():
            return
        first = None if missing.parent == self._device.index.root else missing.parent
        parents = [first, *missing.chain_hashes]
        journal.stored(
            [
                (missing.chain_hashes[i], parents[i], token_bytes(missing.tokens[i]) if journal.with_tokens else b"")
                for i in np.flatnonzero(new).tolist()
            ],
            self._device.domains_of(blocks[new]),
        )

    # ---- out of the pool

    def coldest(self, count: int, *, never_copied: bool = False) -> Int64Array:
        """Return those of the `count` blocks that are evicted first, int64[n], that nothing is known to have copies of,
        in this order. With `never_copied`, those with forgotten copies are left out, too."""
        blocks = self._device.evictable.peek(min(count, len(self._device.evictable)))
        return blocks[self._device.copied[blocks] == NOT_COPIED] if never_copied else self._uncopied(blocks)

    def find(self, chain_hashes: Sequence[bytes]) -> Int64Array:
        """Return those of the blocks that these chain hashes find, int64[n], that nothing is known to have copies
        of."""
        return self._uncopied(np.array(self._device.index.match_hashes(chain_hashes), np.int64))

    def uncopied(self, blocks: Int64Array) -> Int64Array:
        """Return those of these blocks that can be found and that nothing is known to have copies of, int64[n]."""
        return self._uncopied(blocks[self._device.indexed[blocks]])

    def _uncopied(self, blocks: Int64Array) -> Int64Array:
        marks = self._device.copied[blocks]
        uncopied: Int64Array = blocks[(marks <= 0) & (marks != -self._era)]
        return uncopied

    def chain_hashes(self, blocks: Int64Array) -> list[bytes]:
        """Return the chain hashes of blocks int64[n] that can be found."""
        hashes = [self._device.hashes[block] for block in blocks.tolist()]
        assert None not in hashes, "blocks that can be found have hashes"
        return hashes

    def begin_copy(self, blocks: Int64Array) -> PoolCopy:
        """Begin to copy those of these blocks that `uncopied` returns. The caller orders the copies behind all earlier
        operations."""
        blocks = self.uncopied(blocks)
        copy = PoolCopy(next(self._numbers), blocks, self.chain_hashes(blocks))
        self._device.copied[blocks] = copy.number
        self._device.has_copies = True
        return copy

    def end_copy(self, copy: PoolCopy, kept: BoolArray) -> BoolArray:
        """End a copy, of which the blocks in `kept`, bool[n], stay somewhere if they are whole. Returns bool[n]: those
        that are whole."""
        device = self._device
        whole: BoolArray = device.copied[copy.blocks] == copy.number
        device.copied[copy.blocks[whole]] = np.where(kept[whole], -self._era, NOT_COPIED)
        return whole

    def mark_copied(self, blocks: Int64Array) -> None:
        """Note that there are copies of these blocks, which can be found, until `forget_copied`."""
        self._device.copied[blocks] = -self._era
        self._device.has_copies = True

    def forget_copied(self) -> None:
        """Forget which blocks have copies somewhere, because the copies may be gone."""
        self._era += 1


def _block_hashes(parent: bytes, tokens: Int32Array, extra: Mapping[int, bytes], first: int) -> list[bytes]:
    """Return the chain hashes of full blocks, of which tokens int32[n, block_size] are given and the first is block
    `first` of its sequence. `parent` is the hash before them."""
    size, data = 4 * tokens.shape[1], token_bytes(tokens)
    hashes: list[bytes] = []
    for entry, start in enumerate(range(0, len(data), size), start=first):
        parent = block_hash(parent, data[start : start + size], extra.get(entry, b"") if extra else b"")
        hashes.append(parent)
    return hashes
