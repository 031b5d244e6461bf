"""The store's calls without the client library."""

from __future__ import annotations

import itertools
import os
import socket
from typing import Any

import numpy as np

from kvservice.v1 import regions_pb2, store_pb2

BLOCK_BYTES = 8192


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "little") for number in numbers)


def block(number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Return the bytes of the block of this key, different for each number."""
    return np.random.default_rng(number).bytes(block_bytes)


def blocks(*numbers: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    return b"".join(block(number, block_bytes) for number in numbers)


def identity(model: str = "m", **changes: Any) -> store_pb2.StoreNamespace:
    fields: dict[str, Any] = {"model": model, "block_bytes": BLOCK_BYTES, "tp_size": 1, "pp_size": 1}
    return store_pb2.StoreNamespace(**fields | changes)


def fd_socket(address: str) -> str:
    """Return the path of the fd-passing socket beside a unix socket."""
    return address.removeprefix("unix:").removeprefix("//") + ".fds"


def present(address: str, token: bytes, count: int = 1) -> tuple[bytes, list[int]]:
    """Present a token on the fd-passing socket. Returns what the daemon sends, and the descriptors that it passes, at
    most `count`. The token of a session introduces its user."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(20.0)
        connection.connect(fd_socket(address))
        connection.sendall(token)
        answer, descriptors, _, _ = socket.recv_fds(connection, 16, count)
    return answer, descriptors


class RawStore:
    """The store for one session, with one namespace open. `transport` is "unary", "stream", or "both" in turns."""

    def __init__(self, session: Any, model: str = "m", transport: str = "unary", **changes: Any) -> None:
        self.session = session
        self.transports = itertools.cycle(("unary", "stream") if transport == "both" else (transport,))
        self.opened = self.ok("open_namespace", store_pb2.OpenNamespaceRequest(namespace=identity(model, **changes)))
        self.id = self.opened.namespace_id

    def call(self, name: str, request: Any) -> Any:
        return self.session.call(f"store_{name}", request, next(self.transports))

    def ok(self, name: str, request: Any) -> Any:
        answer = self.call(name, request)
        assert type(answer).__name__ != "Refusal", answer
        return answer

    def put(self, *numbers: int) -> bytes:
        request = store_pb2.BatchPutRequest(namespace_id=self.id, keys=keys(*numbers), data=blocks(*numbers))
        statuses: bytes = self.ok("batch_put", request).statuses
        return statuses

    def get(self, *numbers: int, **changes: Any) -> tuple[bytes, bytes]:
        answer = self.ok("batch_get", store_pb2.BatchGetRequest(namespace_id=self.id, keys=keys(*numbers), **changes))
        return answer.found, answer.data

    def lookup(self, *numbers: int) -> tuple[int, bytes]:
        answer = self.ok("lookup", store_pb2.LookupRequest(namespace_id=self.id, keys=keys(*numbers)))
        return answer.num_leading, answer.found

    def acquire(self, *numbers: int, **changes: Any) -> Any:
        return self.ok("acquire", store_pb2.AcquireRequest(namespace_id=self.id, keys=keys(*numbers), **changes))

    def reserve(self, *numbers: int) -> Any:
        return self.ok("reserve", store_pb2.ReserveRequest(namespace_id=self.id, keys=keys(*numbers)))

    def clear(self) -> int:
        num_blocks: int = self.ok("clear", store_pb2.ClearRequest(namespace_id=self.id)).num_blocks
        return num_blocks

    # ---- shared memory

    def descriptor(self, address: str, writable: bool) -> tuple[int, int]:
        """Fetch the memory of the store. Returns its descriptor, which the caller closes, and its size."""
        present(address, self.session.token)
        answer = self.ok("map_store", store_pb2.MapStoreRequest(writable=writable))
        _, (descriptor,) = present(address, answer.handover_token)
        return descriptor, answer.num_bytes

    def region(self, address: str, name: str, num_bytes: int) -> int:
        """Create a region. Returns its descriptor, which the caller closes."""
        request = regions_pb2.CreateRegionRequest(name=name, byte_size=num_bytes)
        _, (descriptor,) = present(address, self.session.ok("create_region", request).handover_token)
        return descriptor


def scatter(region: str, offsets: Any, piece_bytes: tuple[int, ...] = ()) -> store_pb2.Scatter:
    packed = np.asarray(offsets, "<u8").tobytes()
    return store_pb2.Scatter(region=region, piece_bytes=piece_bytes, offsets=packed)


def read_at(descriptor: int, begin: int, num_bytes: int) -> bytes:
    return os.pread(descriptor, num_bytes, begin)
