"""Whole blocks between the pools of a device and other host memory: bytes, checksums, order, unfinished blocks."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from constants import set_constants
from each_row import each_row
from fake_cuda import FakeCuda
from host_memory import NUM_BLOCKS, Memory, save_after_copies

from kvservice import _ext
from kvservice.devices import PoolName
from kvservice.errors import InternalError


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


def test_blocks_are_saved_and_loaded_byte_by_byte(
    open_memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads and on the loop, with staging memory of one block, of three and of all."""
    seed = itertools.count()
    with each_row() as row:
        for short_bytes, staging_bytes in itertools.product((0, 1 << 30), (1, 3 * 4096, 8 << 20)):
            values = {"SHORT_BYTES": short_bytes, "STAGING_BYTES": staging_bytes}
            set_constants(monkeypatch, "kvservice.devices", **values)
            for name in ("pool", "swap"):
                with row((short_bytes, staging_bytes, name)):
                    save_and_load(open_memory(next(seed)), name)


def save_and_load(memory: Memory, name: Any) -> None:
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
    memory.close()


def test_every_dtype_and_odd_sizes(open_memory: Callable[..., Memory]) -> None:
    with each_row() as row:
        for dtype in ("float32", "float16", "bfloat16"):
            with row(dtype):
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


def test_without_blocks_nothing_is_copied(open_memory: Callable[..., Memory]) -> None:
    memory = open_memory()
    for name in ("pool", "swap"):
        none, ids = memory.addresses[:0], memory.ids(name, 0)
        assert len(asyncio.run(save(memory, ids, none, name))) == 0
        assert len(asyncio.run(load(memory, none, ids, none, name))) == 0


def test_a_save_sees_the_copies_before_it(open_memory: Callable[..., Memory]) -> None:
    """save_after_copies fails if it does not."""
    save_after_copies(open_memory())


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


def test_loaded_blocks_count_as_unfinished_from_the_call_on(
    open_memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_constants(monkeypatch, "kvservice.devices", SHORT_BYTES=0)
    memory = open_memory()
    ids = memory.ids("pool", 3)
    checksums = asyncio.run(save(memory, ids, memory.addresses[:3]))
    goes_on, seen, right = threading.Event(), [], _ext.store_copy_out

    def waits(*arguments: Any) -> Any:
        goes_on.wait(60)
        return right(*arguments)

    monkeypatch.setattr(_ext, "store_copy_out", waits)

    async def run() -> None:
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

    monkeypatch.setattr(_ext, "store_copy_out", fails)
    with pytest.raises((RuntimeError, InternalError)):
        asyncio.run(load(memory, memory.addresses[:1], np.array([5], np.int32), checksums))
    assert memory.device.fault is not None
    assert memory.unfinished("pool") == [5]
