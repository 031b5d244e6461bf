"""The memory of the store, mapped into this process."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from kvservice import _ext
from kvservice.client.store import copies
from kvservice.client.store.pieces import Blocks, Numbers, Pieces, pieces_of
from kvservice.client.store.values import Flags
from kvservice.errors import InternalError
from kvservice.wire.tensors import Array

RECORD_BYTES = 64
# The place of the checksum in a record.
CHECKSUM_BYTE = 8


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the blocks of a namespace lie, in bytes; see OpenNamespaceResponse in store.proto."""

    block_bytes: int
    slab_bytes: int
    first_block: int
    block_stride: int


class MappedStore:
    """The memory of a store, mapped at `address`: `num_bytes` in slabs of `slab_bytes`. A block lies in one slab.

    `offsets` are those of blocks, as the daemon packs them. A block can change as soon as its lease has ended;
    `unchanged` notices that afterwards. `identity` is the same in all processes that map this memory: what one of them
    has leased, another one can read."""

    def __init__(
        self, mapping: mmap.mmap, geometry: Geometry, writable: bool, num_threads: int, identity: tuple[int, int]
    ) -> None:
        self.identity = identity
        self.writable, self.num_bytes, self.slab_bytes = writable, len(mapping), geometry.slab_bytes
        self._geometry, self._num_threads = geometry, num_threads
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._words = self._bytes[: len(self._bytes) & ~7].view(np.uint64)
        self.address = int(self._bytes.ctypes.data)

    @staticmethod
    def open(descriptor: int, num_bytes: int, geometry: Geometry, writable: bool, num_threads: int) -> MappedStore:
        """Map the memory. The caller still owns the descriptor. Raises OSError."""
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        file = os.fstat(descriptor)
        mapping = mmap.mmap(descriptor, num_bytes, prot=access)
        return MappedStore(mapping, geometry, writable, num_threads, (file.st_dev, file.st_ino))

    def read(self, offsets: bytes, versions: bytes, out: Blocks) -> Flags:
        """Copy blocks that this or another process has leased to `out`, as `StoreCore.get` does. Returns which are
        right: those whose lease did not end during the copy."""
        target = pieces_of(out, len(offsets) // 8, self._geometry.block_bytes, "out", writable=True)
        return self.copy_out(offsets, target) & self.unchanged(offsets, versions)

    def copy_out(self, offsets: bytes, target: Pieces, checksums: bytes = b"") -> Flags:
        """Copy blocks, see `copies.copy_out`."""
        self._check(offsets)
        return copies.copy_out(self.address, offsets, self._geometry.block_bytes, target, self._num_threads, checksums)

    def copy_in(self, offsets: bytes, source: Pieces) -> bytes:
        """Write reserved blocks. Returns their checksums."""
        self._check(offsets)
        return copies.copy_in(self.address, offsets, self._geometry.block_bytes, source, self._num_threads)

    def unchanged(self, offsets: bytes, versions: bytes) -> Flags:
        """Return which blocks still have these versions, so that everything read from them so far was right."""
        self._check(offsets)
        geometry = self._geometry
        now = _ext.store_versions(
            self.address, geometry.slab_bytes, geometry.first_block, geometry.block_stride, offsets
        )
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
