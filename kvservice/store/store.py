"""The block store: namespaces by identity, and what happens to their blocks. All of it runs on the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvservice.blocks import EventJournal, Slices
from kvservice.blocks.events import StoreChange
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.store.figures import ModelFigures, NamespaceCounters
from kvservice.store.index import DONE, KEY_BYTES, NO_ROOM, WORD_BYTES, IndexStats, KeyIndex
from kvservice.store.leases import LeaseClock, Leases
from kvservice.store.namespaces import NamespaceIdentity, StoredNamespace
from kvservice.store.quarantine import Quarantine

# The records of a slab take a page at least.
_RECORDS_BYTES_MIN = 4096
# The slots that one slice of a check looks at.
CHECKED_SLOTS = 4096
# The name of all models beyond the first ones.
OTHER_MODELS = "other"
# The blocks that `clear` removes in one slice.
CLEARED_BLOCKS = 4096


@dataclass(frozen=True)
class StoreConfig:
    """Sizes and limits. `quota_bytes` is the most bytes of values of a namespace. Figures are kept for the first
    `max_models` models, and for all others together."""

    num_bytes: int
    slab_bytes: int
    max_namespaces: int
    quota_bytes: int
    max_lease_s: float
    max_models: int


@dataclass(frozen=True)
class Pinned:
    """Blocks that were found: a bit per key, and their slots, offsets and versions as packed arrays."""

    found: bytes
    slots: bytes
    offsets: bytes
    versions: bytes

    @property
    def num_blocks(self) -> int:
        return len(self.slots) // WORD_BYTES


@dataclass(frozen=True)
class Reserved:
    """Room for blocks: a status per key, and the slots, offsets and keys of those that are DONE."""

    statuses: bytes
    slots: bytes
    offsets: bytes
    keys: bytes


class BlockStore:
    """The blocks of all namespaces. Keys are checked by `check_keys` first."""

    def __init__(self, config: StoreConfig, index: KeyIndex, clock: LeaseClock, journal: EventJournal | None) -> None:
        self.config = config
        self.leases = Leases(clock)
        self.quarantine = Quarantine(index.abort, index.condemn, index.release)
        self._index, self._journal = index, journal
        self._namespaces: dict[NamespaceIdentity, StoredNamespace] = {}
        # By model. They outlive its namespaces.
        self._counters: dict[str, NamespaceCounters] = {}
        index.record_removed(journal is not None)

    def __iter__(self) -> Iterator[StoredNamespace]:
        return iter(self._namespaces.values())

    # ---- namespaces

    def open(self, identity: NamespaceIdentity) -> StoredNamespace:
        """Return the namespace of this identity for one more user. Raises InvalidArgumentError naming
        namespace.block_bytes, and QuotaExceededError."""
        namespace = self._namespaces.get(identity) or self._create(identity)
        namespace.num_users += 1
        return namespace

    def leave(self, namespace: StoredNamespace) -> None:
        """Undo one `open`."""
        namespace.num_users -= 1

    def _create(self, identity: NamespaceIdentity) -> StoredNamespace:
        config = self.config
        largest = config.slab_bytes - _RECORDS_BYTES_MIN
        if not 1 <= identity.block_bytes <= largest:
            raise InvalidArgumentError(
                f"{identity.block_bytes} is not from 1 to {largest}", field="namespace.block_bytes"
            )
        if len(self._namespaces) >= config.max_namespaces:
            self._close_an_unused_one()
        number = self._index.open(identity.block_bytes, config.quota_bytes)
        counters = self._counters_of(identity.model)
        namespace = StoredNamespace(identity, counters, number, config.quota_bytes, *self._index.geometry(number))
        self._namespaces[identity] = namespace
        return namespace

    def _counters_of(self, model: str) -> NamespaceCounters:
        is_known = model in self._counters or len(self._counters) < self.config.max_models
        return self._counters.setdefault(model if is_known else OTHER_MODELS, NamespaceCounters())

    def _close_an_unused_one(self) -> None:
        for identity, namespace in self._namespaces.items():
            stats = self._index.stats(namespace.number)
            if namespace.num_users == 0 and stats.num_slabs == 0:
                namespace.counters.evicted += stats.num_evicted
                del self._namespaces[identity]
                self._index.close(namespace.number)
                return
        limit = self.config.max_namespaces
        raise QuotaExceededError(
            f"the store has {limit} namespaces", limit="max_store_namespaces", value=limit, field="namespace"
        )

    # ---- blocks

    def lookup(self, namespace: StoredNamespace, keys: bytes) -> tuple[int, bytes]:
        """Return the number of leading keys found, and a bitmap."""
        num_leading, found = self._index.lookup(namespace.number, keys)
        num_found = int.from_bytes(found, "little").bit_count()
        namespace.counters.hits += num_found
        namespace.counters.misses += len(keys) // KEY_BYTES - num_found
        return num_leading, found

    def acquire(self, namespace: StoredNamespace, keys: bytes, leading_only: bool = False) -> Pinned:
        """Pin the blocks that are there, until `release`."""
        pinned = Pinned(*self._index.acquire(namespace.number, keys, leading_only))
        namespace.counters.read += pinned.num_blocks
        namespace.counters.read_bytes += pinned.num_blocks * namespace.block_bytes
        return pinned

    def release(self, slots: bytes) -> None:
        self._index.release(slots)

    def reserve(self, namespace: StoredNamespace, keys: bytes) -> Reserved:
        """Reserve room for the keys that are missing, until `commit` or `abort`."""
        statuses, slots, offsets = self._index.reserve(namespace.number, keys)
        self._report_removed()
        namespace.counters.refused += statuses.count(NO_ROOM)
        done = np.frombuffer(statuses, np.uint8) == DONE
        return Reserved(statuses, slots, offsets, chosen(keys, KEY_BYTES, done))

    def commit(self, namespace: StoredNamespace, slots: bytes, keys: bytes, checksums: bytes) -> None:
        """Publish reserved blocks with these keys."""
        self._index.commit(slots, checksums)
        num_blocks = len(keys) // KEY_BYTES
        namespace.counters.stored += num_blocks
        namespace.counters.stored_bytes += num_blocks * namespace.block_bytes
        if self._journal is not None and keys:
            self._journal.store_changed(StoreChange("stored", namespace.identity, keys))

    def abort(self, slots: bytes) -> None:
        self._index.abort(slots)

    def checksums(self, slots: bytes) -> bytes:
        return self._index.checksums(slots)

    def touch(self, namespace: StoredNamespace, keys: bytes) -> int:
        return self._index.touch(namespace.number, keys)

    def remove(self, namespace: StoredNamespace, keys: bytes) -> int:
        num_removed = self._index.remove(namespace.number, keys)
        self._report_removed()
        return num_removed

    def remove_corrupt(self, namespace: StoredNamespace, keys: bytes) -> None:
        """Remove blocks whose checksum was wrong."""
        namespace.counters.corrupt += len(keys) // KEY_BYTES
        self.remove(namespace, keys)

    def clear_in_slices(self, namespace: StoredNamespace) -> Slices[int]:
        """Remove as many blocks as the namespace has now. Returns how many were removed. One event reports the blocks
        of all slices; blocks that are stored between two slices have events of their own."""
        left = num_blocks = self._index.stats(namespace.number).num_blocks
        left -= self._index.clear(namespace.number, min(left, CLEARED_BLOCKS))
        if self._journal is not None:
            self._index.take_removed()
            self._journal.store_changed(StoreChange("cleared", namespace.identity, b""))
        namespace.num_users += 1
        try:
            while left:
                yield
                cleared = self._index.clear(namespace.number, min(left, CLEARED_BLOCKS))
                self._report_removed()
                if not cleared:
                    break
                left -= cleared
        finally:
            namespace.num_users -= 1
        return num_blocks - left

    # ---- reports

    def check_in_slices(self) -> Slices[None]:
        """Check the consistency of the index. Raises RuntimeError."""
        while not self._index.check(CHECKED_SLOTS):
            yield

    def stats(self, namespace: StoredNamespace) -> IndexStats:
        return self._index.stats(namespace.number)

    def totals(self) -> IndexStats:
        return self._index.totals()

    def figures(self) -> dict[str, ModelFigures]:
        """Return the figures of each model."""
        figures = {}
        for model, counters in self._counters.items():
            stats = [self._index.stats(one.number) for one in self if one.counters is counters]
            gauges = {
                "namespaces": len(stats),
                "blocks": sum(one.num_blocks for one in stats),
                "leased": sum(one.num_leased for one in stats),
                "reserved": sum(one.num_reserved for one in stats),
                "used_bytes": sum(one.used_bytes for one in stats),
            }
            evicted = counters.evicted + sum(one.num_evicted for one in stats)
            figures[model] = ModelFigures(**gauges, **asdict(counters) | {"evicted": evicted})
        return figures

    def _report_removed(self) -> None:
        if self._journal is None:
            return
        identities = {one.number: one.identity for one in self}
        for number, keys in self._index.take_removed():
            self._journal.store_changed(StoreChange("removed", identities[number], keys))


def check_keys(keys: bytes) -> int:
    """Return the number of keys. Raises InvalidArgumentError if the bytes are no whole number of keys."""
    if len(keys) % KEY_BYTES:
        raise InvalidArgumentError(f"{len(keys)} bytes, keys have {KEY_BYTES} each", field="keys")
    return len(keys) // KEY_BYTES


def chosen(packed: bytes, item_bytes: int, flags: np.ndarray[Any, np.dtype[np.bool_]]) -> bytes:
    """Return the items of a packed array whose flag, bool `[num_items]`, is set."""
    return packed if flags.all() else np.frombuffer(packed, np.uint8).reshape(-1, item_bytes)[flags].tobytes()
