"""A block store with a clock that only the test advances."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest
from manual_clock import ManualClock
from store_model import StoreModel
from store_rig import address_of, kept_memory

from kvservice import _ext
from kvservice.blocks import EventJournal
from kvservice.store import BlockStore, KeyIndex, NamespaceIdentity, StoreConfig, StoredNamespace, StoreRecords

T = TypeVar("T")

SLAB_BYTES = 16384
# A slab with its page of records has room for three blocks of this size.
BLOCK_BYTES = 4096
BLOCKS_PER_SLAB = 3
# And for so many of the smallest ones.
SMALL_BYTES, SMALL_PER_SLAB = 64, 128


def keys(*numbers: int) -> bytes:
    """Return one key of 32 bytes for each number."""
    return b"".join(number.to_bytes(32, "little") for number in numbers)


def identity(model: str = "m", tenant: str = "", block_bytes: int = BLOCK_BYTES) -> NamespaceIdentity:
    return NamespaceIdentity(model, "w", "bf16", "layout", block_bytes, 0, 1, 0, 1, "sha256", tenant)


def finish(slices: Generator[None, None, T]) -> T:
    """Run an operation in slices to its end, and return its result."""
    while True:
        try:
            next(slices)
        except StopIteration as done:
            result: T = done.value
            return result


@dataclass
class Rig:
    """A store of `num_slabs` slabs. `events` are the changes that its journal has."""

    store: BlockStore
    clock: ManualClock
    journal: EventJournal
    kept: mmap.mmap

    def events(self) -> list[tuple[str, bytes]]:
        changes: list[Any] = [batch.change for batch in self.journal.since(1, 1 << 30)]
        return [(change.kind, change.keys) for change in changes]

    def open(self, model: str) -> StoredNamespace:
        """Open a namespace of this model after a place was made for it."""
        finish(self.store.make_place(identity(model)))
        return self.store.open(identity(model))

    def put(self, namespace: Any, *numbers: int) -> bytes:
        """Store blocks with these keys. Returns the statuses."""
        reserved = self.store.reserve(namespace, keys(*numbers))
        self.store.commit(namespace, reserved.slots, reserved.keys, bytes(len(reserved.slots)))
        return reserved.statuses


def make(kind: str, num_slabs: int, memory: mmap.mmap, clock: ManualClock, **changes: Any) -> Rig:
    num_bytes = num_slabs * SLAB_BYTES
    address = np.frombuffer(memory, np.uint8).ctypes.data
    kept = kept_memory(num_bytes, SLAB_BYTES)
    kind_of_index = StoreModel if kind == "model" else _ext.StoreIndex
    index: KeyIndex = kind_of_index(address, num_bytes, SLAB_BYTES, 7, address_of(kept))
    options: dict[str, Any] = {"max_namespaces": 3, "quota_bytes": num_bytes, "max_lease_s": 60.0, "max_models": 2}
    journal = EventJournal(20_000)
    config = StoreConfig(num_bytes, num_bytes, SLAB_BYTES, **options | changes)
    return Rig(BlockStore(config, index, clock, journal, StoreRecords()), clock, journal, kept)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A store of four slabs."""
    with rig_of(4) as made:
        yield made


@contextlib.contextmanager
def rig_of(num_slabs: int, **changes: Any) -> Iterator[Rig]:
    clock = ManualClock()
    memory = mmap.mmap(-1, num_slabs * SLAB_BYTES)
    try:
        yield make("native", num_slabs, memory, clock, **changes)
    finally:
        clock.close()
