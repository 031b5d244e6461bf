"""The memory of the store, mapped into this process, and copies between packed blocks and their pieces, by native
threads without the interpreter lock."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvservice import _ext
from kvservice.client.store.values import Blocks, Flags, Numbers, Pieces, flags_of, num_keys, pieces_of, split_keys
from kvservice.errors import InternalError
from kvservice.wire.tensors import Array


def copy_out(
    address: int, offsets: bytes, block_bytes: int, target: Pieces, num_threads: int, checksums: bytes = b""
) -> Flags:
    """Copy the blocks at `offsets` from `address` to their pieces. Returns which of them have the expected checksums;
    all if none are given. The caller has checked that all blocks lie in memory of this process."""
    _check(offsets, target)
    if not offsets:
        return np.ones(0, np.bool_)
    start, places = _places(target)
    right = _ext.store_copy_out(
        address, offsets, block_bytes, start, places, target.sizes.tobytes(), checksums, num_threads
    )
    return flags_of(right, len(target.addresses))


def copy_in(address: int, offsets: bytes, block_bytes: int, source: Pieces, num_threads: int) -> bytes:
    """Copy blocks from their pieces, see `copy_out`. Returns their checksums."""
    _check(offsets, source)
    if not offsets:
        return b""
    start, places = _places(source)
    return _ext.store_copy_in(address, offsets, block_bytes, start, places, source.sizes.tobytes(), num_threads)


def _places(pieces: Pieces) -> tuple[int, bytes]:
    """Return the lowest address of the pieces, and their offsets from it."""
    lowest = pieces.addresses.min()
    return int(lowest), (pieces.addresses - lowest).tobytes()


def packed(num_blocks: int, block_bytes: int) -> Numbers:
    """Return the offsets of blocks that lie one after the other."""
    return np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)


def _check(offsets: bytes, pieces: Pieces) -> None:
    if len(offsets) != 8 * len(pieces.addresses):
        raise InternalError(f"the daemon names {len(offsets) // 8} blocks of {len(pieces.addresses)}")


RECORD_BYTES = 64
# The place of the checksum in a record.
CHECKSUM_BYTE = 8
# The place of the stride in the first record of a slab, which is 0 until the slab is there.
STRIDE_BYTE = 56
# How often a look-up looks for new blocks, at most, and how many records it has time for.
LOOK_S, LOOKED_AT = 0.01, 1 << 15
# The records that are looked at in one go where nobody waits.
LOOKED_AT_ASIDE = 1 << 17
# How long a shared lease lasts without being renewed: less than csrc/store/shared_lease.h says.
SHARED_LEASE_S = 8.0


@dataclass(frozen=True, slots=True)
class Geometry:
    """The places of the blocks of a namespace, in bytes; see OpenNamespaceResponse in store.proto. `number` is 0 if the
    daemon does not tell it."""

    block_bytes: int
    slab_bytes: int
    first_block: int
    block_stride: int
    blocks_per_slab: int = 0
    number: int = 0
    has_tiers: bool = True


class SharedLease:
    """A lease that this process took in the memory itself, see `MappedStore.lease`. `offsets` and `versions` are those
    of the `num_blocks` blocks found. They stay as they are until the lease is released, or was not renewed for 8
    seconds."""

    def __init__(
        self, memory: MappedStore, mirror: _ext.StoreMirror, num_keys: int, leased: tuple[bytes, bytes, bytes]
    ):
        self.memory = memory
        self._found, self.offsets, self.versions = leased
        self._num_keys, self.num_blocks = num_keys, len(self.offsets) // 8
        self._mirror, self._until_s = mirror, time.monotonic() + SHARED_LEASE_S

    @property
    def found(self) -> Flags:
        """One flag per key."""
        return flags_of(self._found, self._num_keys)

    @property
    def alive(self) -> bool:
        """Whether the time of the lease has not passed."""
        return time.monotonic() < self._until_s

    def renew(self, *, timeout_s: float | None = None) -> bool:  # noqa: ARG002
        """Start its time again. Returns False if the lease has ended already."""
        until_s = time.monotonic() + SHARED_LEASE_S
        if not self.alive or not self._mirror.renew(self.offsets, self.versions):
            self._until_s = 0.0
            return False
        self._until_s = until_s
        return True

    def release(self) -> None:
        """End the lease, if it has not ended."""
        if self.offsets and self.alive:
            self._until_s = 0.0
            self._mirror.release(self.offsets, self.versions)


class MappedStore:
    """The memory of a store, mapped at `address`: `num_bytes` in slabs of `slab_bytes`. A block lies in one slab.

    `offsets` are those of blocks, as the daemon packs them. A block can change as soon as its lease has ended;
    `unchanged` notices that afterwards. `identity` is the same in all processes that map this memory: what one of them
    has leased, another one can read. `tells_all`: a block that `find` does not find is nowhere, since there are no
    tiers below this memory. `growing`: the daemon had not allocated all of it when it was mapped."""

    def __init__(
        self,
        mapping: mmap.mmap,
        geometry: Geometry,
        writable: bool,
        num_threads: int,
        identity: tuple[int, int],
        *,
        growing: bool = False,
    ) -> None:
        self.identity = identity
        self._growing = growing
        self.writable, self.num_bytes, self.slab_bytes = writable, len(mapping), geometry.slab_bytes
        self._geometry, self._num_threads = geometry, num_threads
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._words = self._bytes[: len(self._bytes) & ~7].view(np.uint64)
        self.address = int(self._bytes.ctypes.data)
        self._mirror = self._open_mirror()
        self.tells_all = self._mirror is not None and not geometry.has_tiers
        self.num_slabs = self.num_bytes // self.slab_bytes
        # As `refresh` counts, for which a slab is one record more.
        self._num_records = self.num_slabs * (geometry.blocks_per_slab + 1)
        self._looked_s = 0.0

    def _open_mirror(self) -> _ext.StoreMirror | None:
        place = self._geometry
        if not place.number:
            return None
        return _ext.StoreMirror(
            self.address,
            self.num_bytes,
            place.slab_bytes,
            place.first_block,
            place.block_stride,
            place.blocks_per_slab,
            place.number,
        )

    @staticmethod
    def open(
        descriptor: int, num_bytes: int, geometry: Geometry, writable: bool, num_threads: int, *, growing: bool = False
    ) -> MappedStore:
        """Map the memory. The caller still owns the descriptor. Raises OSError."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        file = os.fstat(descriptor)
        mapping = mmap.mmap(descriptor, num_bytes, prot=access)
        return MappedStore(mapping, geometry, writable, num_threads, (file.st_dev, file.st_ino), growing=growing)

    def has_slab(self, slab: int) -> bool:
        """Whether the daemon has allocated this slab. One that it has not must not be touched as a whole, for example
        pinned; blocks are only in others."""
        place = slab * self.slab_bytes + STRIDE_BYTE
        return not self._growing or bool(self._bytes[place : place + 4].any())

    def map_slab(self, slab: int) -> bool:
        """Let the kernel map a slab that is there, before it is first touched. Returns False if the kernel is too old.
        The mapping is for writing. For any thread; it does not hold the interpreter lock."""
        return not _ext.populate(self.address + slab * self.slab_bytes, self.slab_bytes)

    @property
    def tells_now(self) -> bool:
        """Whether `tells_all` is true of what `find` does not find at an age of 0: it looks at all blocks each time."""
        return self.tells_all and self._num_records <= LOOKED_AT

    def find(self, keys: bytes, *, max_age_s: float = LOOK_S) -> Flags | None:
        """Return which blocks are there now, without asking the daemon. Those that were stored in the last `max_age_s`
        seconds may be missing, in a store of very many blocks also others until `look` was called. None: the daemon is
        too old for that."""
        if self._mirror is None:
            return None
        self._look_around(self._mirror, max_age_s)
        return flags_of(self._mirror.find(keys, False)[0], num_keys(keys))

    def has(self, key: bytes, *, max_age_s: float = LOOK_S) -> bool:
        """Whether `find` finds a block. For a memory that `tells_all`."""
        assert self._mirror is not None
        self._look_around(self._mirror, max_age_s)
        return self._mirror.find(key, False)[0] != b"\0"

    def lease(self, keys: bytes, *, leading_only: bool = False, max_age_s: float = LOOK_S) -> SharedLease | None:
        """Lease blocks that `find` finds, with `leading_only` those before the first that it does not find, without
        asking the daemon, which does not count that as a use. None: the memory is mapped for reading only, or the
        daemon is too old."""
        mirror = self._mirror
        if mirror is None or not self.writable:
            return None
        self._look_around(mirror, max_age_s)
        return SharedLease(self, mirror, num_keys(keys), mirror.lease(keys, leading_only))

    def changes(self) -> tuple[list[bytes], list[bytes], bool] | None:
        """Return the keys of the blocks that have gone, and then of those that have come, since the last call, as far
        as that was seen; and whether these are all there are, so that any other has gone. That is so at the first call.
        None: the daemon is too old for that."""
        if self._mirror is None:
            return None
        self._look_around(self._mirror, LOOK_S)
        gone, come, is_all = self._mirror.take_changes()
        return split_keys(gone), split_keys(come), is_all

    def look(self) -> None:
        """Look for all new blocks, without the interpreter lock. `find` looks at a part, if there are very many."""
        if self._mirror is not None:
            began = time.monotonic()
            for _ in range(0, self._num_records, LOOKED_AT_ASIDE):
                self._mirror.refresh(LOOKED_AT_ASIDE)
            self._looked_s = began

    def _look_around(self, mirror: _ext.StoreMirror, max_age_s: float) -> None:
        now = time.monotonic()
        if now >= self._looked_s + max_age_s:
            mirror.refresh(LOOKED_AT)
            self._looked_s = time.monotonic()

    def read(self, offsets: bytes, versions: bytes, out: Blocks) -> Flags:
        """Copy blocks that this or another process has leased to `out`, as `StoreCore.get` does. Returns which are
        right: those whose lease did not end during the copy."""
        target = pieces_of(out, len(offsets) // 8, self._geometry.block_bytes, "out", writable=True)
        return self.copy_out(offsets, target) & self.unchanged(offsets, versions)

    def copy_out(self, offsets: bytes, target: Pieces, checksums: bytes = b"") -> Flags:
        """Copy blocks, see `copy_out`."""
        self._check(offsets)
        return copy_out(self.address, offsets, self._geometry.block_bytes, target, self._num_threads, checksums)

    def copy_in(self, offsets: bytes, source: Pieces) -> bytes:
        """Write reserved blocks. Returns their checksums."""
        self._check(offsets)
        return copy_in(self.address, offsets, self._geometry.block_bytes, source, self._num_threads)

    def unchanged(self, offsets: bytes, versions: bytes) -> Flags:
        """Return which blocks still have these versions, so that everything read from them so far was right."""
        self._check(offsets)
        geometry = self._geometry
        now = _ext.store_versions(
            self.address, geometry.slab_bytes, geometry.first_block, geometry.block_stride, offsets
        )
        if now == versions:
            return np.ones(len(now) // 8, np.bool_)
        flags: Flags = np.frombuffer(now, np.uint64) == np.frombuffer(versions, np.uint64)
        return flags

    def checksums(self, offsets: bytes) -> bytes:
        """Return the checksums in the records of blocks."""
        geometry = self._geometry
        starts = self._check(offsets)
        slabs = starts // geometry.slab_bytes * geometry.slab_bytes
        records = (starts - slabs - geometry.first_block) // geometry.block_stride * RECORD_BYTES
        words: Numbers = self._words[(slabs + records + CHECKSUM_BYTE) // 8]
        return words.tobytes()

    def addresses(self, offsets: bytes) -> Numbers:
        """Return the address of each block in this process."""
        return self._check(offsets) + np.uint64(self.address)

    def views(self, offsets: bytes, *, writable: bool) -> list[Array]:
        """Return an array uint8[block_bytes] over each block."""
        views = [self._bytes[start : start + self._geometry.block_bytes] for start in self._check(offsets).tolist()]
        for view in views:
            view.flags.writeable = writable
        return views

    def _check(self, offsets: bytes) -> Numbers:
        """Check that blocks are inside the memory: the native functions read and write where they are told."""
        starts = np.frombuffer(offsets, np.uint64)
        last = len(self._bytes) - self._geometry.block_bytes
        if len(starts) and int(starts.max()) > last:
            raise InternalError(f"the daemon names a block at {starts.max()}, the store has {len(self._bytes)} bytes")
        return starts


class StoreChanges:
    """Blocks that have come to a store, and gone from it, also by other processes."""

    def __init__(self, memory: Callable[[], Any]) -> None:
        """`memory` returns the memory of the store, a MappedStore, or None if it is not mapped."""
        self._memory = memory
        self._told: set[bytes] = set()

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the keys of the blocks that have gone since the last call, and of those that have come. If the
        store cannot be seen any more, all have gone."""
        memory = self._memory()
        gone, come, is_all = (None if memory is None else memory.changes()) or ([], [], True)
        # A block can come again before it was seen to go.
        left = (self._told if is_all else self._told.intersection(gone)).difference(come)
        gone, come = sorted(left), [key for key in dict.fromkeys(come) if key not in self._told]
        self._told.difference_update(gone)
        self._told.update(come)
        return gone, come
