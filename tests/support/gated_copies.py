"""Copies of the vLLM connector that a test can hold up, and a GPU whose memory is the host's."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from store_daemons import keys_of

from kvservice import _ext
from kvservice.client import Store

Numbers = npt.NDArray[np.uint64]
BlockIds = npt.NDArray[np.int64]


@dataclass
class HostLock:
    """A page-lock of `HostGpu`, in its `locks` until it is closed."""

    locks: list[HostLock]
    address: int
    num_bytes: int
    read_only: bool

    def close(self) -> None:
        self.locks.remove(self)


@dataclass
class HostSave:
    """A save of `HostGpu`, which has ended."""

    addresses: Numbers
    block_bytes: int

    def synchronize(self) -> None:
        """The copy has ended."""

    def checksums(self) -> Numbers:
        if not len(self.addresses):
            return self.addresses
        lowest = self.addresses.min()
        values = _ext.store_checksums(int(lowest), (self.addresses - lowest).tobytes(), self.block_bytes, 1)
        return np.frombuffer(values, np.uint64)


@dataclass
class HostGpu:
    """Copies blocks of a layout in host memory at once. `refuses`: no memory can be pinned. `broken`: no copy can
    be launched. `lockers` are the threads that have locked memory; none does before `may_lock` is set. `followed` are
    the loads that computations wait for."""

    layout: Any
    locks: list[HostLock] = field(default_factory=list)
    refuses: bool = False
    broken: bool = False
    may_lock: threading.Event = field(default_factory=threading.Event)
    is_locking: threading.Event = field(default_factory=threading.Event)
    lockers: set[int] = field(default_factory=set)
    followed: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.may_lock.set()

    def mark(self) -> None:
        return None

    def follow(self, passing: Any) -> None:
        self.followed.append(passing)

    def load(self, addresses: Numbers, block_ids: BlockIds, mark: object) -> HostGpu:  # noqa: ARG002
        self._copy(addresses, block_ids, to_host=False)
        return self

    def save(self, addresses: Numbers, block_ids: BlockIds, mark: object) -> HostSave:  # noqa: ARG002
        self._copy(addresses, block_ids, to_host=True)
        return HostSave(addresses, self.layout.block_bytes)

    def synchronize(self) -> None:
        """The copy has ended."""

    def wait_for_copies(self) -> None:
        """All copies have ended."""

    def page_lock(self, address: int, num_bytes: int, *, read_only: bool) -> HostLock | None:
        self.is_locking.set()
        assert self.may_lock.wait(60)
        self.lockers.add(threading.get_ident())
        if self.refuses:
            return None
        self.locks.append(HostLock(self.locks, address, num_bytes, read_only))
        return self.locks[-1]

    def _copy(self, addresses: Numbers, block_ids: BlockIds, *, to_host: bool) -> None:
        if self.broken:
            raise RuntimeError("the fake GPU is broken")
        layout = self.layout
        for address, block_id in zip(addresses.tolist(), block_ids.tolist(), strict=True):
            assert any(lock.address <= address < lock.address + lock.num_bytes for lock in self.locks)
            for memory, start, stride, size in zip(
                layout.memories, layout.starts, layout.strides, layout.piece_bytes, strict=True
            ):
                piece = memory.data_ptr() + start + block_id * stride
                target, source = (address, piece) if to_host else (piece, address)
                ctypes.memmove(target, source, size)
                address += size


class Gate:
    """A GPU whose copies do not end before the gate is opened. `held_up` is set when one waits."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.num_started = 0
        self.held_up, self.open = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def load(self, *arguments: Any, **options: Any) -> GatedCopy:
        self.num_started += 1
        return GatedCopy(self, self._gpu.load(*arguments, **options))

    def save(self, *arguments: Any) -> GatedCopy:
        self.num_started += 1
        return GatedCopy(self, self._gpu.save(*arguments))


@dataclass
class GatedCopy:
    gate: Gate
    passing: Any

    def synchronize(self) -> None:
        self.gate.held_up.set()
        assert self.gate.open.wait(60)
        self.passing.synchronize()

    def checksums(self) -> Numbers:
        checksums: Numbers = self.passing.checksums()
        return checksums


class LeakyStore:
    """A store that shows its leases, so that a test can end them behind the copier's back."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.leases: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def acquire(self, keys: bytes) -> Any:
        self.leases.append(self._store.acquire(keys))
        return self.leases[-1]

    def lose(self, *numbers: int) -> None:
        """End all leases, and give the memory of blocks to others."""
        for lease in self.leases:
            lease.release()
        assert self._store.remove(keys_of(*numbers)) == len(numbers)
        others = keys_of(*(number + 1000 for number in numbers))
        block_bytes = self._store.namespace.block_bytes
        self._store.put(others, np.full((len(numbers), block_bytes), 255, np.uint8))
