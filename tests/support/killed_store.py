"""A block store in a process that can be killed between any two changes that outlive it."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
from blocks_rig import BLOCK_BYTES, SLAB_BYTES, finish, identity, keys
from manual_clock import ManualClock
from store_rig import address_of, kept_memory, unpack

from kvservice import _ext
from kvservice.store import (
    BlockStore,
    SessionStore,
    StoreConfig,
    StoredNamespace,
    StoreRecords,
    StoreRecovery,
    StoreSections,
    WriterRecord,
    recover,
)


class Killed(BaseException):
    """The process ends here."""


class KillPoint:
    """Ends the process at the n-th change that outlives it, 0: never."""

    def __init__(self) -> None:
        self.left = 0

    def tick(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    @contextlib.contextmanager
    def at(self, count: int) -> Iterator[None]:
        self.left = count
        yield
        self.left = 0


class KilledDict(dict[int, bytes]):
    def __init__(self, point: KillPoint) -> None:
        super().__init__()
        self._point = point

    def __setitem__(self, key: int, value: bytes) -> None:
        self._point.tick()
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        self._point.tick()
        super().__delitem__(key)


class KilledIndex:
    """The native index. A kill within a call is the matter of store_fuzz.cpp."""

    def __init__(self, index: _ext.StoreIndex, point: KillPoint) -> None:
        self._index, self._point = index, point

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._index, name)
        if not callable(value):
            return value

        def call(*arguments: Any) -> Any:
            self._point.tick()
            return value(*arguments)

        return call


class Host:
    """The things that outlive the processes: memory, records, the clock, and the processes of clients."""

    def __init__(self, num_slabs: int) -> None:
        self.num_bytes = num_slabs * SLAB_BYTES
        self.memory = mmap.mmap(-1, self.num_bytes)
        self.kept = kept_memory(self.num_bytes, SLAB_BYTES)
        self.point = KillPoint()
        sections: list[MutableMapping[int, bytes]] = [KilledDict(self.point) for _ in range(6)]
        self.sections = StoreSections(*sections)
        self.clock = self._new_clock(0.0)
        self.living: set[int] = set()

    def _new_clock(self, now: float) -> ManualClock:
        clock = ManualClock()
        clock.now = now
        weakref.finalize(self, clock.close)
        return clock

    def block(self, offset: int) -> np.ndarray:
        """Return the bytes of a block, uint8[BLOCK_BYTES]."""
        return np.frombuffer(self.memory, np.uint8)[offset : offset + BLOCK_BYTES]

    def process(self, session_ids: tuple[int, ...]) -> StoreProcess:
        """Start the next process. These sessions are still there. The timers of the process before are gone."""
        self.clock = self._new_clock(self.clock.now)
        return StoreProcess(self, session_ids)


class StoreProcess:
    def __init__(self, host: Host, session_ids: tuple[int, ...]) -> None:
        self.host = host
        config = StoreConfig(host.num_bytes, host.num_bytes, SLAB_BYTES, 3, host.num_bytes, 60.0, 2)
        index = _ext.StoreIndex(address_of(host.memory), host.num_bytes, SLAB_BYTES, 7, address_of(host.kept))
        self.store = BlockStore(config, KilledIndex(index, host.point), host.clock, None, StoreRecords(host.sections))
        self.sessions = {session_id: SessionStore(self.store, "", session_id) for session_id in session_ids}
        self.recovery: StoreRecovery = recover(self.store, self.sessions, host.living)

    def namespace(self, session_id: int) -> StoredNamespace:
        """Return the namespace of the tests, which the session has open."""
        finish(self.store.make_place(identity()))
        return self.sessions[session_id].open(identity())[1]

    def add_writer(self, session_id: int) -> int:
        """Let a new process of a client write. Returns its name."""
        name = next(self.store.ids)
        self.store.records.writers[name] = WriterRecord(name, 1)
        self.host.living.add(name)
        self.sessions[session_id].add_writer(name)
        return name

    def end_writer(self, name: int) -> None:
        self.host.living.discard(name)
        self.store.quarantine.ended(name)

    def put(self, *numbers: int) -> None:
        """Store blocks as the daemon does itself."""
        namespace = self.namespace(min(self.sessions))
        reserved = self.store.reserve(namespace, keys(*numbers))
        for key, offset in zip(_numbers(reserved.keys), unpack(reserved.offsets), strict=True):
            self.host.block(offset)[:] = content(key)
        self.store.commit(namespace, reserved.slots, reserved.keys, checksums(_numbers(reserved.keys)))

    def found(self, session_id: int, *numbers: int) -> dict[int, tuple[int, int]]:
        """Return the offset and version of each block that is there, by number, after a check of its bytes."""
        pinned = self.store.acquire(self.namespace(session_id), keys(*numbers))
        flags = np.unpackbits(np.frombuffer(pinned.found, np.uint8), count=len(numbers), bitorder="little")
        there = [number for number, flag in zip(numbers, flags, strict=True) if flag]
        places = dict(zip(there, zip(unpack(pinned.offsets), unpack(pinned.versions), strict=True), strict=True))
        for number, (offset, _) in places.items():
            assert np.array_equal(self.host.block(offset), content(number)), f"block {number} has other bytes"
        assert self.store.checksums(pinned.slots) == checksums(there)
        self.store.release(pinned.slots)
        return places

    def end(self) -> None:
        """End all sessions and all clients, and check that nothing is left but blocks and the last id."""
        for own in self.sessions.values():
            own.close()
        for name in sorted(self.host.living):
            self.end_writer(name)
        finish(self.store.check_in_slices())
        totals, sections = self.store.totals(), self.host.sections
        assert (totals.num_leased, totals.num_reserved, len(self.store.quarantine)) == (0, 0, 0)
        assert totals.used_bytes == totals.num_blocks * BLOCK_BYTES
        assert (len(sections.leases), len(sections.reservations), len(sections.session_writers)) == (0, 0, 0)
        assert len(sections.openings) <= 1


def content(number: int) -> np.ndarray:
    """Return the bytes of the block with this key, uint8[BLOCK_BYTES]."""
    return np.full(BLOCK_BYTES // 4, number, np.uint32).view(np.uint8)


def checksums(numbers: list[int]) -> bytes:
    return np.array(numbers, "<u8").tobytes()


def _numbers(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[i : i + 32], "little") for i in range(0, len(packed), 32)]


def killed_everywhere(run: Callable[[int], bool]) -> int:
    """Call `run` with 1, 2, ... until it returns that it was not killed. Returns how often it was."""
    count = 1
    while run(count):
        count += 1
    assert count > 1, "nothing could be killed"
    return count - 1
