"""The daemon's Mooncake client: it moves values between the store's memory and a Mooncake Store.

The daemon starts `python -m kvservice.mooncake.serving` with the descriptors of a link and of the store's memory, the
size of the memory, and options.

Mooncake transfers each part of an object by itself, and over TCP a transfer of 64 bytes takes about as long as one of
32 KiB. So small values are copied to and from a slot, memory of the client process, where their trailers follow them:
an object is one part. Large values travel from and to the store's memory, and only their trailers lie in a slot.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeAlias

import numpy as np

from kvservice import _ext
from kvservice.mooncake import (
    CALLS_AT_A_TIME,
    GETS_AT_A_TIME,
    KEY_BYTES,
    LENGTH,
    NOWHERE,
    PUTS_AT_A_TIME,
    REQUEST_VALUES,
    STAGED_REQUEST_BYTES,
    WORD_BYTES,
    ListeningError,
    MooncakeOptions,
    MooncakeReply,
    MooncakeRequest,
    Operation,
    Outcome,
    Status,
    is_staged,
    values_in_request,
)
from kvservice.mooncake.library import (
    NO_ROOM,
    OBJECT_ALREADY_EXISTS,
    OBJECT_NOT_FOUND,
    MooncakeError,
    begin,
    check_codes,
    join,
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


# ---- requests

# Requests that are served at a time. The daemon sends no more.
NUM_TRANSFERS: Final = GETS_AT_A_TIME + PUTS_AT_A_TIME
NUM_THREADS: Final = CALLS_AT_A_TIME + NUM_TRANSFERS
# A thread in a call of the library polls for its end, and must not take the core of the thread that moves the bytes.
_NICE: Final = 5


class Client:
    """Serves requests. Several threads may call it at a time. `store` is the library's client."""

    def __init__(self, store: Any, memory: SharedMemory) -> None:
        """Raises MooncakeError."""
        self._store, self._memory = store, memory
        self._slots = RequestSlots(NUM_TRANSFERS)
        for owner in (memory, self._slots):
            address, size = owner.address, owner.num_bytes
            code = store.register_buffer(address, size)
            if code:
                raise MooncakeError(f"{size} bytes of memory cannot be registered (code {code})")
        self._operations: dict[Operation, Callable[[MooncakeRequest], bytes]] = {
            Operation.EXIST: self._exist,
            Operation.GET: self._get,
            Operation.PUT: self._put,
            Operation.REMOVE: self._remove,
            Operation.CLEAR: self._clear,
        }

    def serve(self, request: MooncakeRequest) -> MooncakeReply:
        try:
            return MooncakeReply(request.request_id, Status.OK, self._operations[request.operation](request))
        except MooncakeError as error:
            return MooncakeReply(request.request_id, Status.FAILED, str(error).encode())

    def _exist(self, request: MooncakeRequest) -> bytes:
        codes = check_codes(self._store.batch_is_exist(_names(request)))
        return bytes(Outcome.DONE if code == 1 else Outcome.MISS if code == 0 else Outcome.BROKEN for code in codes)

    def _put(self, request: MooncakeRequest) -> bytes:
        with self._path(request) as path:
            path.trailers[:] = trailers(request.digest, request.block_bytes, request.keys, request.checksums)
            codes = check_codes(path.put(_names(request)))
        return bytes(map(_put_outcome, codes))

    def _get(self, request: MooncakeRequest) -> bytes:
        """Return outcomes and checksums."""
        size = request.block_bytes + TRAILER_BYTES
        with self._path(request) as path:
            # A trailer of an earlier value must not be taken for one that has arrived.
            path.trailers[:] = 0
            codes = check_codes(path.get(_names(request)))
            outcomes = np.array([_get_outcome(code, size) for code in codes], np.uint8)
            checksums = np.zeros(request.num_values, np.uint64)
            there: Indices = np.flatnonzero(outcomes == Outcome.DONE)
            if len(there):
                found = path.arrive(there)
                keys = np.frombuffer(request.keys, np.uint8).reshape(-1, KEY_BYTES)[there].tobytes()
                expected = trailers(request.digest, request.block_bytes, keys, found)
                right = (path.trailers[there] == expected).all(axis=1)
                outcomes[there[~right]] = Outcome.CORRUPT
                checksums[there[right]] = np.frombuffer(found, np.uint64)[right]
        return outcomes.tobytes() + checksums.tobytes()

    def _remove(self, request: MooncakeRequest) -> bytes:
        # True forces the removal: otherwise values that were read a moment ago would stay.
        codes = check_codes(self._store.batch_remove(_names(request), True))
        return bytes(
            Outcome.DONE if code == 0 else Outcome.MISS if code == OBJECT_NOT_FOUND else Outcome.BROKEN
            for code in codes
        )

    def _clear(self, request: MooncakeRequest) -> bytes:
        code = self._store.remove_by_regex(keys_pattern(request.digest), True)
        if code < 0:
            raise MooncakeError(f"the master does not clear (code {code})")
        return b""

    @contextmanager
    def _path(self, request: MooncakeRequest) -> Iterator[ValuePath]:
        """Yield the path of the values of a request. Raises MooncakeError for values that are not in the memory, or too
        many, which only a fault of the daemon can cause."""
        ends = np.frombuffer(request.offsets, np.uint64) + np.uint64(request.block_bytes)
        if (ends > self._memory.num_bytes).any():
            raise MooncakeError("a value is not in the store's memory")
        if request.num_values > values_in_request(request.block_bytes):
            raise MooncakeError("the request has too many values")
        with self._slots.taken() as slot:
            yield path_of(self._store, self._memory, slot, request)


def _get_outcome(code: int, size: int) -> Outcome:
    if code == size:
        return Outcome.DONE
    if code == OBJECT_NOT_FOUND or code == 0:  # 0: the store has lost the object's bytes
        return Outcome.MISS
    return Outcome.CORRUPT if code > 0 else Outcome.BROKEN


def _put_outcome(code: int) -> Outcome:
    if code == 0 or code == OBJECT_ALREADY_EXISTS:
        return Outcome.DONE
    return Outcome.REFUSED if code in NO_ROOM else Outcome.BROKEN


def _names(request: MooncakeRequest) -> list[str]:
    keys = request.keys
    return [object_key(request.digest, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]


def serve_all(link: socket.socket, client: Client) -> None:
    """Serve requests until the daemon closes the link. The process then ends at once, also within a request."""
    lock = threading.Lock()
    requests: queue.SimpleQueue[MooncakeRequest] = queue.SimpleQueue()

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            reply = client.serve(requests.get()).encode()
            with lock:
                link.sendall(reply)

    for _ in range(NUM_THREADS):
        threading.Thread(target=work, daemon=True).start()
    with link.makefile("rb") as stream:
        while frame := _receive(stream):
            requests.put(MooncakeRequest.decode(frame))
    os._exit(0)


def _receive(stream: Any) -> bytes:
    """Return the next frame, or b"" at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    frame: bytes = stream.read(LENGTH.unpack(head)[0])
    return frame


def main() -> None:
    link_fd, memory_fd, num_bytes = map(int, sys.argv[2:5])  # after --link
    options = MooncakeOptions.from_json(sys.argv[5])
    begin()
    # The library must not take another node of this host for this process, and copy to its addresses here.
    os.environ["MC_STORE_MEMCPY"] = "0"
    link = socket.socket(fileno=link_fd)
    try:
        store = join(options, NOWHERE, 0)
        client = Client(store, SharedMemory(memory_fd, num_bytes))
    except (MooncakeError, ListeningError, OSError) as error:
        link.sendall(MooncakeReply(0, Status.FAILED, str(error).encode()).encode())
        sys.exit(1)
    link.sendall(MooncakeReply(0, Status.OK).encode())
    serve_all(link, client)


if __name__ == "__main__":
    main()
