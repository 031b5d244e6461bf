"""Whole blocks between the pools of a device and other host memory: bytes, checksums, order, unfinished blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from kv_model import POOL

from kvservice import _ext
from kvservice.config import ServeConfig
from kvservice.devices import cuda_host_copies, host_copies, open_device
from kvservice.devices.base import PoolName
from kvservice.devices.copies import Copies
from kvservice.errors import InternalError
from kvservice.kept import KeptState

NUM_BLOCKS = 11


class Memory:
    """Host memory for blocks with gaps between them, and a device with random bytes in both pools."""

    def __init__(self, device: str, seed: int, **changes: Any) -> None:
        options = {"device": device, "max_message_mib": 1, "allow_client_shm": "off", "store_copy_threads": 2}
        config = ServeConfig.model_validate(POOL | options | changes)
        self.kept = KeptState.fresh()
        self.closed = False
        self.device: Any = open_device(config, self.kept)
        self.block_bytes = config.layout.block_bytes
        self.rng = np.random.default_rng(seed)
        stride = self.block_bytes + 4096
        self.bytes = np.zeros(NUM_BLOCKS * stride, np.uint8)
        places = self.rng.permutation(NUM_BLOCKS).astype(np.uint64) * np.uint64(stride)
        self.addresses = places + np.uint64(self.bytes.ctypes.data)
        for name in ("pool", "swap"):
            blocks = self.blocks(name)
            blocks[:] = self.rng.integers(0, 255, blocks.shape, np.uint8)

    def blocks(self, name: str) -> Any:
        """Return the blocks of a pool, uint8[num_blocks, block_bytes]."""
        if name == "pool" and hasattr(self.device.pool, "pointer"):
            num_bytes = self.device.num_blocks * self.block_bytes
            memory = self.device._cuda.array(self.device.pool.pointer, (num_bytes,), np.uint8)
        else:
            pool = self.device.pool if name == "pool" else self.device.swap_pool
            memory = pool.blocks.view(np.uint8).reshape(-1)
        return memory.reshape(-1, self.block_bytes)

    def close(self) -> None:
        """Finish all copies."""
        if not self.closed:
            self.closed = True
            self.device.close()

    def row(self, index: int) -> Any:
        """Return the bytes of a block outside of the pools."""
        begin = int(self.addresses[index]) - self.bytes.ctypes.data
        return self.bytes[begin : begin + self.block_bytes]

    def ids(self, name: str, count: int = NUM_BLOCKS) -> Any:
        return self.rng.permutation(len(self.blocks(name)))[:count].astype(np.int32)

    def checksum(self, index: int) -> int:
        data = _ext.store_checksums(int(self.addresses[index]), bytes(8), self.block_bytes, 1)
        return int.from_bytes(data, "little")

    def unfinished(self, name: str) -> list[int]:
        key, count = {
            "pool": ("unfinished_device", self.device.num_blocks),
            "swap": ("unfinished_swap", self.device.num_swap_blocks),
        }[name]
        counts = self.kept.arrays.kept(key, (count,), np.int32, private=True)
        return np.flatnonzero(counts).tolist()


@pytest.fixture(params=["cpu", "cuda"])
def open_memory(request: pytest.FixtureRequest, new_fake: Callable[[], FakeCuda]) -> Iterator[Callable[..., Memory]]:
    """Return a function that opens memory with a device on the CPU, and one with a fake GPU."""
    opened: list[Memory] = []

    def open_one(seed: int = 0, **changes: Any) -> Memory:
        if request.param == "cuda":
            new_fake()
        opened.append(Memory(request.param, seed, **changes))
        return opened[-1]

    yield open_one
    for memory in opened:
        memory.close()


async def save(memory: Memory, ids: Any, addresses: Any, name: PoolName = "pool") -> Any:
    return await memory.device.save_blocks(ids, addresses, name)


async def load(memory: Memory, addresses: Any, ids: Any, checksums: Any, name: PoolName = "pool") -> Any:
    return await memory.device.load_blocks(addresses, ids, checksums, name)


@pytest.mark.parametrize("threshold", [0, 1 << 30], ids=["in threads", "on the loop"])
@pytest.mark.parametrize("staging", [1, 3 * 4096, 8 << 20], ids=["of one block", "of three", "of all"])
@pytest.mark.parametrize("name", ["pool", "swap"])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_saved_and_loaded_byte_by_byte(
    open_memory: Callable[..., Memory],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    name: PoolName,
    staging: int,
    threshold: int,
) -> None:
    monkeypatch.setattr(cuda_host_copies, "STAGING_BYTES", staging)
    monkeypatch.setattr(host_copies, "SHORT_BYTES", threshold)
    memory = open_memory(seed)
    ids = memory.ids(name)
    before = memory.blocks(name).copy()
    checksums = asyncio.run(save(memory, ids, memory.addresses, name))
    for index, block in enumerate(ids.tolist()):
        np.testing.assert_array_equal(memory.row(index), before[block])
        assert int(checksums[index]) == memory.checksum(index)
    np.testing.assert_array_equal(memory.blocks(name), before)
    targets = memory.ids(name)
    right = asyncio.run(load(memory, memory.addresses, targets, checksums, name))
    assert right.tolist() == [True] * NUM_BLOCKS
    others = np.setdiff1d(np.arange(len(before)), targets)
    np.testing.assert_array_equal(memory.blocks(name)[targets], before[ids])
    np.testing.assert_array_equal(memory.blocks(name)[others], before[others])
    assert memory.unfinished(name) == []


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_and_odd_sizes(open_memory: Callable[..., Memory], dtype: str) -> None:
    memory = open_memory(dtype=dtype, num_layers=3, num_kv_heads=1, block_size=8)
    ids = memory.ids("pool", 5)
    before = memory.blocks("pool").copy()
    asyncio.run(save(memory, ids, memory.addresses[:5]))
    for index, block in enumerate(ids.tolist()):
        np.testing.assert_array_equal(memory.row(index), before[block])


def test_a_block_with_other_bytes_than_its_checksum_is_reported(open_memory: Callable[..., Memory]) -> None:
    memory = open_memory()
    checksums = asyncio.run(save(memory, memory.ids("pool"), memory.addresses))
    memory.row(2)[-1] ^= 1
    memory.row(7)[0] ^= 128
    right = asyncio.run(load(memory, memory.addresses, memory.ids("pool"), checksums))
    assert np.flatnonzero(~right).tolist() == [2, 7]


@pytest.mark.parametrize("name", ["pool", "swap"])
def test_without_blocks_nothing_is_copied(open_memory: Callable[..., Memory], name: PoolName) -> None:
    memory = open_memory()
    none, ids = memory.addresses[:0], memory.ids(name, 0)
    assert len(asyncio.run(save(memory, ids, none, name))) == 0
    assert len(asyncio.run(load(memory, none, ids, none, name))) == 0


def test_a_save_sees_the_copies_before_it(open_memory: Callable[..., Memory]) -> None:
    memory = open_memory()
    source = memory.blocks("pool")[3].copy()

    async def run() -> None:
        for _ in range(20):
            memory.device.copy(np.array([3], np.int32), np.array([8], np.int32))
            memory.device.swap_out(np.array([8], np.int32), np.array([1], np.int32))
            pool = memory.device.save_blocks(np.array([8], np.int32), memory.addresses[:1])
            swap = memory.device.save_blocks(np.array([1], np.int32), memory.addresses[1:2], "swap")
            await asyncio.gather(pool, swap)
            for index in range(2):
                np.testing.assert_array_equal(memory.row(index), source)
            memory.blocks("pool")[8] = memory.blocks("swap")[1] = 0

    asyncio.run(run())


def test_a_load_waits_for_the_copies_before_it(open_memory: Callable[..., Memory]) -> None:
    """A block that a copy still reads or writes is loaded after that."""
    memory = open_memory()
    memory.row(0)[:] = 77
    checksum = np.array([memory.checksum(0)], np.uint64)

    async def run() -> None:
        for _ in range(20):
            source = memory.blocks("pool")[4].copy()
            memory.device.copy(np.array([4], np.int32), np.array([9], np.int32))
            memory.device.copy(np.array([2], np.int32), np.array([4], np.int32))
            (right,) = await memory.device.load_blocks(memory.addresses[:1], np.array([4], np.int32), checksum)
            assert right
            assert (memory.blocks("pool")[4] == 77).all()
            np.testing.assert_array_equal(memory.blocks("pool")[9], source)

    asyncio.run(run())


def test_a_wait_that_is_left_out_is_found_out(
    new_fake: Callable[[], FakeCuda], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copies, "let_wait", lambda *_, **__: None)

    def fails(seed: int) -> bool:
        new_fake()
        memory = Memory("cuda", seed)
        try:
            test_a_save_sees_the_copies_before_it(lambda: memory)
        except AssertionError:
            return True
        finally:
            memory.close()
        return False

    assert any(fails(seed) for seed in range(20))


def test_loaded_blocks_count_as_unfinished_from_the_call_on(
    open_memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "SHORT_BYTES", 0)
    memory = open_memory()
    ids = memory.ids("pool", 3)
    checksums = asyncio.run(save(memory, ids, memory.addresses[:3]))
    goes_on, seen = threading.Event(), []

    async def run() -> None:
        queue = getattr(memory.device, "_queue", None) or memory.device._compute.queue
        queue.submit(lambda: goes_on.wait(60))
        loading = memory.device.load_blocks(memory.addresses[:3], ids, checksums)
        seen.append(memory.unfinished("pool"))
        task = asyncio.ensure_future(loading)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen.append(memory.unfinished("pool"))
        goes_on.set()

    asyncio.run(run())
    memory.close()
    assert seen == [sorted(ids.tolist())] * 2
    assert memory.unfinished("pool") == []


def test_a_failure_faults_the_device_and_the_blocks_stay_unfinished(
    open_memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory()
    checksums = memory.addresses[:1]

    def fails(*_: Any) -> None:
        raise RuntimeError("the memory is broken")

    for module in (host_copies, cuda_host_copies):
        monkeypatch.setattr(module, "copy_to_pool", fails)
    with pytest.raises((RuntimeError, InternalError)):
        asyncio.run(load(memory, memory.addresses[:1], np.array([5], np.int32), checksums))
    assert memory.device.fault is not None
    assert memory.unfinished("pool") == [5]
