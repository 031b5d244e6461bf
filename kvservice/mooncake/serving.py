"""The daemon's Mooncake client: it moves values between the store's memory and a Mooncake Store."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from kvservice.mooncake import library
from kvservice.mooncake.library import MooncakeError, check_codes
from kvservice.mooncake.messages import (
    CALLS_AT_A_TIME,
    GETS_AT_A_TIME,
    KEY_BYTES,
    LENGTH,
    PUTS_AT_A_TIME,
    MooncakeReply,
    MooncakeRequest,
    Operation,
    Outcome,
    Status,
    values_in_request,
)
from kvservice.mooncake.paths import (
    TRAILER_BYTES,
    Indices,
    RequestSlots,
    SharedMemory,
    ValuePath,
    keys_pattern,
    object_key,
    path_of,
    trailers,
)

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
            Outcome.DONE if code == 0 else Outcome.MISS if code == library.OBJECT_NOT_FOUND else Outcome.BROKEN
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
    if code == library.OBJECT_NOT_FOUND or code == 0:  # 0: the store has lost the object's bytes
        return Outcome.MISS
    return Outcome.CORRUPT if code > 0 else Outcome.BROKEN


def _put_outcome(code: int) -> Outcome:
    if code == 0 or code == library.OBJECT_ALREADY_EXISTS:
        return Outcome.DONE
    return Outcome.REFUSED if code in library.NO_ROOM else Outcome.BROKEN


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
