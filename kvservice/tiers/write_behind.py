"""Writes values to the tiers before they are evicted from memory.

cold    Room for the next values is kept ready: the coldest values are offered to the tiers while they are still in
        memory. A reservation never waits for that; what comes too fast for the tiers is evicted without.
soon    Tiers that others read too get values when these are stored, or put again. What such a tier has already is asked
        each time: it may have lost a value meanwhile, and others may have removed it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kvservice.store import BlockStore, LeaseClock, StoredNamespace
from kvservice.store.index import KEY_BYTES
from kvservice.store.store import Offered, chosen
from kvservice.tiers.links import Link, flags_of, wait_for_all
from kvservice.tiers.protocol import Space, Values
from kvservice.tiers.reads import CHUNK_BYTES, MAX_CHUNK_VALUES, split_keys

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
        free_bytes = self._store.num_free_slabs * namespace.blocks_per_slab * namespace.block_bytes
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
        # Keys that wait, with the number of their namespace.
        self._names: set[tuple[int, bytes]] = set()

    def __len__(self) -> int:
        """The number of batches."""
        return len(self._batches)

    def add(self, namespace: StoredNamespace, keys: bytes) -> int:
        """Add keys. Returns how many had no place."""
        new = [key for key in dict.fromkeys(split_keys(keys)) if (namespace.number, key) not in self._names]
        room = MAX_QUEUED_KEYS - len(self._names)
        some = new[:room]
        most = min(MAX_CHUNK_VALUES, max(1, self._batch_bytes // namespace.block_bytes))
        self._batches.extend((namespace, some[first : first + most]) for first in range(0, len(some), most))
        self._names.update((namespace.number, key) for key in some)
        return len(new) - len(some)

    def take(self) -> tuple[StoredNamespace, bytes]:
        """Remove the batch that has waited longest."""
        namespace, keys = self._batches.popleft()
        self._names.difference_update((namespace.number, key) for key in keys)
        return namespace, b"".join(keys)
