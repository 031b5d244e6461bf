"""The daemon's Mooncake client: it moves values between the store's memory and a Mooncake Store."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Final

from kvservice import _ext
from kvservice.mooncake import library
from kvservice.mooncake.library import MooncakeError, check_codes
from kvservice.mooncake.messages import (
    KEY_BYTES,
    LENGTH,
    REQUEST_VALUES,
    WORD_BYTES,
    MooncakeReply,
    MooncakeRequest,
    Operation,
    Outcome,
    Status,
)
from kvservice.mooncake.objects import TRAILER_BYTES, checksum_in, keys_pattern, object_key, trailer

# Requests that are served at a time. The daemon sends no more.
NUM_THREADS: Final = 8
# Threads that compute the checksums of a request.
_CHECKSUM_THREADS: Final = 2


class SharedMemory:
    """The memory of the store, mapped from its file."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))


class Client:
    """Serves requests. Several threads may call it at a time. `store` is the library's client."""

    def __init__(self, store: Any, memory: SharedMemory) -> None:
        """Raises MooncakeError."""
        self._store, self._memory = store, memory
        self._trailers = mmap.mmap(-1, NUM_THREADS * REQUEST_VALUES * TRAILER_BYTES)
        self._trailers_address = ctypes.addressof(ctypes.c_char.from_buffer(self._trailers))
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for thread in range(NUM_THREADS):
            self._free.put(thread * REQUEST_VALUES * TRAILER_BYTES)
        for address, size in (
            (memory.address, memory.num_bytes),
            (self._trailers_address, len(self._trailers)),
        ):
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
        checksums = _numbers(request.checksums)
        trailers = self._free.get()
        try:
            for i, key in enumerate(_keys(request)):
                at = trailers + i * TRAILER_BYTES
                self._trailers[at : at + TRAILER_BYTES] = trailer(
                    request.digest, request.block_bytes, key, checksums[i]
                )
            places = self._places(request, trailers)
            codes = self._store.batch_put_from_multi_buffers(_names(request), *places)
        finally:
            self._free.put(trailers)
        return bytes(map(_put_outcome, check_codes(codes)))

    def _get(self, request: MooncakeRequest) -> bytes:
        size = request.block_bytes + TRAILER_BYTES
        trailers = self._free.get()
        try:
            # A trailer of an earlier value must not be taken for one that has arrived.
            self._trailers[trailers : trailers + request.num_values * TRAILER_BYTES] = bytes(
                request.num_values * TRAILER_BYTES
            )
            places = self._places(request, trailers)
            codes = self._store.batch_get_into_multi_buffers(_names(request), *places)
            found = self._trailers[trailers : trailers + request.num_values * TRAILER_BYTES]
        finally:
            self._free.put(trailers)
        outcomes = [_get_outcome(code, size) for code in check_codes(codes)]
        return self._verified(request, outcomes, found)

    def _verified(self, request: MooncakeRequest, outcomes: list[Outcome], trailers: bytes) -> bytes:
        """Return the reply's body: outcomes, of which those of damaged values are CORRUPT, and checksums."""
        there = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.DONE]
        offsets = b"".join(_part(request.offsets, i, WORD_BYTES) for i in there)
        actual = _numbers(
            _ext.store_checksums(self._memory.address, offsets, request.block_bytes, _CHECKSUM_THREADS)
            if there
            else b""
        )
        checksums = [0] * request.num_values
        for i, checksum in zip(there, actual, strict=True):
            key = _part(request.keys, i, KEY_BYTES)
            found = _part(trailers, i, TRAILER_BYTES)
            if checksum_in(found, request.digest, request.block_bytes, key) == checksum:
                checksums[i] = checksum
            else:
                outcomes[i] = Outcome.CORRUPT
        return bytes(outcomes) + struct.pack(f"<{len(checksums)}Q", *checksums)

    def _remove(self, request: MooncakeRequest) -> bytes:
        # By force: otherwise values that were read a moment ago would stay.
        codes = check_codes(self._store.batch_remove(_names(request), True))
        return bytes(
            Outcome.DONE if code == 0 else Outcome.MISS if code == library.OBJECT_NOT_FOUND else Outcome.BROKEN
            for code in codes
        )

    def _clear(self, request: MooncakeRequest) -> bytes:
        code = self._store.remove_by_regex(keys_pattern(request.digest), True)
        if code < 0:
            raise MooncakeError(f"the master does not clear (code {code})")
        return b""

    def _places(self, request: MooncakeRequest, trailers: int) -> tuple[list[list[int]], list[list[int]]]:
        """Return the addresses and the sizes of each object's two parts. Raises MooncakeError for values that are not
        in the memory, which only a fault of the daemon can cause."""
        offsets = _numbers(request.offsets)
        if any(offset + request.block_bytes > self._memory.num_bytes for offset in offsets):
            raise MooncakeError("a value is not in the store's memory")
        first = self._trailers_address + trailers
        addresses = [[self._memory.address + at, first + i * TRAILER_BYTES] for i, at in enumerate(offsets)]
        return addresses, [[request.block_bytes, TRAILER_BYTES]] * len(offsets)


def _get_outcome(code: int, size: int) -> Outcome:
    if code == size:
        return Outcome.DONE
    if code == library.OBJECT_NOT_FOUND or code == 0:  # 0: the store has lost the object's bytes
        return Outcome.MISS
    return Outcome.CORRUPT if code > 0 else Outcome.BROKEN


def _put_outcome(code: int) -> Outcome:
    if code == 0 or code == library.OBJECT_ALREADY_EXISTS:
        return Outcome.DONE
    return Outcome.REFUSED if code in library.NO_ROOM else Outcome.BROKEN


def _keys(request: MooncakeRequest) -> list[bytes]:
    return [_part(request.keys, i, KEY_BYTES) for i in range(request.num_values)]


def _names(request: MooncakeRequest) -> list[str]:
    return [object_key(request.digest, key) for key in _keys(request)]


def _numbers(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // WORD_BYTES}Q", packed)


def _part(packed: bytes, index: int, size: int) -> bytes:
    return packed[index * size : (index + 1) * size]


def serve_all(link: socket.socket, client: Client) -> None:
    """Serve requests until the daemon closes the link. The process then ends at once, whatever is in progress."""
    lock = threading.Lock()
    requests: queue.SimpleQueue[MooncakeRequest] = queue.SimpleQueue()

    def work() -> None:
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
