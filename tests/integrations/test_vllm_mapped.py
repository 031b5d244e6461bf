"""Copies between the vLLM connector's blocks and the mapped memory of a store. The GPU is a fake in host memory."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from each_row import each_row
from gated_copies import Gate, HostGpu, LeakyStore
from store_daemons import SMALL_STORE, OpenStore, keys_of, new_namespace, store_daemon
from waiting import until

from kvservice.client import KVClient, PutStatus, Store
from kvservice.integrations.vllm.copies import HostCopier, block_layout
from kvservice.integrations.vllm.gpu_copies import IN_FLIGHT, MappedCopier, PageLocks
from kvservice.integrations.vllm.steps import LeasedBlocks
from kvservice.launch import Daemon

__all__ = ["store_daemon"]

NUM_BLOCKS = 64
DONE, UNREACHABLE = PutStatus.DONE, PutStatus.UNREACHABLE


class Rig:
    """Two layers whose K and V are apart: four pieces in a block of 2 KiB. `staged` copies if the GPU cannot."""

    def __init__(self, *, verify: bool = False) -> None:
        self.layers = {str(n): torch.randn(2, NUM_BLOCKS, 16, 2, 8).half() for n in range(2)}
        self.saved = {name: layer.clone() for name, layer in self.layers.items()}
        self.layout = block_layout(self.layers, NUM_BLOCKS)
        self.gpu = HostGpu(self.layout)
        self.gate = Gate(self.gpu)
        self.gate.open.set()
        self.staged = HostCopier(self.layout, verify=verify)
        self.copier = MappedCopier(self.gate, self.staged, verify=verify)

    @contextlib.contextmanager
    def store(self, daemon: Daemon, *, locked: bool = True) -> Iterator[Store]:
        """Open a store, and wait until its memory is locked."""
        namespace = new_namespace(self.layout.block_bytes)
        with KVClient(daemon.address) as client, client.store(namespace, timeout_s=30.0) as store:
            self.use(store)
            if locked:
                self.wait_for_locks(store)
            yield store
            self.copier.close()
            assert self.gpu.locks == []

    def use(self, store: Store) -> None:
        self.copier.use(store.memory)

    def wait_for_locks(self, store: Store) -> None:
        memory = store.memory
        if memory is not None and not self.gpu.refuses:
            slabs = {memory.address + n * memory.slab_bytes for n in range(memory.num_slabs)}
            until(lambda: {lock.address for lock in self.gpu.locks} == slabs)

    def save(self, store: Store | LeakyStore, *numbers: int) -> list[int]:
        return self.copier.put(store, b"".join(keys_of(*numbers)), np.array(numbers), None).result(60).tolist()

    def load(self, store: Store | LeakyStore, numbers: list[int], into: list[int]) -> list[bool]:
        return self.copier.get(store, b"".join(keys_of(*numbers)), np.array(into), None).result(60).tolist()

    def read(self, store: Store | LeakyStore, numbers: list[int], into: list[int]) -> Callable[[], list[bool]]:
        """Begin to load blocks that somebody else has leased, for a step."""
        lease, memory = store.acquire(b"".join(keys_of(*numbers))), store.memory
        assert memory is not None
        self.lease = lease
        end = self.copier.read(memory, LeasedBlocks(memory.identity, lease.offsets, lease.versions), np.array(into))
        return lambda: end.wait().tolist()

    def clear(self) -> None:
        for layer in self.layers.values():
            layer.zero_()

    def equal(self, block: int, saved: int) -> bool:
        return all(torch.equal(layer[:, block], self.saved[name][:, saved]) for name, layer in self.layers.items())


def assert_saved_blocks_are_loaded(daemon: Daemon, share: str, refuses: bool, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.gpu.refuses = refuses
    caplog.clear()
    with rig.store(daemon) as store:
        assert rig.save(store, 1, 2, 3) == [DONE] * 3
        rig.clear()
        assert store.get(keys_of(1, 2), np.empty((2, rig.layout.block_bytes), np.uint8), verify=True).all()
        assert rig.load(store, [2, 9, 3], [40, 41, 42]) == [True, False, True]
        assert (rig.equal(40, 2), rig.equal(42, 3)) == (True, True)
        assert not any(layer[:, [1, 2, 3, 41]].any() for layer in rig.layers.values())
        assert {lock.read_only for lock in rig.gpu.locks} == (
            {share == "read"} if share != "off" and not refuses else set()
        )
        if share != "off":
            rig.clear()
            assert rig.read(store, [3, 1], [44, 45])() == [True, True]
            assert (rig.equal(44, 3), rig.equal(45, 1)) == (True, True)
            assert len(rig.gpu.followed) == (not refuses)
            assert rig.lease.renew()
        assert ("cannot be page-locked" in caplog.text) == (share != "off" and refuses)


def test_saved_blocks_are_loaded_whatever_the_store_allows(
    store_daemon: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    with each_row() as row:
        for share in ("write", "read", "off"):
            for refuses in (False, True):
                with row((share, refuses)):
                    assert_saved_blocks_are_loaded(store_daemon(share), share, refuses, caplog)


def test_damaged_blocks_are_found_if_loads_are_verified(store_daemon: OpenStore) -> None:
    rig = Rig(verify=True)
    with rig.store(store_daemon("write")) as store:
        rig.save(store, 1, 2)
        with store.acquire(keys_of(2)) as lease:
            (address,) = lease.addresses.tolist()
            ctypes.memset(address, 255, 1)
        assert rig.load(store, [1, 2], [40, 41]) == [True, False]


def test_blocks_that_others_have_stored_keep_their_status(store_daemon: OpenStore) -> None:
    rig = Rig()
    with rig.store(store_daemon("write")) as store:
        rig.save(store, 2)
        assert rig.save(store, 1, 2) == [DONE, PutStatus.PRESENT]


def test_a_block_whose_lease_ends_during_the_copy_is_wrong(store_daemon: OpenStore) -> None:
    rig = Rig()
    with rig.store(store_daemon("write")) as store:
        rig.save(store, 1, 2, 3)
        leaky = LeakyStore(store)
        rig.gate.open.clear()
        loaded = rig.copier.get(leaky, b"".join(keys_of(1, 2, 3)), np.array([40, 41, 42]), None)
        assert rig.gate.held_up.wait(60)
        leaky.lose(2)
        rig.gate.open.set()
        assert loaded.result(60).tolist() == [True, False, True]
        assert (rig.equal(40, 1), rig.equal(42, 3)) == (True, True)


def test_copies_overlap_and_their_room_is_limited(store_daemon: OpenStore) -> None:
    rig = Rig()
    with rig.store(store_daemon("write")) as store:
        rig.gate.open.clear()
        saved = [rig.copier.put(store, b"".join(keys_of(n)), np.array([n]), None) for n in range(IN_FLIGHT)]
        assert not any(each.done() for each in saved)
        with ThreadPoolExecutor(1) as thread:
            another = thread.submit(rig.save, store, IN_FLIGHT)
            assert wait([another], 0.2).not_done
            assert rig.gate.num_started == IN_FLIGHT
            assert not store.lookup(keys_of(0)).num_leading
            rig.gate.open.set()
            assert [each.result(60).tolist() for each in saved] == [[DONE]] * IN_FLIGHT
            assert another.result(60) == [DONE]


def test_what_cannot_be_launched_holds_nothing(store_daemon: OpenStore) -> None:
    rig = Rig()
    with rig.store(store_daemon("write")) as store:
        rig.save(store, 1)
        rig.gpu.broken = True
        with pytest.raises(RuntimeError, match="broken"):
            rig.save(store, 2)
        leaky = LeakyStore(store)
        with pytest.raises(RuntimeError, match="broken"):
            rig.load(leaky, [1], [40])
        rig.gpu.broken = False
        assert not leaky.leases[0].renew()
        assert rig.save(store, 2) == [DONE]
        assert rig.load(store, [1, 2], [40, 41]) == [True, True]


def test_a_daemon_that_is_killed_during_copies_leaves_loads_right_and_saves_undone() -> None:
    rig = Rig()
    with Daemon(**SMALL_STORE | {"share_store": "write"}) as daemon, rig.store(daemon) as store:
        rig.save(store, 1)
        rig.gate.open.clear()
        loaded = rig.copier.get(store, b"".join(keys_of(1)), np.array([40]), None)
        saved = rig.copier.put(store, b"".join(keys_of(2)), np.array([2]), None)
        assert rig.gate.held_up.wait(60)
        daemon.process.kill()
        daemon.process.wait()
        rig.gate.open.set()
        assert loaded.result(60).tolist() == [True]
        assert rig.equal(40, 1)
        assert saved.result(60).tolist() == [UNREACHABLE]
        # The client unmaps the memory of the dead daemon, and loads become misses.
        until(lambda: not store.reachable)
        assert rig.load(store, [1], [41]) == [False]
        rig.use(store)
        until(lambda: rig.gpu.locks == [])


def test_another_mapping_is_locked_anew(store_daemon: OpenStore) -> None:
    rig = Rig()
    with rig.store(store_daemon("read")) as first, rig.store(store_daemon("write"), locked=False) as second:
        for store in (second, first):
            store.put(keys_of(7), torch.full((1, rig.layout.block_bytes), 7, dtype=torch.uint8))
            rig.use(store)
            rig.wait_for_locks(store)
            rig.gate.num_started = 0
            assert rig.load(store, [7], [40]) == [True]
            assert rig.gate.num_started == 1


def test_nothing_waits_for_locks(store_daemon: OpenStore) -> None:
    """What is not locked yet takes the other way. A thread locks, those slabs first that are asked for."""
    rig = Rig()
    rig.gpu.may_lock.clear()
    with rig.store(store_daemon("write"), locked=False) as store:
        assert rig.save(store, 1, 2) == [DONE] * 2
        rig.clear()
        assert rig.load(store, [1], [40]) == [True]
        assert rig.read(store, [2], [41])() == [True]
        assert (rig.equal(40, 1), rig.equal(41, 2)) == (True, True)
        assert (rig.gate.num_started, rig.gpu.lockers) == (0, set())
        with store.acquire(keys_of(1)) as lease:
            memory = lease.memory
            slab = (int(lease.addresses[0]) - memory.address) // memory.slab_bytes
        rig.gpu.may_lock.set()
        rig.wait_for_locks(store)
        order = [(lock.address - memory.address) // memory.slab_bytes for lock in rig.gpu.locks]
        # The thread had begun with the first.
        assert slab in order[:2]
        assert rig.load(store, [1], [42]) == [True]
        assert rig.gate.num_started == 1
        assert len(rig.gpu.lockers) == 1
        assert threading.get_ident() not in rig.gpu.lockers


def test_slabs_are_locked_when_they_are_there() -> None:
    """Locking allocates what is not, which is the daemon's to do."""
    rig, there = Rig(), {0, 1}
    memory = SimpleNamespace(address=1 << 20, num_slabs=4, slab_bytes=1 << 12, writable=True)
    memory.has_slab = there.__contains__
    locks = PageLocks(rig.gpu)
    locks.use(memory)
    until(lambda: len(rig.gpu.locks) == 2)
    assert not locks.complete
    there |= {2, 3}
    until(lambda: locks.complete)
    assert [lock.address for lock in rig.gpu.locks] == [(1 << 20) + slab * (1 << 12) for slab in range(4)]
    locks.close()
    assert rig.gpu.locks == []


def test_memory_stays_locked_while_a_copy_is_launched_which_holds_up_no_other() -> None:
    rig, addresses = Rig(), np.array([1 << 20], np.uint64)
    memory = SimpleNamespace(address=1 << 20, num_slabs=2, slab_bytes=1 << 12, writable=True, has_slab=lambda _: True)
    locks = PageLocks(rig.gpu)
    locks.use(memory)
    until(lambda: locks.complete)

    def is_covered() -> bool:
        with locks.covering(memory, addresses) as locked:
            return locked

    with locks.covering(memory, addresses) as locked, ThreadPoolExecutor(1) as thread:
        assert locked
        assert thread.submit(is_covered).result(60)
        locks.use(None)
        until(lambda: not is_covered())
        assert len(rig.gpu.locks) == 2
    until(lambda: rig.gpu.locks == [])
    locks.close()


def test_locking_stops_when_vllm_ends(store_daemon: OpenStore) -> None:
    rig = Rig()
    rig.gpu.may_lock.clear()
    with rig.store(store_daemon("write"), locked=False):
        assert rig.gpu.is_locking.wait(60)
        with ThreadPoolExecutor(1) as thread:
            closed = thread.submit(rig.copier.close)
            rig.gpu.may_lock.set()
            closed.result(60)
        assert rig.gpu.locks == []
        assert len(rig.gpu.lockers) == 1


def test_a_step_checks_its_load_when_it_has_ended(store_daemon: OpenStore) -> None:
    rig = Rig()
    with rig.store(store_daemon("write")) as store:
        rig.save(store, 1, 2, 3)
        leaky = LeakyStore(store)
        rig.gate.open.clear()
        end = rig.read(leaky, [1, 2, 3], [40, 41, 42])
        with ThreadPoolExecutor(1) as thread:
            right = thread.submit(end)
            assert rig.gate.held_up.wait(60)
            leaky.lose(2)
            rig.gate.open.set()
            assert right.result(60) == [True, False, True]
        assert (rig.equal(40, 1), rig.equal(42, 3)) == (True, True)
