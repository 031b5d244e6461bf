"""Values on their way from a tier into memory. Requests for one value share one read.

reserved ── read, with the right checksum ──▶ committed, leased while a request waits
         ── missing, or removed meanwhile ──▶ free
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvservice.errors import QuotaExceededError
from kvservice.store import BlockStore, StoredNamespace
from kvservice.store.index import KEY_BYTES, WORD_BYTES
from kvservice.store.store import chosen
from kvservice.tiers.measured import MeasuredTier
from kvservice.tiers.protocol import GetResult, Space, Values

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
    """A call of `LowerTier.get`. `settled` is done when no request should wait any longer: the values are in memory,
    or a time limit has passed. `dropped` are the numbers of values that were removed meanwhile."""

    namespace: StoredNamespace
    space: Space
    keys: list[bytes]
    slots: bytes
    offsets: bytes
    settled: asyncio.Future[None]
    dropped: set[int] = field(default_factory=set)
    num_waiting: int = 0
    leased: bytes = b""

    def settle(self) -> None:
        if not self.settled.done():
            self.settled.set_result(None)


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
        try:
            reserved = self._store.reserve(namespace, keys[: most * KEY_BYTES])
        except QuotaExceededError:  # the values stay below the memory
            return
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
                got = await tier.get(read.space, Values(b"".join(read.keys), read.offsets), read.settle)
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
        read.settle()
