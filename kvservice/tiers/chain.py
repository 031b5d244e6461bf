"""The block store and the tiers below it, as one.

lookup     memory ─▶ the tiers, in order, for what is missing
bring_up   the same ─▶ room reserved in memory ─▶ read from the tier ─▶ committed ─▶ pinned for the caller
put        pinned in memory ─▶ written to the tiers; `write_behind` does it in the background
remove     memory, reads in progress, all tiers
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvservice.store import BlockStore, LeaseClock, StoredNamespace
from kvservice.store.index import KEY_BYTES
from kvservice.store.store import Pinned, chosen
from kvservice.tiers.links import Flags, Link, Removal, Removals, WritePolicy, admission_of, flags_of, wait_for_all
from kvservice.tiers.measured import MeasuredTier
from kvservice.tiers.protocol import LowerTier, Space, TierStats, Values, space_of
from kvservice.tiers.reads import Read, Reads, split_keys
from kvservice.tiers.write_behind import WriteBehind


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
                await wait_for_all(self._clock, [read.settled for read in reads], until - self._clock.time())
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
