"""The tiers of a chain: what is read from each, its removals, and its rules for writing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias

import numpy as np

from kvservice.store import BlockStore, LeaseClock, StoredNamespace
from kvservice.store.index import KEY_BYTES, WORD_BYTES
from kvservice.store.store import chosen
from kvservice.tiers.measured import LIMIT_S, MeasuredTier
from kvservice.tiers.protocol import GetResult, Space, Values

# ---- values on their way from a tier into memory. Requests for one value share one read.
#
# reserved ── read, with the right checksum ──▶ committed, leased while a request waits
#          ── missing, or removed meanwhile ──▶ free


# Bytes of one call of `LowerTier.get`, unless one value is larger, and the most values of it.
CHUNK_BYTES: Final = 16 << 20
MAX_CHUNK_VALUES: Final = 1024
# Calls of `LowerTier.get` that run at once, for each tier. Others wait in order.
CALLS_AT_ONCE: Final = 4
# The part of the memory that may be reserved for reads in progress.
_RESERVED_PART: Final = 2


def split_keys(keys: bytes) -> list[bytes]:
    return [keys[begin : begin + KEY_BYTES] for begin in range(0, len(keys), KEY_BYTES)]


@dataclass(eq=False)
class Read:
    """A call of `LowerTier.get`. `wait_over` is done when no request should wait any longer: the values are in memory,
    or a time limit has passed. `dropped` are the numbers of values that were removed meanwhile."""

    namespace: StoredNamespace
    space: Space
    keys: list[bytes]
    slots: bytes
    offsets: bytes
    wait_over: asyncio.Future[None]
    dropped: set[int] = field(default_factory=set)
    num_waiting: int = 0
    leased: bytes = b""

    def end_wait(self) -> None:
        if not self.wait_over.done():
            self.wait_over.set_result(None)


class Reads:
    """All reads in progress. To be used on the event loop."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._most_bytes = store.config.capacity_bytes // _RESERVED_PART
        self._num_bytes = 0
        # The reads by the digest of the space and the key.
        self._by_key: dict[bytes, Read] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Semaphore] = {}

    def __bool__(self) -> bool:
        """Whether a read is in progress."""
        return bool(self._by_key)

    def find(self, space: Space, key: bytes) -> Read | None:
        """Return the read in progress of a value."""
        return self._by_key.get(space.digest + key)

    def start(self, namespace: StoredNamespace, space: Space, tier: MeasuredTier, keys: bytes) -> None:
        """Begin to read values that the tier has, those for which there is room. The first ones come first."""
        most = max(0, self._most_bytes - self._num_bytes) // space.block_bytes
        most = self._store.num_storable(namespace, min(most, len(keys) // KEY_BYTES))
        reserved = self._store.reserve(namespace, keys[: most * KEY_BYTES])
        size = min(MAX_CHUNK_VALUES, max(1, CHUNK_BYTES // space.block_bytes))
        for first in range(0, len(reserved.slots) // WORD_BYTES, size):
            words = slice(first * WORD_BYTES, (first + size) * WORD_BYTES)
            read = Read(
                namespace,
                space,
                split_keys(reserved.keys[first * KEY_BYTES : (first + size) * KEY_BYTES]),
                reserved.slots[words],
                reserved.offsets[words],
                asyncio.get_running_loop().create_future(),
            )
            self._by_key.update((space.digest + key, read) for key in read.keys)
            self._num_bytes += len(read.keys) * space.block_bytes
            task = asyncio.create_task(self._run(read, tier))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def join(self, read: Read) -> None:
        """Wait for a read: its values are leased as soon as they are in memory, until `leave`."""
        read.num_waiting += 1

    def leave(self, read: Read) -> None:
        """Undo one `join`."""
        read.num_waiting -= 1
        if not read.num_waiting:
            self._store.release(read.leased)
            read.leased = b""

    def drop(self, space: Space, keys: list[bytes] | None) -> None:
        """Forget values that are being read, all of a space if `keys` is None: they were removed."""
        reads = {read for read in self._by_key.values() if read.space.digest == space.digest}
        gone = None if keys is None else set(keys)
        for read in reads:
            found = {i for i, key in enumerate(read.keys) if gone is None or key in gone} - read.dropped
            read.dropped |= found
            # Others may store these keys at once, in other places.
            self._store.condemn(b"".join(read.slots[i * WORD_BYTES : (i + 1) * WORD_BYTES] for i in sorted(found)))
            for i in found:
                del self._by_key[space.digest + read.keys[i]]

    async def close(self) -> None:
        """End all reads."""
        await asyncio.sleep(0)  # a task that never began would not free its room
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _run(self, read: Read, tier: MeasuredTier) -> None:
        got = GetResult(bytes(len(read.keys)), b"")
        try:
            async with self._turns.setdefault(tier.name, asyncio.Semaphore(CALLS_AT_ONCE)):
                got = await tier.get(read.space, Values(b"".join(read.keys), read.offsets), read.end_wait)
        finally:
            self._finish(read, got)

    def _finish(self, read: Read, got: GetResult) -> None:
        """Publish the values that were read, and free the room of the others."""
        dropped: np.ndarray[Any, np.dtype[np.bool_]] = np.zeros(len(read.keys), np.bool_)
        dropped[list(read.dropped)] = True
        found = (np.frombuffer(got.found, np.uint8) == 1) & ~dropped
        if found.any():
            slots = chosen(read.slots, WORD_BYTES, found)
            keys = chosen(b"".join(read.keys), KEY_BYTES, found)
            self._store.commit(read.namespace, slots, keys, chosen(got.checksums, WORD_BYTES, found), counted=False)
            if read.num_waiting:
                self._store.lease(slots)
                read.leased = slots
        self._store.abort(chosen(read.slots, WORD_BYTES, ~found & ~dropped))
        self._store.release(chosen(read.slots, WORD_BYTES, dropped))
        for key in read.keys:
            if self._by_key.get(name := read.space.digest + key) is read:
                del self._by_key[name]
        self._num_bytes -= len(read.keys) * read.space.block_bytes
        read.end_wait()


# ---- which values are worth writing to a tier
#
# The README of this package has the measurements.


Flags: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
Rule: TypeAlias = Literal["all", "reused"]

# Bits of one generation of `SeenKeys`, and the keys after which a new one begins.
_NUM_BITS: Final = 1 << 24
_KEYS_PER_GENERATION: Final = 1 << 20
# Odd numbers that mix the words of a key: there are so many bits for each key.
_MIXERS: Final = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


class AdmissionRule(Protocol):
    def admit(self, keys: bytes, uses: Words) -> Flags:
        """Return which values are worth it, bool `[num_keys]`. `uses` says how often each was used since it was
        stored."""


class AdmitAll:
    """Everything is written."""

    def admit(self, keys: bytes, uses: Words) -> Flags:
        del keys
        return np.ones(len(uses), np.bool_)


class AdmitReused:
    """Values that were used again since they were stored, or are offered once more: they were evicted meanwhile, and
    somebody has computed them again."""

    def __init__(self) -> None:
        self._seen = SeenKeys()

    def admit(self, keys: bytes, uses: Words) -> Flags:
        return (uses > 0) | self._seen.add(keys)


class SeenKeys:
    """A Bloom filter of the last 1 to 2 million keys, in two generations. It takes 4 MiB. A key that was never added is
    found with a probability below 1 in 100."""

    def __init__(self) -> None:
        self._now, self._before = np.zeros(_NUM_BITS // 8, np.uint8), np.zeros(_NUM_BITS // 8, np.uint8)
        self._num_keys = 0

    def add(self, keys: bytes) -> Flags:
        """Add keys. Returns which of them were added before, bool `[num_keys]`."""
        words = np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // 8)
        mixed = np.bitwise_xor.reduce(words * np.array((1, *_MIXERS), np.uint64), axis=1)
        places = np.stack([(mixed * np.uint64(mixer)) >> np.uint64(40) for mixer in _MIXERS])  # 24 bits each
        at, bit = places >> np.uint64(3), np.left_shift(np.uint8(1), (places & np.uint64(7)).astype(np.uint8))
        seen = np.any([np.all(one[at] & bit, axis=0) for one in (self._now, self._before)], axis=0)
        np.bitwise_or.at(self._now, at, bit)
        self._num_keys += words.shape[0]
        if self._num_keys >= _KEYS_PER_GENERATION:
            self._before, self._num_keys = self._now, 0
            self._now = np.zeros_like(self._before)
        flags: Flags = seen.astype(np.bool_)
        return flags


def admission_of(rule: Rule) -> AdmissionRule:
    return AdmitAll() if rule == "all" else AdmitReused()


# ---- waiting with a time limit of an injected clock


async def wait_for_all(clock: LeaseClock, futures: Collection[asyncio.Future[Any]], limit_s: float) -> None:
    """Wait until all futures are done, at most `limit_s` seconds. Cancels none of them."""
    pending = {future for future in futures if not future.done()}
    if not pending:
        return
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(future: asyncio.Future[Any]) -> None:
        pending.discard(future)
        if not pending:
            over.cancel()

    for future in list(pending):
        future.add_done_callback(ended)
    timer = clock.call_later(limit_s, over.cancel) if limit_s < float("inf") else None
    try:
        await asyncio.wait({over})
    finally:
        if timer is not None:
            timer.cancel()
        for future in pending:
            future.remove_done_callback(ended)


# ---- removals from a tier, and the writes that they wait for
#
# A value that is being removed is neither read from the tier nor written to it. If the tier cannot remove it now, this
# lasts until it can: the removal is tried again. Removals that were not done are lost with the process.


# Keys of one space that wait for a tier that cannot remove them. With more, the whole space is cleared instead.
MAX_WAITING_KEYS: Final = 1 << 16


@dataclass(eq=False)
class Removal:
    """Keys that are being removed from a space; None stands for all of them."""

    space: Space
    keys: set[bytes] | None

    def has(self, key: bytes) -> bool:
        return self.keys is None or key in self.keys

    def overlaps(self, write: _Write) -> bool:
        same = self.space.digest == write.space.digest
        return same and (self.keys is None or not self.keys.isdisjoint(write.keys))


@dataclass(eq=False)
class _Write:
    """A call of `LowerTier.put`."""

    space: Space
    keys: frozenset[bytes]
    done: asyncio.Future[None]


class Removals:
    """The removals from one tier."""

    def __init__(self, tier: MeasuredTier, clock: LeaseClock) -> None:
        self._tier, self._clock = tier, clock
        # Removals that are not done. Those that are tried again later are also in `_waiting`, one for each space.
        self._removals: list[Removal] = []
        self._waiting: dict[bytes, Removal] = {}
        self._writes: list[_Write] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def bars(self, space: Space, keys: bytes) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which values must be neither read nor written, bool `[num_keys]`."""
        split = split_keys(keys)
        barred = np.zeros(len(split), np.bool_)
        for removal in self._removals:
            if removal.space.digest == space.digest:
                barred |= np.fromiter((removal.has(key) for key in split), np.bool_, len(split))
        return barred

    @contextmanager
    def writing(self, space: Space, keys: bytes) -> Iterator[None]:
        """Note that values are being written: removals wait for that."""
        write = _Write(space, frozenset(split_keys(keys)), asyncio.get_running_loop().create_future())
        self._writes.append(write)
        try:
            yield
        finally:
            self._writes.remove(write)
            write.done.set_result(None)

    def begin(self, space: Space, keys: list[bytes] | None) -> Removal:
        """Bar values from now on."""
        removal = Removal(space, None if keys is None else set(keys))
        self._removals.append(removal)
        return removal

    async def finish(self, removal: Removal) -> None:
        """Remove the values. If that takes too long, it goes on in the background."""
        task = asyncio.create_task(self._attempt(removal))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        await wait_for_all(self._clock, [task], LIMIT_S)

    async def try_again(self) -> None:
        """Finish the removals that wait, if the tier is there again."""
        while self._waiting and self._tier.is_available:
            _, removal = self._waiting.popitem()
            await self.finish(removal)

    async def close(self) -> None:
        """End all attempts."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _attempt(self, removal: Removal) -> None:
        writes = [write.done for write in self._writes if removal.overlaps(write)]
        if writes:
            await asyncio.wait(writes)
        if removal.keys is None:
            is_done = await self._tier.clear(removal.space)
        else:
            is_done = await self._tier.remove(removal.space, b"".join(removal.keys))
        if is_done:
            self._removals.remove(removal)
        else:
            self._postpone(removal)

    def _postpone(self, removal: Removal) -> None:
        other = self._waiting.setdefault(removal.space.digest, removal)
        if other is not removal:
            self._removals.remove(removal)
            other.keys = None if other.keys is None or removal.keys is None else other.keys | removal.keys
        if other.keys is not None and len(other.keys) > MAX_WAITING_KEYS:
            other.keys = None


# ---- links


@dataclass(frozen=True)
class WritePolicy:
    """Decides when values are written to a tier: those that the rule admits, before they are evicted from memory; with
    `soon`, all of them, when they are stored."""

    rule: Rule = "all"
    soon: bool = False


@dataclass(frozen=True, eq=False)
class Link:
    """A tier of the chain."""

    tier: MeasuredTier
    removals: Removals
    policy: WritePolicy
    admission: AdmissionRule

    async def write(
        self,
        store: BlockStore,
        namespace: StoredNamespace,
        space: Space,
        values: Values,
        uses: Words | None = None,
    ) -> Flags:
        """Write values, which the caller has pinned, except those that were removed meanwhile. With `uses`, only those
        that the rule admits. Returns which ones the tier has now, bool `[num_values]`: none of a namespace whose values
        must not outlive the daemon."""
        if not namespace.identity.outlives_daemon:
            return np.zeros(len(values), np.bool_)
        # A removal that begins meanwhile ends after this: otherwise these bytes could follow it, after a slow lookup.
        with self.removals.writing(space, values.keys):
            return await self._write(store, namespace, space, values, uses)

    async def _write(
        self, store: BlockStore, namespace: StoredNamespace, space: Space, values: Values, uses: Words | None
    ) -> Flags:
        known = await self.tier.lookup(space, values.keys, len(values))
        stored: Flags = np.frombuffer(known, np.uint8) == 1
        wanted = ~stored & ~self.removals.bars(space, values.keys)
        wanted &= flags_of(store.lookup(namespace, values.keys, counted=False)[1], len(values))
        if uses is not None and wanted.any():
            admitted = self.admission.admit(chosen(values.keys, KEY_BYTES, wanted), uses[wanted])
            self.tier.counters.refused += int((~admitted).sum())
            wanted[wanted] = admitted
        if wanted.any():
            some = Values(*(chosen(packed, len(packed) // len(values), wanted) for packed in vars(values).values()))
            stored[wanted] = np.frombuffer(await self.tier.put(space, some), np.uint8) == 1
        return stored


def flags_of(bitmap: bytes, count: int) -> Flags:
    """Return the first `count` bits of a bitmap, the lowest bit of a byte first."""
    flags: Flags = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=count, bitorder="little").astype(np.bool_)
    return flags
