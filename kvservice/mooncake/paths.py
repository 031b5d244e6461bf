"""The paths of values between the store's memory and the library.

Mooncake transfers each part of an object by itself, and over TCP a transfer of 64 bytes takes about as long as one of
32 KiB. So small values are copied to and from a slot, memory of the client process, where their trailers follow them:
an object is one part. Large values travel from and to the store's memory, and only their trailers lie in a slot.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from kvservice import _ext
from kvservice.mooncake.messages import (
    REQUEST_VALUES,
    STAGED_REQUEST_BYTES,
    WORD_BYTES,
    MooncakeRequest,
    is_staged,
)

# ---- values as objects of a Mooncake Store: the bytes of the value, followed by a trailer that says which they are


Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_MAGIC: Final = b"kvsblk\x00\x01"
# The magic, the size of the value, its checksum, its key, and the start of the digest.
_TRAILER = struct.Struct("<8sQQ32s8s")
TRAILER_BYTES: Final = _TRAILER.size
assert TRAILER_BYTES == 64, "the format is fixed"
_CHECKSUM, _KEY = slice(16, 24), slice(24, 56)


def object_key(digest: bytes, key: bytes) -> str:
    return f"kvs/{digest.hex()}/{key.hex()}"


def keys_pattern(digest: bytes) -> str:
    """Return a regular expression for the keys of a space."""
    return f"^kvs/{digest.hex()}/"


def trailers(digest: bytes, block_bytes: int, keys: bytes, checksums: bytes) -> Bytes:
    """Return the trailers of values, uint8 `[num_values, TRAILER_BYTES]`. `keys` and `checksums` are packed."""
    common = _TRAILER.pack(_MAGIC, block_bytes, 0, b"", digest[:8])
    made = np.tile(np.frombuffer(common, np.uint8), (len(checksums) // 8, 1))
    made[:, _CHECKSUM] = np.frombuffer(checksums, np.uint8).reshape(-1, 8)
    made[:, _KEY] = np.frombuffer(keys, np.uint8).reshape(-1, 32)
    return made


# ---- the paths


Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
# Threads that compute the checksums of a request. Copies have one: the library's threads are at work meanwhile.
_CHECKSUM_THREADS: Final = 2


class SharedMemory:
    """The memory of the store, mapped from its file."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class RequestSlots:
    """A slot for each of `count` requests at a time. They are one range, `num_bytes` at `address`."""

    def __init__(self, count: int) -> None:
        slot_bytes = STAGED_REQUEST_BYTES + REQUEST_VALUES * TRAILER_BYTES
        self._memory = mmap.mmap(-1, count * slot_bytes)
        self.address, self.num_bytes = ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), len(self._memory)
        # The slot that was used last comes first: it is in caches.
        self._free: queue.LifoQueue[Bytes] = queue.LifoQueue()
        for slot in np.frombuffer(self._memory, np.uint8).reshape(count, slot_bytes):
            self._free.put(slot)

    @contextmanager
    def taken(self) -> Iterator[Bytes]:
        """Yield a slot, uint8 `[slot_bytes]`, with the content that its last request has left."""
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)


class ValuePath(Protocol):
    """The path of one request's values. `trailers` is a view of their trailers, uint8 `[num_values, TRAILER_BYTES]`.
    `put` and `get` return the library's codes."""

    trailers: Bytes

    def put(self, names: list[str]) -> list[int]: ...

    def get(self, names: list[str]) -> list[int]: ...

    def arrive(self, chosen: Indices) -> bytes:
        """Bring values that `get` has brought, by their indices, to the store's memory. Returns their checksums."""


def path_of(store: Any, memory: SharedMemory, slot: Bytes, request: MooncakeRequest) -> ValuePath:
    """Return the path of a request whose values are in the memory. `store` is the library's client."""
    kind = StagedPath if is_staged(request.block_bytes) else DirectPath
    return kind(store, memory, slot, request)


class StagedPath:
    """Values travel from and to a slot, each with its trailer behind it."""

    def __init__(self, store: Any, memory: SharedMemory, slot: Bytes, request: MooncakeRequest) -> None:
        self._store, self._memory, self._request = store, memory, request
        count, self._size = request.num_values, request.block_bytes + TRAILER_BYTES
        self._address = int(slot.ctypes.data)
        self._places: Numbers = np.arange(count, dtype=np.uint64) * np.uint64(self._size)
        self._piece_bytes = np.uint64(request.block_bytes).tobytes()
        self.trailers = slot[: count * self._size].reshape(count, self._size)[:, request.block_bytes :]

    def put(self, names: list[str]) -> list[int]:
        request = self._request
        _ext.store_copy_out(
            self._memory.address,
            request.offsets,
            request.block_bytes,
            self._address,
            self._places.tobytes(),
            self._piece_bytes,
            b"",
            1,
        )
        codes: list[int] = self._store.batch_put_from(names, *self._objects())
        return codes

    def get(self, names: list[str]) -> list[int]:
        codes: list[int] = self._store.batch_get_into(names, *self._objects())
        return codes

    def arrive(self, chosen: Indices) -> bytes:
        return _ext.store_copy_in(
            self._memory.address,
            _chosen(self._request.offsets, chosen),
            self._request.block_bytes,
            self._address,
            self._places[chosen].tobytes(),
            self._piece_bytes,
            1,
        )

    def _objects(self) -> tuple[list[int], list[int]]:
        """Return the addresses and the sizes of the objects."""
        return (self._places + np.uint64(self._address)).tolist(), [self._size] * len(self._places)


class DirectPath:
    """Values travel from and to the store's memory. A slot has their trailers."""

    def __init__(self, store: Any, memory: SharedMemory, slot: Bytes, request: MooncakeRequest) -> None:
        self._store, self._memory, self._request = store, memory, request
        self.trailers = slot[: request.num_values * TRAILER_BYTES].reshape(-1, TRAILER_BYTES)

    def put(self, names: list[str]) -> list[int]:
        codes: list[int] = self._store.batch_put_from_multi_buffers(names, *self._parts())
        return codes

    def get(self, names: list[str]) -> list[int]:
        codes: list[int] = self._store.batch_get_into_multi_buffers(names, *self._parts())
        return codes

    def arrive(self, chosen: Indices) -> bytes:
        offsets = _chosen(self._request.offsets, chosen)
        return _ext.store_checksums(self._memory.address, offsets, self._request.block_bytes, _CHECKSUM_THREADS)

    def _parts(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the sizes of each object's two parts."""
        offsets = np.frombuffer(self._request.offsets, np.uint64).tolist()
        first = int(self.trailers.ctypes.data)
        addresses = [[self._memory.address + at, first + i * TRAILER_BYTES] for i, at in enumerate(offsets)]
        return addresses, [[self._request.block_bytes, TRAILER_BYTES]] * len(offsets)


def _chosen(words: bytes, chosen: Indices) -> bytes:
    """Return the words of these indices, packed."""
    return np.frombuffer(words, np.uint8).reshape(-1, WORD_BYTES)[chosen].tobytes()
