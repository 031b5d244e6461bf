"""Quarantine: what a process may still write after its session is lost waits for the end of that process.

A process that writes to mapped memory may be stopped in the middle: by a signal, a debugger, or with its machine. When
it goes on, it writes first, and notices later that its session was lost.

In the pool it may write the slots of its steps. These are slots of tokens that are not computed, in blocks of sequences
on the device. The prefix index has none of these blocks: whoever opens a step takes them out of it, or copies them. All
else is only read by clients, and written by the daemon: computed tokens, cached and pinned blocks, the swap tier.

To wait is to have a reference. So the block is not allocated, counts for its tenant, and is copied before anybody else
writes it, if the session has another client by now (copy-on-write). A block that waits is none that a later client of
the session may write, so each block waits once.
"""

from __future__ import annotations

import itertools
import logging
import struct
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np

from kvservice.blocks.plans import BoolArray, Int64Array
from kvservice.blocks.pool import CachingBlockPool
from kvservice.errors import ResourceExhaustedError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_NO_BLOCKS: Final = np.zeros(0, np.int64)
_SIZES: Final = struct.Struct("<II")


class WaitingForWriters(ABC, Generic[T]):
    """Items that wait for the end of processes. A process has a name, a number that no other process ever has."""

    def __init__(self) -> None:
        self._living: set[int] = set()
        self._waiting: list[tuple[T, set[int]]] = []

    @abstractmethod
    def _free(self, item: T) -> None:
        """Free an item whose last writer has ended."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[T]:
        return (item for item, _ in self._waiting)

    def began(self, writer: int) -> None:
        """Note a process that can write from now on."""
        self._living.add(writer)

    def living(self, writers: Collection[int]) -> set[int]:
        """Return those of these processes that have not ended. A process that was killed has usually ended before its
        session is."""
        return self._living.intersection(writers)

    def waited_for(self) -> set[int]:
        """Return the processes for which something waits."""
        return set[int]().union(*(writers for _, writers in self._waiting))

    def _wait(self, item: T, writers: set[int]) -> None:
        """Let an item wait for processes that live, at least one."""
        self._waiting.append((item, writers))

    def ended(self, writer: int) -> None:
        """Free what waited for this process only."""
        self._living.discard(writer)
        for _, writers in self._waiting:
            writers.discard(writer)
        freed = [item for item, writers in self._waiting if not writers]
        self._waiting = [(item, writers) for item, writers in self._waiting if writers]
        for item in freed:
            self._free(item)


@dataclass(frozen=True, eq=False)
class KeptWriters:
    """The processes that fetched the pool for writing in a session, and its tenant, if the daemon has several. In
    quarantine: those that `blocks` int64[n] wait for; else there are no blocks."""

    tenant: str
    writers: frozenset[int]
    blocks: Int64Array

    def pack(self) -> bytes:
        tenant = self.tenant.encode()
        names = struct.pack(f"<{len(self.writers)}Q", *sorted(self.writers))
        return _SIZES.pack(len(tenant), len(self.writers)) + tenant + names + self.blocks.tobytes()

    @staticmethod
    def unpack(data: bytes) -> KeptWriters:
        num_bytes, count = _SIZES.unpack_from(data)
        names = _SIZES.size + num_bytes
        end = names + 8 * count
        writers = frozenset(struct.unpack(f"<{count}Q", data[names:end]))
        return KeptWriters(data[_SIZES.size : names].decode(), writers, np.frombuffer(data[end:], np.int64))


@dataclass(frozen=True, eq=False)
class HeldBlocks:
    """Blocks int64[n] in quarantine, with their tenant, and the key of their record."""

    key: int
    tenant: str
    blocks: Int64Array


class BlockQuarantine(WaitingForWriters[HeldBlocks]):
    """The writers of all sessions, by the number of their namespace, and the blocks that wait for some. Both are kept.

    `held` bool[num_blocks] are the blocks that wait, and `num_blocks` is their number.
    """

    def __init__(
        self, device: CachingBlockPool, sessions: MutableMapping[int, bytes], records: MutableMapping[int, bytes]
    ) -> None:
        super().__init__()
        self.held: BoolArray = np.zeros(device.num_blocks, np.bool_)
        self.num_blocks = 0
        self._device, self._sessions, self._records = device, sessions, records
        self._keys = itertools.count(1)

    # ---- the writers of a session

    def add_writer(self, number: int, tenant: str, writer: int) -> None:
        """Note a process that is about to fetch the pool for writing in a session."""
        self.began(writer)
        writers = frozenset(self.writers(number) | {writer})
        self._sessions[number] = KeptWriters(tenant, writers, _NO_BLOCKS).pack()

    def writers(self, number: int) -> set[int]:
        """Return the processes that live and may write to the sequences of a session."""
        return set() if (record := self._session(number)) is None else self.living(record.writers)

    def forget_writers(self, number: int) -> None:
        """Note that the processes of a session write no more: its client has said so, or what they may write waits."""
        self._sessions.pop(number, None)

    def _session(self, number: int) -> KeptWriters | None:
        data = self._sessions.get(number)
        return None if data is None else KeptWriters.unpack(data)

    # ---- blocks that wait

    def hold(self, number: int, blocks: Int64Array, *, recovering: bool = False) -> tuple[int, set[int]]:
        """Let those of these blocks wait that processes of a session may write, while these live. The caller gives up
        the blocks later. `recovering`: the references of all blocks are derived later. Returns how many blocks wait,
        and for whom."""
        record, writers = self._session(number), self.writers(number)
        blocks = np.unique(blocks[~self._device.indexed[blocks] & ~self.held[blocks]])
        if record is None or not writers or not len(blocks):
            return 0, set()
        if not recovering:
            self._device.incref(blocks)
        key = next(self._keys)
        self._add(HeldBlocks(key, record.tenant, blocks), set(writers))
        try:
            self._records[key] = KeptWriters(record.tenant, frozenset(writers), blocks).pack()
        except ResourceExhaustedError as error:  # the session ends all the same
            logger.warning("%d blocks are in quarantine until the daemon restarts, no longer: %s", len(blocks), error)
        return len(blocks), writers

    def _add(self, held: HeldBlocks, writers: set[int]) -> None:
        self.held[held.blocks] = True
        self.num_blocks += len(held.blocks)
        self._wait(held, writers)

    def _free(self, held: HeldBlocks) -> None:
        self._records.pop(held.key, None)
        self.held[held.blocks] = False
        self.num_blocks -= len(held.blocks)
        self._device.decref(held.blocks)

    # ---- a restart of the daemon

    def recover(self, living: Collection[int]) -> None:
        """Go on after an earlier process, before the pool is recovered: `living` are the writers that have not ended.
        The references are derived then, from `held` and the tables."""
        for writer in living:
            self.began(writer)
        for number in list(self._sessions):
            if not self.writers(number):
                del self._sessions[number]
        self._keys = itertools.count(max(self._records, default=0) + 1)
        for key in list(self._records):
            self._restore(key, KeptWriters.unpack(self._records[key]))

    def _restore(self, key: int, record: KeptWriters) -> None:
        writers = self.living(record.writers)
        # A version that knows no quarantine may have used the blocks meanwhile.
        blocks = record.blocks[~self._device.indexed[record.blocks]]
        if writers and len(blocks):
            self._add(HeldBlocks(key, record.tenant, blocks), writers)
        else:
            del self._records[key]

    def sessions(self) -> list[int]:
        """Return the numbers of the namespaces whose sessions have writers."""
        return list(self._sessions)
