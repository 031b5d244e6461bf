"""A block store over the model of its index, and over the native one, with a clock that only the test advances."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from manual_clock import ManualClock
from store_model import StoreModel
from store_rig import address_of, kept_memory

from kvservice import _ext
from kvservice.blocks import EventJournal
from kvservice.blocks.events import StoreChange
from kvservice.blocks.slices import finish
from kvservice.store import BlockStore, KeyIndex, NamespaceIdentity, StoreConfig, StoredNamespace, StoreRecords

SLAB_BYTES = 16384
# A slab with its page of records has room for three blocks of this size.
BLOCK_BYTES = 4096
BLOCKS_PER_SLAB = 3


def keys(*numbers: int) -> bytes:
    """Return one key of 32 bytes for each number."""
    return b"".join(number.to_bytes(32, "little") for number in numbers)


def identity(model: str = "m", tenant: str = "", block_bytes: int = BLOCK_BYTES) -> NamespaceIdentity:
    return NamespaceIdentity(model, "w", "bf16", "layout", block_bytes, 0, 1, 0, 1, "sha256", tenant)


@dataclass
class Rig:
    """A store of `num_slabs` slabs. `events` are the changes that its journal has."""

    store: BlockStore
    clock: ManualClock
    journal: EventJournal
    kept: mmap.mmap

    def events(self) -> list[tuple[str, bytes]]:
        changes = [batch.change for batch in self.journal.since(1, 1 << 30)]
        return [(change.kind, change.keys) for change in changes if isinstance(change, StoreChange)]

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
    journal = EventJournal(1000)
    config = StoreConfig(num_bytes, num_bytes, SLAB_BYTES, **options | changes)
    return Rig(BlockStore(config, index, clock, journal, StoreRecords()), clock, journal, kept)


@pytest.fixture(params=["model", "native"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A store of four slabs."""
    clock = ManualClock()
    with_memory = mmap.mmap(-1, 4 * SLAB_BYTES)
    yield make(request.param, 4, with_memory, clock)
    clock.close()
