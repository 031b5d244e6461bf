"""The block store: namespaces by identity, and what happens to their blocks. All of it runs on the event loop."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvservice.blocks import EventJournal, Slices, WaitingForWriters
from kvservice.blocks.events import StoreChange
from kvservice.errors import InvalidArgumentError, QuotaExceededError
from kvservice.store.index import DONE, KEY_BYTES, NO_ROOM, PRESENT, WORD_BYTES, IndexStats, KeyIndex
from kvservice.store.leases import LeaseClock, Leases
from kvservice.store.namespaces import ModelFigures, NamespaceIdentity, StoredNamespace
from kvservice.store.records import ReservationRecord, StoreRecords
from kvservice.store.table import NamespaceTable, StoreConfig

logger = logging.getLogger(__name__)

# The slots that one slice of a check looks at.
CHECKED_SLOTS = 4096
# The blocks that `clear` removes in one slice. No more slabs are emptied in a call after so many blocks are evicted.
CLEARED_BLOCKS = 4096
# A process has so many bits for its ids, and its generation is above them.
_GENERATION_SHIFT = 40


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
class Offered:
    """Blocks that will be evicted soon, as packed arrays. `uses` are uint64: how often each was used since it was
    stored."""

    slots: bytes
    keys: bytes
    offsets: bytes
    checksums: bytes
    uses: bytes = b""


@dataclass(frozen=True)
class Reserved:
    """Room for blocks: a status per key, and the slots, offsets and keys of those that are DONE."""

    statuses: bytes
    slots: bytes
    offsets: bytes
    keys: bytes


@dataclass(frozen=True)
class TenantRoom:
    """The slabs of a tenant, and what one of its namespaces can have in them. `num_idle` slabs of its other namespaces
    can be emptied. The namespace has `num_free` slots without a block, and blocks that can be evicted."""

    most_slabs: int
    num_slabs: int
    num_idle: int
    num_free: int
    num_evictable: int
    blocks_per_slab: int

    def slabs_for(self, num_blocks: int, *, evicting: bool = False) -> int:
        """Return how many more slabs the namespace needs for more blocks, after all that can be evicted if it is
        `evicting`."""
        left = num_blocks - self.num_free - (self.num_evictable if evicting else 0)
        return max(0, -(-left // self.blocks_per_slab))

    @property
    def num_slabs_left(self) -> int:
        """The slabs that the tenant may have besides its own."""
        return max(0, self.most_slabs - self.num_slabs)

    def num_storable(self, *, evicting: bool) -> int:
        """Return how many more blocks the namespace can have, after all that can be evicted if it is `evicting`."""
        if not evicting:
            return self.num_free + self.num_slabs_left * self.blocks_per_slab
        num_slabs = max(0, self.most_slabs - self.num_slabs + self.num_idle)
        return self.num_free + self.num_evictable + num_slabs * self.blocks_per_slab


class StoreWatcher(Protocol):
    """The writer of values to tiers below the memory. It is called in the middle of a call, and must not raise."""

    def stored(self, namespace: StoredNamespace, keys: bytes) -> None:
        """Note blocks that clients have stored."""

    def put_again(self, namespace: StoredNamespace, keys: bytes) -> None:
        """Note blocks that were to be stored and are in memory already."""


class BlockStore:
    """The blocks of all namespaces. Keys are checked by `check_keys` first."""

    def __init__(
        self,
        config: StoreConfig,
        index: KeyIndex,
        clock: LeaseClock,
        journal: EventJournal | None,
        records: StoreRecords,
    ) -> None:
        """Open the store with the namespaces and blocks of the process before, see `recovery.recover` for the rest."""
        self.config = config
        self.leases = Leases(clock)
        self.quarantine = Quarantine(index.abort, index.condemn, index.release, records)
        self.records = records
        # Ids of leases, reservations and writers. No process before used one of them.
        self.ids = itertools.count((index.generation << _GENERATION_SHIFT) + 1)
        self._index, self._journal = index, journal
        self._namespaces = NamespaceTable(config, index, records)
        # The slots that the process before had reserved, and those that it had condemned.
        self.found_reserved, self.found_condemned = self._namespaces.recover()
        index.record_removed(True)
        self._ghosts = GhostKeys()
        self.watcher: StoreWatcher | None = None
        # The most bytes of slabs that a tenant may have, by the tenant of its namespaces.
        self.tenant_limits: Mapping[str, int] = {}

    def __iter__(self) -> Iterator[StoredNamespace]:
        return iter(self._namespaces)

    # ---- namespaces

    def make_place(self, identity: NamespaceIdentity) -> Slices[None]:
        """Make sure that a namespace of this identity can be opened: evict the least recently used one that nobody
        uses, preferably one without blocks, if there are too many; one of the same tenant if that has too many. Raises
        QuotaExceededError."""
        while not self._namespaces.has_place(identity):
            namespace = self._namespaces.least_useful(identity.tenant)
            if self._index.stats(namespace.number).num_blocks:
                num_evicted = yield from self._clear_in_slices(namespace)
                namespace.counters.evicted += num_evicted
            if self._namespaces.close(namespace):
                logger.info("a namespace of model %r gave way to another one", namespace.identity.model)

    def open(self, identity: NamespaceIdentity, quota_bytes: int = 0) -> StoredNamespace:
        """Return the namespace of this identity for one more user. There is a place for it, see `make_place`. Raises
        InvalidArgumentError naming namespace.block_bytes or, see `set_quota`, quota_bytes."""
        return self._namespaces.open(identity, quota_bytes)

    def has(self, namespace: StoredNamespace) -> bool:
        """Return whether a namespace has not given way."""
        return self._namespaces.has(namespace)

    def leave(self, namespace: StoredNamespace) -> None:
        """Undo one `open`."""
        self._namespaces.leave(namespace)

    def set_quota(self, namespace: StoredNamespace, quota_bytes: int) -> None:
        """Change the quota of a namespace, to at most that of all. 0 leaves it as it is. Raises InvalidArgumentError
        naming quota_bytes if no block fits."""
        self._namespaces.set_quota(namespace, quota_bytes)

    # ---- blocks

    def lookup(
        self, namespace: StoredNamespace, keys: bytes, *, counted: bool = True, explained: bool = True
    ) -> tuple[int, bytes]:
        """Return the number of leading keys found, and a bitmap."""
        num_leading, found = self._index.lookup(namespace.number, keys)
        if counted:
            self.count_lookup(namespace, keys, found, explained=explained)
        return num_leading, found

    def has_all(self, namespace: StoredNamespace, keys: bytes) -> bool:
        """Return whether all of these blocks are there."""
        return self._index.lookup(namespace.number, keys)[0] == len(keys) // KEY_BYTES

    def count_lookup(self, namespace: StoredNamespace, keys: bytes, found: bytes, *, explained: bool = True) -> None:
        """Count a lookup whose result is this bitmap, and, `explained`, why its first missing block is missing."""
        bits = int.from_bytes(found, "little")
        num_found, num_keys = bits.bit_count(), len(keys) // KEY_BYTES
        namespace.counters.hits += num_found
        namespace.counters.misses += num_keys - num_found
        if explained and num_found < num_keys:
            first = (~bits & (bits + 1)).bit_length() - 1  # the lowest bit that is 0
            self.count_missing(namespace, keys[KEY_BYTES * first : KEY_BYTES * (first + 1)])

    def count_missing(self, namespace: StoredNamespace, keys: bytes, *, whole: bool = False) -> None:
        """Count why each of these blocks is missing. `whole`: no rank had its part when they were looked up, so that
        what other ranks have now says nothing."""
        gone = self._ghosts.have(namespace, keys)
        left = b"".join(keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] for at, left in enumerate(gone) if not left)
        beside = elsewhere = 0
        for other in self._namespaces.latest(MAX_SEARCHED) if left else ():
            bits = int.from_bytes(self._index.lookup(other.number, left)[1], "little")
            if not bits or other is namespace:
                continue
            if not namespace.identity.is_rank_beside(other.identity):
                elsewhere |= bits
            elif not whole:
                beside |= bits
        counters = namespace.counters
        counters.evicted_misses += sum(gone)
        counters.not_whole_misses += beside.bit_count()
        counters.other_namespace_misses += (elsewhere & ~beside).bit_count()
        counters.never_stored_misses += len(left) // KEY_BYTES - (elsewhere | beside).bit_count()

    def count(
        self,
        namespace: StoredNamespace,
        hits: int,
        misses: int,
        read: int,
        missing: bytes = b"",
        num_not_whole: int = 0,
    ) -> None:
        """Count what a client has done in the memory by itself. `missing` are the first missing keys of its lookups;
        those of `num_not_whole` more are not whole."""
        self.count_missing(namespace, missing, whole=True)
        namespace.counters.not_whole_misses += num_not_whole
        namespace.counters.hits += hits
        namespace.counters.misses += misses
        namespace.counters.read += read
        namespace.counters.read_bytes += read * namespace.block_bytes

    def acquire(
        self, namespace: StoredNamespace, keys: bytes, leading_only: bool = False, *, counted: bool = True
    ) -> Pinned:
        """Pin the blocks that are there, until `release`."""
        pinned = Pinned(*self._index.acquire(namespace.number, keys, leading_only, counted))
        if counted:
            namespace.counters.read += pinned.num_blocks
            namespace.counters.read_bytes += pinned.num_blocks * namespace.block_bytes
        return pinned

    def hold(self, namespace: StoredNamespace, keys: bytes) -> Pinned:
        """Pin the blocks that are there, until `release`. It does not count as a use."""
        return Pinned(*self._index.acquire(namespace.number, keys, False, False))

    def coldest(self, namespace: StoredNamespace, most: int, *, newest_first: bool = False) -> Offered:
        """Pin blocks that are next to be evicted, until `release`, each once after its last use. The order of eviction
        stays as it is."""
        return Offered(*self._index.coldest(namespace.number, most, newest_first))

    def lease(self, slots: bytes) -> None:
        """Pin blocks by slot, until `release`."""
        self._index.lease(slots)

    def release(self, slots: bytes) -> None:
        self._index.release(slots)

    def places(self, slots: bytes) -> tuple[bytes, bytes]:
        """Return the keys and the offsets of blocks."""
        return self._index.places(slots)

    def reserve(self, namespace: StoredNamespace, keys: bytes) -> Reserved:
        """Reserve room for the keys that are missing, until `commit` or `abort`. Raises QuotaExceededError if the
        tenant may not have them."""
        num_keys = most = len(keys) // KEY_BYTES
        if (limit := self._limit(namespace)) is not None:
            most = self._make_room(limit, namespace, keys)
        statuses, slots, offsets = self._index.reserve(namespace.number, keys[: most * KEY_BYTES])
        statuses = statuses.ljust(num_keys, bytes([NO_ROOM]))
        self._report_removed()
        namespace.counters.refused += statuses.count(NO_ROOM)
        by_key = np.frombuffer(statuses, np.uint8)
        if self.watcher is not None and PRESENT in statuses:
            self.watcher.put_again(namespace, chosen(keys, KEY_BYTES, by_key == PRESENT))
        return Reserved(statuses, slots, offsets, chosen(keys, KEY_BYTES, by_key == DONE))

    def _make_room(self, limit: int, namespace: StoredNamespace, keys: bytes) -> int:
        """Evict blocks of the namespace's tenant, so that it is within its limit with these keys: the oldest slabs of
        namespaces that nobody uses, then the oldest blocks of this namespace, then slabs of others. Returns for how
        many of the keys, the first ones, there is room: for fewer if so many blocks would have to go that it would take
        long. Raises QuotaExceededError, before anything changes, if leases and reservations keep too much."""
        num_keys, tenant = len(keys) // KEY_BYTES, namespace.identity.tenant
        num_missing, num_present = self._index.needed(namespace.number, keys)
        room = self._room(limit, namespace)
        room = replace(room, num_evictable=room.num_evictable - num_present)  # blocks of `keys` that are there stay
        most, required, least = room.most_slabs, room.slabs_for(num_missing), room.slabs_for(num_missing, evicting=True)
        if least and room.num_slabs + least - room.num_idle > most:
            slab_bytes = self.config.slab_capacity_bytes
            used, more = room.num_slabs * slab_bytes, required * slab_bytes
            evicted = (room.num_idle + required - least) * slab_bytes
            raise QuotaExceededError(
                f"tenant {tenant} has {used} of max_store_bytes {limit}, and {more} more are needed, of which "
                f"{evicted} can come from evicted blocks: slabs of {slab_bytes} bytes count as a whole",
                tenant=tenant, limit="max_store_bytes", value=limit, used=used, required=more, field="keys",
            )  # fmt: skip
        if not num_missing or room.num_slabs + required <= most:
            return num_keys
        held = self._index.acquire(namespace.number, keys, False, False)[1]
        try:
            num_slabs, num_evicted = room.num_slabs, 0
            own = [one for one in self if one.identity.tenant == tenant]
            for one in sorted(own, key=lambda one: (one.num_users > 0, one is not namespace)):
                if one is namespace:  # the limit was lowered
                    spare = (room.num_free + room.num_evictable - num_missing) // room.blocks_per_slab
                    count = min(num_slabs - most, spare)
                else:
                    count = num_slabs + (least if one.num_users else required) - most
                emptied = self._index.empty_slabs(one.number, count, CLEARED_BLOCKS - num_evicted)
                num_slabs, num_evicted = num_slabs - emptied[0], num_evicted + emptied[1]
            num_blocks = self._room(limit, namespace).num_storable(evicting=False)
            if num_blocks < num_missing:
                num_blocks += self._index.evict_blocks(namespace.number, num_missing - num_blocks)
            return num_keys if num_blocks >= num_missing else num_blocks
        finally:
            self._index.release(held)

    def _limit(self, namespace: StoredNamespace) -> int | None:
        """Return the most bytes of the namespace's tenant, None if only the size of the store limits them."""
        return self.tenant_limits.get(namespace.identity.tenant)

    def _room(self, limit: int, namespace: StoredNamespace) -> TenantRoom:
        own = {one: self.stats(one) for one in self if one.identity.tenant == namespace.identity.tenant}
        mine = own[namespace]
        return TenantRoom(
            most_slabs=limit // self.config.slab_capacity_bytes,
            num_slabs=sum(stats.num_slabs for stats in own.values()),
            num_idle=sum(stats.num_slabs - stats.num_busy_slabs for one, stats in own.items() if one is not namespace),
            num_free=mine.num_slabs * namespace.blocks_per_slab
            - (mine.num_blocks + mine.num_reserved + mine.num_condemned),
            num_evictable=mine.num_blocks - (mine.num_leased - mine.num_condemned),
            blocks_per_slab=namespace.blocks_per_slab,
        )

    def num_storable(self, namespace: StoredNamespace, most: int) -> int:
        """Return how many of `most` blocks that are missing the tenant may have, after others were evicted."""
        limit = self._limit(namespace)
        return most if limit is None else min(most, self._room(limit, namespace).num_storable(evicting=True))

    def num_free_slabs(self, namespace: StoredNamespace) -> int:
        """Return how many slabs that belong to no namespace, and are there, this one may have."""
        num_free, limit = self._index.num_free_slabs, self._limit(namespace)
        return num_free if limit is None else min(num_free, self._room(limit, namespace).num_slabs_left)

    def limit_tenants(self, num_bytes: Mapping[str, int], num_namespaces: Mapping[str, int]) -> None:
        """Set the most bytes of slabs and the most namespaces that tenants may have, by the tenants of namespaces."""
        self.tenant_limits, self._namespaces.tenant_limits = num_bytes, num_namespaces

    def namespaces_by_tenant(self) -> Counter[str]:
        """Return the number of namespaces of each tenant, or of those who share."""
        return self._namespaces.by_tenant()

    def bytes_by_tenant(self) -> Counter[str]:
        """Return the bytes of the slabs of each tenant, or of those who share."""
        found: Counter[str] = Counter()
        for namespace in self:
            found[namespace.identity.tenant] += self.stats(namespace).num_slabs * self.config.slab_capacity_bytes
        return found

    def commit(
        self, namespace: StoredNamespace, slots: bytes, keys: bytes, checksums: bytes, *, counted: bool = True
    ) -> None:
        """Publish reserved blocks with these keys."""
        self._index.commit(slots, checksums)
        if counted:
            num_blocks = len(keys) // KEY_BYTES
            namespace.counters.stored += num_blocks
            namespace.counters.stored_bytes += num_blocks * namespace.block_bytes
            if self.watcher is not None:
                self.watcher.stored(namespace, keys)
        if self._journal is not None and keys:
            self._journal.store_changed(StoreChange("stored", namespace.identity, keys))

    def abort(self, slots: bytes) -> None:
        self._index.abort(slots)

    def condemn(self, slots: bytes) -> None:
        """Forget the keys of reserved blocks, until `release` frees their room."""
        self._index.condemn(slots)

    def checksums(self, slots: bytes) -> bytes:
        return self._index.checksums(slots)

    def touch(self, namespace: StoredNamespace, keys: bytes) -> int:
        return self._index.touch(namespace.number, keys)

    def remove(self, namespace: StoredNamespace, keys: bytes) -> int:
        num_removed = self._remove(namespace, keys)
        namespace.counters.removed += num_removed
        return num_removed

    def remove_corrupt(self, namespace: StoredNamespace, keys: bytes, slots: bytes) -> None:
        """Remove blocks whose checksum was wrong, which the caller has pinned in these slots. Blocks that were put
        under their keys meanwhile stay."""
        now = self.hold(namespace, keys)
        found = np.unpackbits(np.frombuffer(now.found, np.uint8), bitorder="little")[: len(keys) // KEY_BYTES] == 1
        of_keys = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)[found]
        same = np.frombuffer(now.slots, np.uint64) == np.frombuffer(slots, np.uint64)[found]
        self.release(now.slots)
        namespace.counters.corrupt += self._remove(namespace, of_keys[same].tobytes())

    def _remove(self, namespace: StoredNamespace, keys: bytes) -> int:
        num_removed = self._index.remove(namespace.number, keys)
        self._report_removed()
        return num_removed

    def clear_in_slices(self, namespace: StoredNamespace) -> Slices[int]:
        """Remove as many blocks as the namespace has now. Returns how many were removed."""
        num_removed = yield from self._clear_in_slices(namespace)
        namespace.counters.removed += num_removed
        return num_removed

    def _clear_in_slices(self, namespace: StoredNamespace) -> Slices[int]:
        """Remove as many blocks as the namespace has now. Returns how many were removed. One event reports the blocks
        of all slices; blocks that are stored between two slices have events of their own."""
        left = num_blocks = self._index.stats(namespace.number).num_blocks
        left -= self._index.clear(namespace.number, min(left, CLEARED_BLOCKS))
        self._take_removed()
        if self._journal is not None:
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

    def set_ready(self, num_bytes: int) -> None:
        """Say how much of the memory is there: all at first. Blocks come only there."""
        self._index.set_ready(num_bytes)

    def totals(self) -> IndexStats:
        return self._index.totals()

    def figures(self) -> dict[str, ModelFigures]:
        """Return the figures of each model."""
        return self._namespaces.figures()

    def _report_removed(self) -> None:
        for namespace, keys in self._take_removed():
            if self._journal is not None:
                self._journal.store_changed(StoreChange("removed", namespace.identity, keys))

    def _take_removed(self) -> list[tuple[StoredNamespace, bytes]]:
        """Remember the keys that have left the index since the last call, and return them by namespace."""
        if not (removed := self._index.take_removed()):
            return []
        by_number = {one.number: one for one in self}
        found = [(by_number[number], keys) for number, keys in removed]
        for namespace, keys in found:
            self._ghosts.add(namespace, keys)
        return found


def check_keys(keys: bytes, field: str = "keys") -> int:
    """Return the number of keys. Raises InvalidArgumentError if the bytes are no whole number of keys."""
    if len(keys) % KEY_BYTES:
        raise InvalidArgumentError(f"{len(keys)} bytes, keys have {KEY_BYTES} each", field=field)
    return len(keys) // KEY_BYTES


def chosen(packed: bytes, item_bytes: int, flags: np.ndarray[Any, np.dtype[np.bool_]]) -> bytes:
    """Return the items of a packed array whose flag, bool `[num_items]`, is set."""
    return packed if flags.all() else np.frombuffer(packed, np.uint8).reshape(-1, item_bytes)[flags].tobytes()


# ---- reserved blocks of lost sessions whose clients can write to the memory of the store
#
# A client that was frozen may go on writing after its session has ended. The room of its reserved blocks is therefore
# not used again while a process lives that fetched the memory for writing in that session. Others can store the keys at
# once, in other places. A client that closes its session promises that it has stopped to write: nothing waits then. The
# slots wait also while the daemon restarts.


@dataclass(frozen=True, eq=False)
class _Held:
    reservation_id: int
    namespace: StoredNamespace
    slots: bytes


class Quarantine(WaitingForWriters[_Held]):
    """Reserved slots that are freed after their writers have ended. `abort` frees slots; `condemn` removes their keys,
    after which `release` frees them."""

    def __init__(
        self,
        abort: Callable[[bytes], None],
        condemn: Callable[[bytes], None],
        release: Callable[[bytes], None],
        records: StoreRecords,
    ) -> None:
        super().__init__()
        self._abort, self._condemn, self._release = abort, condemn, release
        self._records = records

    def hold(self, reservation_id: int, namespace: StoredNamespace, slots: bytes, writers: frozenset[int]) -> None:
        """Forget the keys of the slots of a reservation, and free them after all of `writers` have ended: at once if
        none lives."""
        living = self.living(writers)
        if not living:
            self._records.reservations.discard(reservation_id)
            self._abort(slots)
            return
        self._add(_Held(reservation_id, namespace, slots), living)
        self._condemn(slots)

    def restore(
        self,
        reservation_id: int,
        namespace: StoredNamespace,
        reserved: bytes,
        condemned: bytes,
        writers: frozenset[int],
    ) -> bool:
        """Hold slots of the process before, unless all writers have ended. `condemned` slots are leased once, and
        `reserved` ones are not condemned yet. Returns whether the slots are held."""
        living = self.living(writers)
        if living:
            self._add(_Held(reservation_id, namespace, reserved + condemned), living)
            self._condemn(reserved)
        return bool(living)

    def _add(self, held: _Held, writers: set[int]) -> None:
        number = held.namespace.number
        self._records.reservations[held.reservation_id] = ReservationRecord(0, number, tuple(writers), held.slots)
        held.namespace.num_quarantined += len(held.slots) // WORD_BYTES
        self._wait(held, writers)

    def _free(self, held: _Held) -> None:
        held.namespace.num_quarantined -= len(held.slots) // WORD_BYTES
        self._records.reservations.discard(held.reservation_id)
        self._release(held.slots)


# ---- why blocks are missing: counted for the first missing block of each look-up
#
# evicted          it was in this namespace, and has been evicted or removed since
# not_whole        another rank of the same engine has its part, or some groups of K/V caches have theirs
# other_namespace  another namespace has the key: the configuration of the model, vLLM's version or the tenant differ
# never_stored     none of these
#
# Blocks that left are remembered by a ghost list, as in ARC (Megiddo and Modha, FAST 2003), with the hash of a key in
# place of the key: a table of 1,048,576 hashes of 32 bits, 4 MiB of which only the used pages take memory. Each key has
# one place in it, which a later one takes over: after 700,000 more blocks have left, half are forgotten, and count as
# never stored. That a block counts as evicted which was never stored has a probability of 2^-32. The table does not
# outlive the daemon's process.
#
# To hash takes 25 µs a call, and 0.06 µs for each of many keys; to search 32 other namespaces for a missing key, 15 µs
# more.


# The namespaces that are searched for a missing key at most, those that were opened or left last.
MAX_SEARCHED: Final = 32
_PLACE_BITS: Final = 20
_NUM_PLACES: Final = 1 << _PLACE_BITS
_WORD: Final = (1 << 64) - 1
# The finalizer of SplitMix64: the sum alone gives keys that differ in few bits the same places.
_MIX: Final = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)


class GhostKeys:
    """The keys that have left the store, as hashes."""

    def __init__(self) -> None:
        self._tags = np.zeros(_NUM_PLACES, np.uint32)
        # Odd numbers that no client knows, one for each word of a key.
        self._factors = np.frombuffer(secrets.token_bytes(KEY_BYTES), np.uint64) | np.uint64(1)

    def add(self, namespace: StoredNamespace, keys: bytes) -> None:
        places, tags = self._hashes(namespace, keys)
        self._tags[places] = tags

    def have(self, namespace: StoredNamespace, keys: bytes) -> list[bool]:
        """Return a flag for each key."""
        places, tags = self._hashes(namespace, keys)
        flags: list[bool] = (self._tags[places] == tags).tolist()
        return flags

    def _hashes(self, namespace: StoredNamespace, keys: bytes) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]:
        """Return the place and the tag of each key: two parts of its hash."""
        # The identity names the namespace, so that one that gives way and comes back knows its blocks.
        name = np.uint64(hash(namespace.identity) & _WORD)
        words = np.frombuffer(keys, np.uint64).reshape(-1, len(self._factors))
        mixed = ((words ^ name) * self._factors).sum(axis=1, dtype=np.uint64)
        for shift, factor in _MIX:
            mixed = (mixed ^ mixed >> shift) * factor
        tags = (mixed >> np.uint64(12)).astype(np.uint32)
        return mixed >> np.uint64(64 - _PLACE_BITS), np.maximum(tags, np.uint32(1))  # 0 stands for an empty place
