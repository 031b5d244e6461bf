"""A block store of the client in this process: a dict. It can be away, and its calls can be held up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvservice.client import Lookup, PutStatus, Scatter
from kvservice.client.store.values import Keys, SharedUses, split_keys
from kvservice.errors import InternalError
from kvservice.integrations.vllm.steps import LeasedBlocks


class FakeMemory:
    """The memory of a fake store, mapped for reading only. The offset of a block is the number of its key."""

    tells_all = writable = False
    num_slabs = 0

    def __init__(self, store: FakeStore) -> None:
        self._store = store
        self.identity = (0, id(store.values))

    def find(self, _keys: bytes, *, max_age_s: float = 0.0) -> None:
        """The daemon is asked."""

    def lease(self, _keys: bytes, *, leading_only: bool = False, max_age_s: float = 0.0) -> None:
        """The daemon is asked."""

    def look(self) -> None:
        """Nothing is seen."""

    def unchanged(self, _offsets: bytes, versions: bytes) -> npt.NDArray[np.bool_]:
        return np.array([version not in self._store.broken_leases for version in np.frombuffer(versions, "u8")])

    def read(self, offsets: bytes, versions: bytes, out: Any) -> npt.NDArray[np.bool_]:
        self._store._called("read")
        keys = [self._store.numbered[number] for number in np.frombuffer(offsets, np.uint64).tolist()]
        right = self._store._copy(keys, out)
        return right & np.array([version not in self._store.broken_leases for version in np.frombuffer(versions, "u8")])


class FakeLease:
    """`offsets` and `versions` are the numbers of the keys."""

    def __init__(self, store: FakeStore, packed: Keys) -> None:
        keys = listed(packed)
        self.store, self.keys = store, [key for key in keys if key in store.values]
        self.found = np.array([key in store.values for key in keys], np.bool_)
        self.alive = True
        self.offsets = self.versions = np.array([store.number(key) for key in self.keys], np.uint64).tobytes()
        store.leased += self.keys

    def renew(self, **_: Any) -> bool:
        self.store._called("renew")
        return self.alive

    def __enter__(self) -> FakeLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        for key in self.keys:
            self.store.leased.remove(key)
        self.keys = []


class FakeStore:
    """`values` are the blocks by key, the most recently used last: in each call the first key. `below` are those of a
    tier from which a block comes in a second: a call that waits long enough brings it up. `damaged` are the keys whose
    checksum is wrong. `away`: nothing is found and nothing stored. `broken`: every call fails. `calls` are the names of
    the calls made, and `waits_s` the waits that look-ups ask about. `is_mapped`: its memory is, see FakeMemory. A store
    with the same `values` has the same memory. `broken_leases` are the numbers of blocks that change while leased.
    `uses` are those that were reported."""

    numbered: ClassVar[list[bytes]] = []

    def __init__(self, values: dict[bytes, bytes] | None = None) -> None:
        self.values = {} if values is None else values
        self.below: dict[bytes, bytes] = {}
        self.damaged: set[bytes] = set()
        self.leased: list[bytes] = []
        self.calls: list[str] = []
        self.waits_s: list[float] = []
        self.away = self.broken = self.closed = False
        self.is_mapped = True
        self.broken_leases: set[int] = set()
        self.uses = SharedUses()
        self._memory = FakeMemory(self)
        self._held: tuple[str, ...] = ()
        self._free = threading.Event()
        self._free.set()
        self.waiting = threading.Event()

    @contextmanager
    def held_up(self, *names: str) -> Iterator[None]:
        """Calls of these names, without names of get and put, wait until the end of the block; "bring up": those that
        bring blocks up. `waiting` is set when one waits."""
        self._held = names or ("get", "put")
        self._free.clear()
        self.waiting.clear()
        try:
            yield
        finally:
            self._free.set()

    @property
    def memory(self) -> FakeMemory | None:
        return self._memory if self.is_mapped and not self.away else None

    @property
    def reachable(self) -> bool:
        return not self.away

    def lease_of(self, keys: Keys) -> LeasedBlocks:
        """Return what the scheduler's side tells the workers after it has leased blocks."""
        lease = self.acquire(keys)
        return LeasedBlocks(self._memory.identity, lease.offsets, lease.versions)

    def number(self, key: bytes) -> int:
        if key not in self.numbered:
            self.numbered.append(key)
        return self.numbered.index(key)

    def lookup(self, packed: Keys, *, max_wait_s: float = 0.0, **_: Any) -> Lookup:
        self._called("lookup")
        keys = listed(packed)
        self.waits_s.append(max_wait_s)
        if self.away:
            return Lookup.of(np.zeros(len(keys), np.bool_), 0)
        num_in_memory = next((n for n, key in enumerate(keys) if key not in self.values), len(keys))
        in_time = self._in_time(keys, max_wait_s)
        return Lookup.of(np.array([key in self.values or key in in_time for key in keys], np.bool_), num_in_memory)

    def get(
        self, packed: Keys, out: Scatter, *, verify: bool = False, max_wait_s: float = 0.0, **_: Any
    ) -> npt.NDArray[np.bool_]:
        self._called("get")
        keys = listed(packed)
        self._bring_up(keys, max_wait_s)
        return self._copy(keys, out, self.damaged if verify else set())

    def _copy(self, keys: Sequence[bytes], out: Any, missing: set[bytes] = frozenset()) -> npt.NDArray[np.bool_]:  # type: ignore[assignment]
        found = np.array([key in self.values and key not in missing and not self.away for key in keys], np.bool_)
        for row, key in enumerate(keys):
            if found[row]:
                data = np.frombuffer(self.values[key], np.uint8)
                for piece in pieces(out, row):
                    piece[:], data = data[: len(piece)], data[len(piece) :]
        return found

    def put(self, packed: Keys, values: Scatter) -> npt.NDArray[Any]:
        self._called("put")
        keys = listed(packed)
        statuses = np.full(len(keys), PutStatus.UNREACHABLE if self.away else PutStatus.PRESENT, np.uint8)
        if not self.away:
            for row, key in reversed(list(enumerate(keys))):
                if key not in self.values:
                    self.values[key] = b"".join(piece.tobytes() for piece in pieces(values, row))
                    statuses[row] = PutStatus.DONE
        return statuses

    def acquire(self, packed: Keys, *, max_wait_s: float = 0.0, leading_only: bool = False, **_: Any) -> FakeLease:
        self._called("acquire")
        keys = listed(packed)
        if self._in_time(keys, max_wait_s):
            self._hold_up("bring up")
        self._bring_up(keys, max_wait_s)
        lease = FakeLease(self, keys)
        if leading_only and not lease.found.all():
            lease.release()
            lease = FakeLease(self, keys[: int(lease.found.argmin())])
            lease.found = np.arange(len(keys)) < len(lease.found)
        return lease

    def touch(self, packed: Keys, *, uses: SharedUses | None = None) -> int:
        if uses is not None:
            for name in ("hits", "misses", "read", "missing", "not_whole"):
                setattr(self.uses, name, getattr(self.uses, name) + getattr(uses, name))
            self.uses.engine = uses.engine or self.uses.engine
        keys = listed(packed)
        if not keys:
            return 0
        self._called("touch")
        there = [key for key in reversed(keys) if key in self.values]
        for key in there:
            self.values[key] = self.values.pop(key)
        return len(there)

    def close(self) -> None:
        self.closed = True

    def _in_time(self, keys: Sequence[bytes], max_wait_s: float) -> list[bytes]:
        most = int(max_wait_s) if max_wait_s else len(keys)
        return [key for key in keys if key in self.below and key not in self.values][:most]

    def _bring_up(self, keys: Sequence[bytes], max_wait_s: float) -> None:
        for key in self._in_time(keys, max_wait_s):
            self.values[key] = self.below[key]

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.broken:
            raise InternalError("the fake store is broken")
        self._hold_up(name)

    def _hold_up(self, name: str) -> None:
        if name in self._held and not self._free.is_set():
            self.waiting.set()
            assert self._free.wait(60)


def pieces(places: Any, row: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the pieces of one block of a Scatter, or of an array uint8[num_blocks, block_bytes]."""
    if not isinstance(places, Scatter):
        yield np.asarray(places)[row]
        return
    bases = [places.base] * len(places.piece_bytes) if isinstance(places.base, np.ndarray) else places.base
    for base, offset, size in zip(bases, np.asarray(places.offsets)[row], places.piece_bytes, strict=True):
        yield np.asarray(base)[offset : offset + size]


def listed(keys: Keys) -> list[bytes]:
    return split_keys(keys) if isinstance(keys, bytes) else list(keys)
