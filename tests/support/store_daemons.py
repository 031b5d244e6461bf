"""Daemons with a small store, the ways to it, and blocks with known contents."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from both_faces import Awaitable, Face
from small_pool import SMALL_POOL

from kvservice.client import AsyncKVClient, KVClient, StoreNamespace
from kvservice.launch import Daemon

# Large enough for few slabs; a request may have few keys, so that small batches are split.
SMALL_STORE: dict[str, Any] = SMALL_POOL | {
    "store_gib": 1 / 64,
    "max_message_mib": 1,
    "max_request_blocks": 16,
    "max_lease_s": 30.0,
}
# The ways of blocks: the daemon's share_store, and the store's transport.
WAYS = {
    "mapped": ("write", "mapped"),
    "mapped to read": ("read", "auto"),
    "region": ("off", "region"),
    "inline": ("off", "inline"),
}
BLOCK_BYTES = 4096 + 512

OpenStore = Callable[[str], Daemon]
_names = itertools.count()


@pytest.fixture(scope="package")
def store_daemon() -> Iterator[OpenStore]:
    """Return the daemon with this `share_store`; "none": without a store. Each is started once."""
    running: dict[str, Daemon] = {}
    with contextlib.ExitStack() as stack:

        def find(share_store: str) -> Daemon:
            if share_store not in running:
                options = {"store_gib": 0} if share_store == "none" else {"share_store": share_store}
                running[share_store] = stack.enter_context(Daemon(**SMALL_STORE | options))
            return running[share_store]

        yield find


def new_namespace(block_bytes: int = BLOCK_BYTES) -> StoreNamespace:
    """Return a namespace that no other test uses."""
    return StoreNamespace(f"model-{next(_names)}", block_bytes)


def keys_of(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "little") for number in numbers]


def blocks_of(*numbers: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """Return the content of the blocks with these numbers, uint8[n, block_bytes]."""
    return np.array([_row(number, block_bytes) for number in numbers], np.uint8).reshape(len(numbers), block_bytes)


@functools.lru_cache(4096)
def _row(number: int, block_bytes: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, block_bytes, np.uint8)


@contextlib.asynccontextmanager
async def store_of(
    face: Face, address: str, namespace: StoreNamespace, *, connect_timeout_s: float | None = 10.0, **options: Any
) -> AsyncIterator[Any]:
    """Open a store whose methods are awaited."""
    if face == "blocking":
        with (
            KVClient(address, connect_timeout_s=connect_timeout_s) as client,
            client.store(namespace, **options) as store,
        ):
            yield Awaitable(store)
    else:
        async with (
            AsyncKVClient(address, connect_timeout_s=connect_timeout_s) as waiting,
            waiting.store(namespace, **options) as store,
        ):
            yield store
