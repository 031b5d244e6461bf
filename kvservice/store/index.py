"""The interface of the store's native index, `_ext.StoreIndex`. Tests pass a model of it."""

from __future__ import annotations

from typing import Final, Protocol

KEY_BYTES: Final = 32
# The bytes of a slot, an offset, a version or a checksum in packed arrays: little-endian uint64.
WORD_BYTES: Final = 8
# The statuses of keys in `KeyIndex.reserve`; PutStatus of the contract has the same numbers.
DONE, PRESENT, BEING_WRITTEN, NO_ROOM = 1, 2, 3, 4


class IndexStats(Protocol):
    """The gauges of one namespace or of all. `num_evicted` counts evictions since the start, `num_unoffered` those of
    blocks that `KeyIndex.coldest` had not returned since their last use. `num_offered` blocks could be evicted now, and
    were returned. Condemned blocks are leased, but are none of `num_blocks`. Busy slabs have leased or reserved
    blocks."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_leased(self) -> int: ...
    @property
    def num_reserved(self) -> int: ...
    @property
    def num_condemned(self) -> int: ...
    @property
    def num_slabs(self) -> int: ...
    @property
    def num_busy_slabs(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def num_evicted(self) -> int: ...
    @property
    def num_offered(self) -> int: ...
    @property
    def num_unoffered(self) -> int: ...


class KeyIndex(Protocol):
    """Keys, slots and eviction. Slots are opaque; packed arrays have WORD_BYTES for each element."""

    @property
    def generation(self) -> int:
        """The number of processes that had the index before this one."""

    @property
    def num_free_slabs(self) -> int:
        """The number of slabs without a namespace whose memory is there."""

    def set_ready(self, num_bytes: int) -> None:
        """Say how much of the memory is there: all at first. The slabs behind it are not given to a namespace; those
        that have one stay. Called after `recover`."""

    def recover(self, namespaces: list[tuple[int, int, int]]) -> tuple[bytes, bytes]:
        """Take over the blocks of these namespaces from the process before. Returns the slots reserved, and those
        condemned, each of which is pinned once. Called once, first of all."""

    def open(self, block_bytes: int, quota_bytes: int) -> int:
        """Return the number of a new namespace."""

    def close(self, namespace: int) -> None:
        """End a namespace that has no blocks."""

    def set_quota(self, namespace: int, quota_bytes: int) -> None:
        """Change a quota. A namespace that has more blocks shrinks as it stores others."""

    def geometry(self, namespace: int) -> tuple[int, int, int]:
        """Return first_block, block_stride and blocks_per_slab, see OpenNamespaceResponse."""

    def lookup(self, namespace: int, keys: bytes) -> tuple[int, bytes]:
        """Return the number of leading keys found, and a bitmap of all found."""

    def needed(self, namespace: int, keys: bytes) -> tuple[int, int]:
        """Return how many blocks with these keys, each once, are neither there nor being written, and how many that are
        there could be evicted."""

    def acquire(
        self, namespace: int, keys: bytes, leading_only: bool, counted: bool = True
    ) -> tuple[bytes, bytes, bytes, bytes]:
        """Pin the blocks found. Returns a bitmap, and their slots, offsets and versions. `counted`: it is a use."""

    def coldest(
        self, namespace: int, most: int, newest_first: bool = False
    ) -> tuple[bytes, bytes, bytes, bytes, bytes]:
        """Pin blocks that are next to be evicted, each once after its last use. Their release is no use. Returns their
        slots, keys, offsets, checksums and numbers of uses since they were stored."""

    def lease(self, slots: bytes) -> None:
        """Pin committed or condemned slots."""

    def release(self, slots: bytes) -> None:
        """Undo one `acquire` or `lease` of each slot."""

    def reserve(self, namespace: int, keys: bytes) -> tuple[bytes, bytes, bytes]:
        """Return one status per key, and the slots and offsets of the keys that are DONE."""

    def commit(self, slots: bytes, checksums: bytes) -> None:
        """Publish reserved slots."""

    def abort(self, slots: bytes) -> None:
        """Free reserved slots."""

    def condemn(self, slots: bytes) -> None:
        """Remove the keys of reserved slots. `release` frees the slots."""

    def touch(self, namespace: int, keys: bytes) -> int:
        """Make blocks the most recently used. Returns how many were found."""

    def remove(self, namespace: int, keys: bytes) -> int:
        """Remove blocks. Returns how many were found."""

    def clear(self, namespace: int, most: int) -> int:
        """Remove at most `most` blocks. Returns how many."""

    def evict_blocks(self, namespace: int, most: int) -> int:
        """Evict at most `most` blocks, the oldest first, and free their slots. Returns how many."""

    def empty_slabs(self, namespace: int, most_slabs: int, most_blocks: int) -> tuple[int, int]:
        """Evict the blocks of slabs that are not busy, the oldest slab first, until `most_slabs` are free or
        `most_blocks` were evicted: with the last slab it can be more. Returns how many slabs and blocks."""

    def checksums(self, slots: bytes) -> bytes:
        """Return the checksums of committed slots."""

    def places(self, slots: bytes) -> tuple[bytes, bytes]:
        """Return the keys and the offsets of slots in use."""

    def record_removed(self, enabled: bool) -> None:
        """Record keys that leave the index, or stop it."""

    def take_removed(self) -> list[tuple[int, bytes]]:
        """Return the keys recorded since the last call, in order: number of the namespace and keys."""

    def check(self, most: int) -> bool:
        """Check about `most` more slots. Returns whether all were checked. Raises RuntimeError with what is wrong."""

    def stats(self, namespace: int) -> IndexStats: ...

    def totals(self) -> IndexStats: ...
