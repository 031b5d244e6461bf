"""The block store and the tiers below it, as one.

lookup     memory ─▶ the tiers, in order, for what is missing
bring_up   the same ─▶ room reserved in memory ─▶ read from the tier ─▶ committed ─▶ pinned for the caller
put        pinned in memory ─▶ written to the tiers; `WriteBehind` does it in the background
remove     memory, reads in progress, all tiers
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from kvservice.store import BlockStore, LeaseClock, StoredNamespace
from kvservice.store.index import KEY_BYTES
from kvservice.store.store import Offered, Pinned, chosen
from kvservice.tiers.links import (
    CHUNK_BYTES,
    MAX_CHUNK_VALUES,
    Flags,
    Link,
    Read,
    Reads,
    Removal,
    Removals,
    WritePolicy,
    admission_of,
    flags_of,
    split_keys,
    wait_for_all,
)
from kvservice.tiers.measured import MeasuredTier
from kvservice.tiers.protocol import LowerTier, Space, TierStats, Values, space_of


@dataclass(frozen=True)
class _Found:
    """The missing values that are below: flags per key, those of each tier, and the reads in progress."""

    flags: Flags
    in_tier: list[tuple[Link, Flags]]
    reads: set[Read]


class TierChain:
    """All tiers of a daemon. To be used on the event loop."""

    def __init__(
        self,
        store: BlockStore,
        tiers: Sequence[LowerTier],
        clock: LeaseClock,
        policies: Mapping[str, WritePolicy] | None = None,
    ) -> None:
        """`tiers` are in the order in which they are asked: the fastest first. `policies` are by name of the tier."""
        self._store, self._clock = store, clock
        self._links = [_link(tier, clock, (policies or {}).get(tier.name, WritePolicy())) for tier in tiers]
        self._reads = Reads(store)
        self._spaces: WeakKeyDictionary[StoredNamespace, Space] = WeakKeyDictionary()
        self._writes = WriteBehind(store, self._links, self.space, clock)

    def start(self) -> None:
        """Begin to write values to the tiers in the background. To be called in the event loop."""
        self._writes.start()

    def space(self, namespace: StoredNamespace) -> Space:
        """Return the space of a namespace."""
        if (space := self._spaces.get(namespace)) is None:
            space = self._spaces[namespace] = space_of(namespace.identity)
        return space

    # ---- finding

    async def lookup(
        self, namespace: StoredNamespace, keys: bytes, *, max_wait_s: float = 0.0, counted: bool = True
    ) -> Flags:
        """Return which values are in memory or below, bool `[num_keys]`. A value that `bring_up` would not have in
        memory within `max_wait_s` seconds (0: no limit) by measured speeds is not found. Changes nothing."""
        found = self._in_memory(namespace, keys)
        below = await self._find(self.space(namespace), keys, ~found, max_wait_s, counted)
        found |= below.flags
        return found

    async def bring_up(self, namespace: StoredNamespace, keys: bytes, **options: Any) -> Pinned:
        """Bring values into memory that are below, and pin all that are in memory then, until `BlockStore.release`.
        `options` are those of `brought_up`."""
        async with self.brought_up(namespace, keys, **options):
            return self._store.acquire(namespace, keys, bool(options.get("leading_only")))

    @asynccontextmanager
    async def brought_up(
        self,
        namespace: StoredNamespace,
        keys: bytes,
        *,
        leading_only: bool = False,
        max_wait_s: float = 0.0,
        counted: bool = True,
    ) -> AsyncIterator[None]:
        """Bring values into memory that are below. Within the context no value that is in memory is evicted. With
        `leading_only` it stops before the first value that is nowhere. After `max_wait_s` seconds (0: no limit) the
        context begins without the values that are not there yet. `counted`: count hits and misses of the tiers."""
        until = self._clock.time() + max_wait_s if max_wait_s else float("inf")
        space = self.space(namespace)
        held = self._store.hold(namespace, keys)  # to make room must not evict them
        namespace.num_users += 1  # it must not give way meanwhile
        try:
            found = flags_of(held.found, len(keys) // KEY_BYTES)
            below = await self._find(space, keys, ~found, max_wait_s, counted)
            if leading_only and not (leading := np.logical_and.accumulate(found | below.flags)).all():
                keys = keys[: int(leading.sum()) * KEY_BYTES]
            with self._joined(below.reads | self._start(namespace, space, keys, below)) as reads:
                await wait_for_all(self._clock, [read.wait_over for read in reads], until - self._clock.time())
                yield
        finally:
            namespace.num_users -= 1
            self._store.release(held.slots)

    def _in_memory(self, namespace: StoredNamespace, keys: bytes) -> Flags:
        return flags_of(self._store.lookup(namespace, keys, counted=False)[1], len(keys) // KEY_BYTES)

    async def _find(self, space: Space, keys: bytes, missing: Flags, max_wait_s: float, counted: bool) -> _Found:
        """Look for missing values in reads in progress, then in the tiers."""
        flags, left = np.zeros(len(missing), np.bool_), missing.copy()
        reads = set()
        for i in np.flatnonzero(missing) if self._reads else ():
            if (read := self._reads.find(space, keys[i * KEY_BYTES : (i + 1) * KEY_BYTES])) is not None:
                reads.add(read)
                flags[i], left[i] = True, False
        in_tier = []
        for link in self._links:
            if not left.any():
                break
            found = await self._find_in(link, space, keys, left, max_wait_s, counted)
            in_tier.append((link, found))
            flags |= found
            left &= ~found
        return _Found(flags, in_tier, reads)

    async def _find_in(
        self, link: Link, space: Space, keys: bytes, asked: Flags, max_wait_s: float, counted: bool
    ) -> Flags:
        """Return which of the values asked for a tier has, and can deliver in time."""
        indices = np.flatnonzero(asked)
        some = chosen(keys, KEY_BYTES, asked)
        answer = np.frombuffer(await link.tier.lookup(space, some, len(indices)), np.uint8) == 1
        answer &= ~link.removals.bars(space, some)
        if counted:
            link.tier.counters.hits += int(answer.sum())
            link.tier.counters.misses += int((~answer).sum())
        if max_wait_s and (most := link.tier.num_in(max_wait_s, space.block_bytes)) < len(indices):
            answer &= np.cumsum(answer) <= most
        found = np.zeros(len(asked), np.bool_)
        found[indices[answer]] = True
        return found

    def _start(self, namespace: StoredNamespace, space: Space, keys: bytes, below: _Found) -> set[Read]:
        """Begin to read the values among `keys` that tiers have. Returns the reads, also those that others began."""
        reads: set[Read] = set()
        num_keys = len(keys) // KEY_BYTES
        for link, found in below.in_tier:
            some = chosen(keys, KEY_BYTES, found[:num_keys])
            some = chosen(some, KEY_BYTES, ~link.removals.bars(space, some))
            if some:
                self._reads.start(namespace, space, link.tier, some)
                self._writes.wake(len(some) // KEY_BYTES * space.block_bytes)
                reads |= {read for key in split_keys(some) if (read := self._reads.find(space, key)) is not None}
        return reads

    @contextmanager
    def _joined(self, reads: Iterable[Read]) -> Iterator[list[Read]]:
        joined = list(reads)
        for read in joined:
            self._reads.join(read)
        try:
            yield joined
        finally:
            for read in joined:
                self._reads.leave(read)

    # ---- writing

    async def put(self, namespace: StoredNamespace, keys: bytes) -> Flags:
        """Write values that are in memory to all tiers now. Returns which values a tier has now, bool `[num_keys]`."""
        held, space = self._store.hold(namespace, keys), self.space(namespace)
        try:
            found = flags_of(held.found, len(keys) // KEY_BYTES)
            values = Values(chosen(keys, KEY_BYTES, found), held.offsets, self._store.checksums(held.slots))
            stored = np.zeros(len(found), np.bool_)
            for link in self._links:
                stored[found] |= await link.write(self._store, namespace, space, values)
            return stored
        finally:
            self._store.release(held.slots)

    # ---- removing

    async def remove(self, namespace: StoredNamespace, keys: bytes) -> int:
        """Remove values everywhere. Returns how many there were. A tier that does not answer is asked again later,
        and its values are not found until then."""
        space = self.space(namespace)
        unique = b"".join(dict.fromkeys(split_keys(keys)))
        gone = np.logical_not(self._in_memory(namespace, unique))
        num_removed = self._store.remove(namespace, unique)
        removals = self._bar(space, split_keys(unique))
        if gone.any():
            below = chosen(unique, KEY_BYTES, gone)
            found = np.zeros(int(gone.sum()), np.bool_)
            for link in self._links:
                found |= np.frombuffer(await link.tier.lookup(space, below, len(found)), np.uint8) == 1
            num_removed += int(found.sum())
        await _finish(removals)
        return num_removed

    def begin_clear(self, namespace: StoredNamespace) -> list[tuple[Removals, Removal]]:
        """Let no value of a namespace come from below any more, until `finish_clear`."""
        return self._bar(self.space(namespace), None)

    async def finish_clear(self, begun: list[tuple[Removals, Removal]]) -> None:
        """Remove all values of the namespace from the tiers."""
        await _finish(begun)

    def _bar(self, space: Space, keys: list[bytes] | None) -> list[tuple[Removals, Removal]]:
        self._reads.drop(space, keys)
        return [(link.removals, link.removals.begin(space, keys)) for link in self._links]

    # ---- the rest

    def stats(self) -> tuple[TierStats, ...]:
        """Return the figures of each tier, in the order in which they are asked."""
        return tuple(link.tier.stats() for link in self._links)

    def faults(self) -> dict[str, str]:
        """Return by name why tiers are not open, as far as that is known."""
        return {link.tier.stats().name: link.tier.fault for link in self._links if link.tier.fault}

    async def flush(self, limit_s: float) -> None:
        """Write what is in memory, and worth it, to the tiers: for the end of the memory. Takes at most so long."""
        await self._writes.flush(limit_s)

    async def close(self) -> None:
        """End all calls, then close the tiers."""
        await self._writes.close()
        await self._reads.close()
        for link in self._links:
            await link.removals.close()
            await link.tier.close()


def _link(tier: LowerTier, clock: LeaseClock, policy: WritePolicy) -> Link:
    measured = MeasuredTier(tier, clock)
    return Link(measured, Removals(measured, clock), policy, admission_of(policy.rule))


async def _finish(removals: list[tuple[Removals, Removal]]) -> None:
    await asyncio.gather(*(one.finish(removal) for one, removal in removals))


# ---- writes values to the tiers before they are evicted from memory
#
# cold    Room for the next values is kept ready: the coldest values are offered to the tiers while they are still in
#         memory. A reservation never waits for that; what comes too fast for the tiers is evicted without.
# soon    Tiers that others read too get values when these are stored, or put again. What such a tier has already is
#         asked each time: it may have lost a value meanwhile, and others may have removed it.


logger = logging.getLogger(__name__)

# The part of the memory that is free, or has values that were offered to the tiers.
READY_PART: Final = 8
# The pause in seconds between a change of the store and a round, and the pause after which a round runs anyway.
ROUND_S: Final = 0.02
IDLE_S: Final = 1.0
# Batches that are written at once.
BATCHES_AT_ONCE: Final = 2
# Keys that wait to be written soon, for each tier.
MAX_QUEUED_KEYS: Final = 1 << 16


class WriteBehind:
    """The writes of a chain. To be used on the event loop."""

    def __init__(
        self,
        store: BlockStore,
        links: Sequence[Link],
        space_of: Callable[[StoredNamespace], Space],
        clock: LeaseClock,
    ) -> None:
        self._store, self._space_of, self._clock = store, space_of, clock
        self._cold = [link for link in links if not link.policy.soon]
        self._links = links
        # Values that are being written cannot be evicted: they are a small part of the memory at any time.
        self._batch_bytes = min(CHUNK_BYTES, store.config.capacity_bytes // (READY_PART * BATCHES_AT_ONCE))
        self._soon = {link: _Queue(self._batch_bytes) for link in links if link.policy.soon}
        self._turns = asyncio.Semaphore(BATCHES_AT_ONCE)
        self._changed = asyncio.Event()
        self._is_due = False
        # Bytes that came into memory since the last round, and the number of them after which the next one begins.
        self._new_bytes, self._most_new_bytes = 0, store.config.capacity_bytes // READY_PART // 4
        self._writing: set[asyncio.Task[None]] = set()
        # Evictions of values that were not offered, up to the last round.
        self._num_unoffered = store.totals().num_unoffered
        self._running: asyncio.Task[None] | None = None
        store.watcher = self

    # ---- what happens in the store

    def stored(self, namespace: StoredNamespace, keys: bytes) -> None:
        """Note values that were stored by clients."""
        self._add(namespace, keys)
        self.wake(len(keys) // KEY_BYTES * namespace.block_bytes)

    def put_again(self, namespace: StoredNamespace, keys: bytes) -> None:
        """Note values that clients were to store and that are in memory already."""
        if self._soon:
            self._add(namespace, keys)
            self.wake()

    def _add(self, namespace: StoredNamespace, keys: bytes) -> None:
        for link, queue in self._soon.items():
            link.tier.counters.dropped += queue.add(namespace, keys)

    def wake(self, num_bytes: int = 0) -> None:
        """Let a round begin soon, after so many bytes came into memory."""
        self._new_bytes += num_bytes
        if self._new_bytes > self._most_new_bytes:
            self._changed.set()
        elif not self._is_due:
            self._is_due = True
            self._clock.call_later(ROUND_S, self._changed.set)

    # ---- rounds

    def start(self) -> None:
        """Begin to write."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            timer = self._clock.call_later(IDLE_S, self._changed.set)
            await self._changed.wait()
            timer.cancel()
            self._changed.clear()
            self._is_due, self._new_bytes = False, 0
            try:
                await self.round()
            except Exception:
                # A tier that fails raises nothing here, so this is a fault of the daemon's own code. Without further
                # rounds no value would be written any more, and waiting removals would never end.
                logger.exception("values could not be written to the tiers")

    async def round(self) -> None:
        """Tell tiers what they missed while they were away, then write what is to be written now."""
        for link in self._links:
            await link.removals.try_again()
        num_unoffered = self._store.totals().num_unoffered
        for link in self._cold:
            if link.tier.is_available:
                link.tier.counters.dropped += num_unoffered - self._num_unoffered
        self._num_unoffered = num_unoffered
        for link, queue in self._soon.items():
            await self._write_queue(link, queue)
        if any(link.tier.is_available for link in self._cold):
            for namespace in list(self._store):
                await self._offer(namespace, self._num_to_offer(namespace), newest_first=False)

    async def flush(self, limit_s: float) -> None:
        """Offer everything that is in memory, the newest values first, for at most so many seconds."""
        flushing = asyncio.create_task(self._offer_all())
        await wait_for_all(self._clock, [flushing], limit_s)
        flushing.cancel()
        await asyncio.wait({flushing})

    async def close(self) -> None:
        """Wait for the end of writes that have begun, and begin no other."""
        self._store.watcher = None
        await asyncio.sleep(0)  # a task that never began would not release its values
        tasks = set(self._writing)
        if self._running is not None:
            self._running.cancel()
            tasks.add(self._running)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _offer_all(self) -> None:
        for link, queue in self._soon.items():
            await self._write_queue(link, queue)
        if self._cold:
            for namespace in list(self._store):
                await self._offer(namespace, self._store.stats(namespace).num_blocks, newest_first=True)
        while self._writing:
            await asyncio.wait(self._writing)

    def _num_to_offer(self, namespace: StoredNamespace) -> int:
        """Return how many values of a namespace would be evicted, without having been offered, if the next values
        needed a certain part of the memory. A namespace without users may give way as a whole."""
        stats, config = self._store.stats(namespace), self._store.config
        if not namespace.num_users:
            return stats.num_blocks - stats.num_offered
        free_bytes = self._store.num_free_slabs(namespace) * namespace.blocks_per_slab * namespace.block_bytes
        room_bytes = min(free_bytes, namespace.quota_bytes - stats.used_bytes)
        wanted_bytes = config.capacity_bytes // READY_PART - room_bytes
        return -(-wanted_bytes // namespace.block_bytes) - stats.num_offered

    async def _offer(self, namespace: StoredNamespace, count: int, *, newest_first: bool) -> None:
        """Write so many values of a namespace, those that are next to be evicted or the newest ones."""
        size = min(MAX_CHUNK_VALUES, max(1, self._batch_bytes // namespace.block_bytes))
        while count > 0:
            await self._turns.acquire()
            batch = min(count, size) if self._store.has(namespace) else 0
            offered = self._store.coldest(namespace, batch, newest_first=newest_first) if batch else None
            if offered is None or not offered.slots:
                self._turns.release()
                return
            count -= size
            self._begin(namespace, offered, self._cold)

    async def _write_queue(self, link: Link, queue: _Queue) -> None:
        """Write the values that wait now. Those whose removal is not done wait for another round."""
        for _ in range(len(queue)):
            await self._turns.acquire()
            if not queue or not link.tier.is_available:
                self._turns.release()
                return
            namespace, keys = queue.take()
            barred = link.removals.bars(self._space_of(namespace), keys)
            queue.add(namespace, chosen(keys, KEY_BYTES, barred))
            keys = chosen(keys, KEY_BYTES, ~barred)
            if not keys or not self._store.has(namespace):
                self._turns.release()
                continue
            held = self._store.hold(namespace, keys)
            some = chosen(keys, KEY_BYTES, flags_of(held.found, len(keys) // KEY_BYTES))
            self._begin(namespace, Offered(held.slots, some, held.offsets, self._store.checksums(held.slots)), [link])

    def _begin(self, namespace: StoredNamespace, offered: Offered, links: Sequence[Link]) -> None:
        task = asyncio.create_task(self._write(namespace, offered, links))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, namespace: StoredNamespace, offered: Offered, links: Sequence[Link]) -> None:
        """Write pinned values, then unpin them."""
        uses = np.frombuffer(offered.uses, "<u8") if offered.uses else None
        try:
            values = Values(offered.keys, offered.offsets, offered.checksums)
            for link in links:
                if len(values):
                    await link.write(self._store, namespace, self._space_of(namespace), values, uses)
        finally:
            self._store.release(offered.slots)
            self._turns.release()


class _Queue:
    """Keys that wait to be written, each once."""

    def __init__(self, batch_bytes: int) -> None:
        self._batch_bytes = batch_bytes
        self._batches: deque[tuple[StoredNamespace, list[bytes]]] = deque()
        # Keys that wait, with their namespace, whose number another one may have later.
        self._names: set[tuple[StoredNamespace, bytes]] = set()

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def add(self, namespace: StoredNamespace, keys: bytes) -> int:
        """Add keys. Returns how many had no place."""
        new = [key for key in dict.fromkeys(split_keys(keys)) if (namespace, key) not in self._names]
        room = MAX_QUEUED_KEYS - len(self._names)
        some = new[:room]
        most = min(MAX_CHUNK_VALUES, max(1, self._batch_bytes // namespace.block_bytes))
        self._batches.extend((namespace, some[first : first + most]) for first in range(0, len(some), most))
        self._names.update((namespace, key) for key in some)
        return len(new) - len(some)

    def take(self) -> tuple[StoredNamespace, bytes]:
        """Remove the batch that has waited longest."""
        namespace, keys = self._batches.popleft()
        self._names.difference_update((namespace, key) for key in keys)
        return namespace, b"".join(keys)
