"""A StoreIndex over memory of its own, keys, and contents that are derived from key and version."""

from __future__ import annotations

import functools
import mmap
import random
import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvservice import _ext

KEY_BYTES = 32
RECORD_BYTES = 64
DONE, PRESENT, BEING_WRITTEN, NO_ROOM = 1, 2, 3, 4


@functools.lru_cache(1 << 17)
def key_of(name: object) -> bytes:
    return random.Random(repr(name)).randbytes(KEY_BYTES)


def keys_of(names: Iterable[object]) -> bytes:
    return b"".join(key_of(name) for name in names)


def pack(numbers: Iterable[int]) -> bytes:
    listed = list(numbers)
    return struct.pack(f"<{len(listed)}Q", *listed)


def unpack(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def bits(bitmap: bytes, count: int) -> list[bool]:
    """Return the bits of a bitmap, and check that the bits after them are 0."""
    array = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")
    assert len(bitmap) == -(-count // 8)
    assert not array[count:].any()
    return [bool(bit) for bit in array[:count]]


def kept_memory(num_bytes: int, slab_bytes: int) -> mmap.mmap:
    """Return memory for the part of an index that outlives its process."""
    return mmap.mmap(-1, _ext.StoreIndex.kept_bytes(num_bytes, slab_bytes))


def address_of(memory: mmap.mmap) -> int:
    address: int = np.frombuffer(memory, np.uint8).ctypes.data
    return address


class Store:
    """The index under test and its memory."""

    def __init__(self, num_slabs: int, slab_bytes: int, seed: int = 1) -> None:
        self.slab_bytes = slab_bytes
        self.num_bytes = num_slabs * slab_bytes
        self.map = mmap.mmap(-1, self.num_bytes)
        self.memory: NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)
        self.address: int = self.memory.ctypes.data
        self.kept = kept_memory(self.num_bytes, slab_bytes)
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Forget everything but the memory. The new index has recovered nothing yet."""
        self.index = _ext.StoreIndex(self.address, self.num_bytes, self.slab_bytes, seed, address_of(self.kept))

    def put(self, namespace: int, names: Iterable[object]) -> list[int]:
        """Reserve and commit blocks. Returns the statuses."""
        statuses, slots, _ = self.index.reserve(namespace, keys_of(names))
        self.index.commit(slots, slots)
        return list(statuses)

    def found(self, namespace: int, names: Iterable[object]) -> list[bool]:
        listed = list(names)
        return bits(self.index.lookup(namespace, keys_of(listed))[1], len(listed))

    def versions(self, namespace: int, offsets: bytes) -> tuple[int, ...]:
        first_block, stride, _ = self.index.geometry(namespace)
        return unpack(_ext.store_versions(self.address, self.slab_bytes, first_block, stride, offsets))

    def check(self) -> None:
        while not self.index.check(1 << 20):
            pass
