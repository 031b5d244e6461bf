"""Copies of K/V on a GPU, in the layouts of vLLM's GPU backends, to and from a store."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from fake_store import FakeStore
from gated_copies import Gate, LeakyStore
from store_daemons import SMALL_STORE, OpenStore, keys_of, new_namespace
from waiting import until

from kvservice import _ext
from kvservice.bench.cuda_store import LAYOUTS, Model, check_equal
from kvservice.client import KVClient, PutStatus, Store
from kvservice.errors import InternalError, InvalidArgumentError
from kvservice.integrations.vllm.copies import block_layout
from kvservice.integrations.vllm.gpu_copies import GpuBlocks, MappedCopier, StagedCopier, block_copier
from kvservice.integrations.vllm.steps import LeasedBlocks
from kvservice.launch import Daemon
from kvservice.ops.block_pieces import page_lock

NUM_BLOCKS = 64
# Odd numbers of layers and heads, so that no piece is a power of two.
MODEL = Model(num_layers=5, num_kv_heads=3)
DONE, UNREACHABLE = PutStatus.DONE, PutStatus.UNREACHABLE


class Rig:
    """Tensors of a layout, whose blocks are saved under their numbers."""

    def __init__(self, layout: str = "FlashAttention, K and V first") -> None:
        self.tensors = LAYOUTS[layout](MODEL, NUM_BLOCKS)
        self.before = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self.layout = block_layout(self.tensors, NUM_BLOCKS)

    def open(self, client: KVClient) -> Store:
        return client.store(new_namespace(self.layout.block_bytes), timeout_s=30.0)

    def copier(self, store: Store) -> Any:
        """Return a copier that has locked the memory of the store."""
        copier = block_copier(self.layout)
        lock(copier, store)
        return copier

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor.zero_()
        torch.cuda.synchronize()

    def check(self, saved: list[int], loaded: list[int]) -> None:
        """Check that these blocks have what was saved, and all others are zero."""
        for name, tensor in self.tensors.items():
            now, before = (blocks_of(each) for each in (tensor, self.before[name]))
            assert torch.equal(now[loaded], before[saved])
            others = [block for block in range(NUM_BLOCKS) if block not in loaded]
            assert not now[others].any()


def lock(copier: Any, store: Store) -> None:
    copier.use(store.memory)
    until(lambda: copier.has_locked)


def blocks_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor with its blocks first: random numbers may be NaN."""
    return tensor.movedim(tensor.shape.index(NUM_BLOCKS), 0).view(torch.int16)


@pytest.mark.parametrize("share", ["write", "read", "off"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_back_as_they_were(store_daemon: OpenStore, layout: str, share: str) -> None:
    rig = Rig(layout)
    with KVClient(store_daemon(share).address) as client, rig.open(client) as store:
        copier = rig.copier(store)
        assert isinstance(copier, MappedCopier)
        numbers = [3, 50, 4, 63, 0]
        assert (
            copier.put(store, b"".join(keys_of(*numbers)), np.array(numbers), copier.mark()).result(60).tolist()
            == [DONE] * 5
        )
        rig.clear()
        # The checksums that the GPU has computed are those of the daemon.
        assert store.get(keys_of(*numbers), np.empty((5, rig.layout.block_bytes), np.uint8), verify=True).all()
        found = copier.get(store, b"".join(keys_of(63, 99, 0, 50)), np.array([40, 41, 7, 62]), copier.mark()).result(60)
        assert found.tolist() == [True, False, True, True]
        rig.check([63, 0, 50], [40, 7, 62])
        copier.close()


def test_a_block_of_every_part_is_compared() -> None:
    """The bench compares with this function."""
    rig = Rig()
    check_equal(rig.tensors, NUM_BLOCKS, [1, 2], [1, 2])
    with pytest.raises(InternalError, match=r"layer\.0"):
        check_equal(rig.tensors, NUM_BLOCKS, [1, 2], [1, 3])


@pytest.mark.parametrize("num_bytes", [16, 32, 48, 32768, 32768 + 16, 3 * 32768 - 32])
def test_checksums_of_any_size(num_bytes: int) -> None:
    """More blocks than one launch moves, of one or several tiles, with half a stripe left over."""
    count = 600
    layout = block_layout({"layer": torch.randint(0, 256, (count, num_bytes), dtype=torch.uint8).cuda()}, count)
    pinned = torch.zeros((count, num_bytes), dtype=torch.uint8, pin_memory=True)
    blocks = GpuBlocks(layout)
    starts = np.arange(count, dtype=np.uint64) * np.uint64(num_bytes)
    save = blocks.save(starts + np.uint64(pinned.data_ptr()), np.arange(count), blocks.mark())
    save.synchronize()
    assert torch.equal(pinned.flatten(), layout.memories[0].cpu())
    assert save.checksums().tobytes() == _ext.store_checksums(pinned.data_ptr(), starts.tobytes(), num_bytes, 1)


@pytest.mark.parametrize("stage_kib", [64, 128, 1 << 16])
def test_blocks_pass_through_a_stage_of_any_size(stage_kib: int) -> None:
    """A block is larger than half of it, several fit, or all do. Some follow each other in host memory, others not."""
    count = 300
    tensors = LAYOUTS["FlashAttention, K and V first"](Model(num_layers=3, num_kv_heads=2), count)
    layout = block_layout(tensors, count)
    assert 32 << 10 < layout.block_bytes < 64 << 10
    pinned = torch.zeros((count // 2, layout.block_bytes), dtype=torch.uint8, pin_memory=True)
    blocks = GpuBlocks(layout, stage_kib << 10)
    random = np.random.default_rng(0)
    saved, loaded = np.split(random.permutation(count), 2)
    places = np.arange(count // 2)
    random.shuffle(places[: count // 4])
    addresses = (places * layout.block_bytes + pinned.data_ptr()).astype(np.uint64)
    for _ in range(3):  # a call begins with what the last one has left
        pinned.zero_()
        save = blocks.save(addresses, saved, blocks.mark())
        save.synchronize()
        offsets = (addresses - np.uint64(pinned.data_ptr())).tobytes()
        assert save.checksums().tobytes() == _ext.store_checksums(pinned.data_ptr(), offsets, layout.block_bytes, 1)
        for tensor in tensors.values():
            tensor.view(torch.int16)[:, torch.tensor(loaded, device="cuda")] = 0
        blocks.load(addresses, loaded, blocks.mark()).synchronize()
        check_equal(tensors, count, saved.tolist(), loaded.tolist())


def test_threads_load_at_the_same_time() -> None:
    """A step's loads and asynchronous ones share a stage."""
    count, times = 64, 20
    layout = block_layout(LAYOUTS["across layers"](Model(num_layers=3, num_kv_heads=2), 3 * count), 3 * count)
    memory = layout.memories[0].view(3 * count, -1)
    pinned = memory[:count].cpu().pin_memory()
    blocks = GpuBlocks(layout, 1 << 20)
    addresses = (np.arange(count) * layout.block_bytes + pinned.data_ptr()).astype(np.uint64)

    def load(first: int) -> None:
        for _ in range(times):
            blocks.load(addresses, np.arange(first, first + count), blocks.mark()).synchronize()

    threads = [threading.Thread(target=load, args=(first,)) for first in (count, 2 * count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert torch.equal(memory[count : 2 * count], memory[:count])
    assert torch.equal(memory[2 * count :], memory[:count])


@pytest.mark.parametrize("staged", [False, True])
def test_copies_wait_for_the_computations_that_are_queued(store_daemon: OpenStore, staged: bool) -> None:
    rig = Rig()
    with KVClient(store_daemon("write").address) as client, rig.open(client) as mapped:
        store = FakeStore() if staged else mapped
        copier = StagedCopier(rig.layout, verify=False) if staged else rig.copier(mapped)
        copier.put(store, b"".join(keys_of(5)), np.array([5]), copier.mark()).result(60)
        # Computations behind a long one write a block that is saved, and one that is loaded into.
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(20):
            busy = torch.nn.functional.normalize(busy @ busy)
        for tensor in rig.tensors.values():
            tensor[:, 6] = busy.flatten()[: tensor[:, 6].numel()].view(tensor[:, 6].shape)
            tensor[:, 40] = 0
        loaded = copier.get(store, b"".join(keys_of(5)), np.array([40]), copier.mark())
        copier.put(store, b"".join(keys_of(6)), np.array([6]), copier.mark()).result(60)
        assert loaded.result(60).tolist() == [True]
        rig.before = {name: tensor.clone() for name, tensor in rig.tensors.items()}
        assert copier.get(store, b"".join(keys_of(6)), np.array([41]), copier.mark()).result(60).tolist() == [True]
        for name, tensor in rig.tensors.items():
            now, before = blocks_of(tensor), blocks_of(rig.before[name])
            assert torch.equal(now[[40, 41]], before[[5, 6]])
        copier.close()


@pytest.mark.parametrize("locked", [True, False])
def test_computations_of_a_step_wait_for_its_loads(store_daemon: OpenStore, locked: bool) -> None:
    """A long computation writes the blocks before they are loaded, and another reads them afterwards."""
    rig = Rig()
    with KVClient(store_daemon("write").address) as client, rig.open(client) as store:
        saver = rig.copier(store)
        saver.put(store, b"".join(keys_of(5, 6)), np.array([5, 6]), saver.mark()).result(60)
        copier = saver if locked else StagedCopier(rig.layout, verify=False)
        busy = torch.randn(8192, 8192, device="cuda")
        for _ in range(20):
            busy = torch.nn.functional.normalize(busy @ busy)
        for tensor in rig.tensors.values():
            tensor[:, 40:42] = busy.flatten()[: tensor[:, 40:42].numel()].view(tensor[:, 40:42].shape)
        with store.acquire(keys_of(6, 5)) as lease:
            leased = LeasedBlocks(lease.memory.identity, lease.offsets, lease.versions)
            end = copier.read(lease.memory, leased, np.array([40, 41]))
            read = {name: tensor[:, 40:42].clone() for name, tensor in rig.tensors.items()}
            assert end.wait().tolist() == [True, True]
        for name, tensor in read.items():
            assert torch.equal(blocks_of_two(tensor), blocks_of(rig.before[name])[[6, 5]])
        saver.close()


def blocks_of_two(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, 0).view(torch.int16)


def test_a_block_whose_lease_ends_during_the_copy_is_wrong(store_daemon: OpenStore) -> None:
    rig = Rig()
    gate = Gate(GpuBlocks(rig.layout))
    with KVClient(store_daemon("write").address) as client, rig.open(client) as store:
        copier, leaky = MappedCopier(gate, StagedCopier(rig.layout, verify=False), verify=False), LeakyStore(store)
        lock(copier, store)
        gate.open.set()
        copier.put(store, b"".join(keys_of(1, 2, 3)), np.array([1, 2, 3]), copier.mark()).result(60)
        rig.clear()
        gate.open.clear()
        gate.held_up.clear()
        loaded = copier.get(leaky, b"".join(keys_of(1, 2, 3)), np.array([40, 41, 42]), copier.mark())
        assert gate.held_up.wait(60)
        leaky.lose(2)
        gate.open.set()
        assert loaded.result(60).tolist() == [True, False, True]
        for tensor in rig.tensors.values():
            tensor[:, 41] = 0
        rig.check([1, 3], [40, 42])
        copier.close()


def test_the_daemon_is_killed_during_copies() -> None:
    rig = Rig()
    gate = Gate(GpuBlocks(rig.layout))
    with (
        Daemon(**SMALL_STORE | {"share_store": "write"}) as daemon,
        KVClient(daemon.address) as client,
        rig.open(client) as store,
    ):
        copier = MappedCopier(gate, StagedCopier(rig.layout, verify=False), verify=False)
        lock(copier, store)
        gate.open.set()
        copier.put(store, b"".join(keys_of(1)), np.array([1]), copier.mark()).result(60)
        rig.clear()
        gate.open.clear()
        gate.held_up.clear()
        loaded = copier.get(store, b"".join(keys_of(1)), np.array([40]), copier.mark())
        saved = copier.put(store, b"".join(keys_of(2)), np.array([2]), copier.mark())
        assert gate.held_up.wait(60)
        daemon.process.kill()
        daemon.process.wait()
        gate.open.set()
        assert loaded.result(60).tolist() == [True]
        assert saved.result(60).tolist() == [UNREACHABLE]
        rig.check([1], [40])
        copier.close()


def test_two_clients_lock_the_same_memory_and_closing_unlocks_it(store_daemon: OpenStore) -> None:
    rig, other = Rig(), Rig()
    address = store_daemon("read").address
    with (
        KVClient(address) as client,
        rig.open(client) as store,
        client.store(store.namespace, timeout_s=30.0) as second,
    ):
        one, two = rig.copier(store), other.copier(second)
        one.put(store, b"".join(keys_of(1, 2)), np.array([1, 2]), one.mark()).result(60)
        other.clear()
        other.before = rig.before
        assert one.get(store, b"".join(keys_of(1)), np.array([1]), one.mark()).result(60).all()
        assert two.get(second, b"".join(keys_of(1, 2)), np.array([40, 41]), two.mark()).result(60).all()
        other.check([1, 2], [40, 41])
        with store.acquire(keys_of(1)) as lease:
            memory = lease.memory
            slab = (int(lease.addresses[0]) - memory.address) // memory.slab_bytes
        start = memory.address + slab * memory.slab_bytes
        # Memory that is locked cannot be locked again.
        assert page_lock(start, memory.slab_bytes, device=0, read_only=True) is None
        one.close()
        lock = page_lock(start, memory.slab_bytes, device=0, read_only=True)
        assert lock is not None
        lock.close()
        two.close()


def test_wrong_arguments_are_refused() -> None:
    rig = Rig()
    blocks = GpuBlocks(rig.layout)
    pinned = torch.zeros(rig.layout.block_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    address = pinned.ctypes.data
    for addresses, block_ids, field in (
        ([address], [NUM_BLOCKS], "block_ids"),
        ([address], [-1], "block_ids"),
        ([address, address], [1], "addresses"),
        ([address + 8], [1], "addresses"),
        ([0], [1], "addresses"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            blocks.load(np.array(addresses, np.uint64), np.array(block_ids), blocks.mark())
        assert caught.value.field == field
