"""Removals from a tier, and the writes that they wait for.

A value that is being removed is neither read from the tier nor written to it. If the tier cannot remove it now, this
lasts until it can: the removal is tried again. Removals that were not done are lost with the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvservice.store import LeaseClock
from kvservice.tiers.measured import LIMIT_S, MeasuredTier
from kvservice.tiers.protocol import Space
from kvservice.tiers.reads import split_keys
from kvservice.tiers.waiting import wait_for_all

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
