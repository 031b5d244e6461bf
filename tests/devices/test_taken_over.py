"""A device opens the pool and the swap tier of an earlier process with their content."""

from __future__ import annotations

import asyncio
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from constants import set_constants
from fake_cuda import FakeCuda
from kept_files import HeldFiles
from killed_device import check_taken_over, config_of, killed
from kv_model import POOL

from kvservice import ops
from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.kept import KeptFiles, KeptState, KeptStateError

SMALL: dict[str, Any] = POOL | {"max_message_mib": 1, "allow_client_shm": "off"}


@pytest.fixture
def keeper() -> Iterator[HeldFiles]:
    keeper = HeldFiles()
    yield keeper
    keeper.close()


def started(keeper: HeldFiles, **changes: Any) -> tuple[Any, KeptState]:
    kept = KeptState.open(keeper.start(), {})
    device = open_device(ServeConfig.model_validate(SMALL | changes), kept)
    kept.ready()
    return device, kept


@pytest.mark.parametrize("share_pool", ["off", "write"])
def test_the_pool_in_host_memory_is_there_again(keeper: HeldFiles, share_pool: str) -> None:
    device, _ = started(keeper, share_pool=share_pool)
    device.pool.blocks[3], device.swap_pool.blocks[2] = 1.5, 2.5
    for number in range(2):
        device.close()
        device, kept = started(keeper, share_pool=share_pool)
        assert kept.taken
        assert (device.pool.blocks[3] == 1.5).all()
        assert (device.swap_pool.blocks[2] == 2.5).all()
        device.pool.blocks[4 + number] = number
        with device.exported_pool() as pool:
            assert not may_only_read(pool.descriptor, pool.num_bytes) or share_pool == "off"
            assert may_only_read(device.swap_pool.fd, device.swap_pool.num_bytes)
    device.close()


def may_only_read(fd: int, num_bytes: int) -> bool:
    assert mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ)
    try:
        mmap.mmap(fd, num_bytes)
    except PermissionError:
        return True
    return False


def test_unfinished_blocks_are_still_counted(keeper: HeldFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process before ended while its thread copied."""
    set_constants(monkeypatch, "kvservice.devices", ON_LOOP_BYTES=-1)
    goes_on, copy_blocks = threading.Event(), ops.copy_blocks

    def waits(*arguments: Any) -> None:
        goes_on.wait(60)
        copy_blocks(*arguments)

    monkeypatch.setattr(ops, "copy_blocks", waits)
    before, _ = started(keeper)
    before.copy(np.array([1], np.int32), np.array([4], np.int32))
    before.swap_out(np.array([2], np.int32), np.array([5], np.int32))
    device, kept = started(keeper)
    counts = kept.arrays.kept("unfinished_device", (device.num_blocks,), np.int32, private=True)
    assert np.flatnonzero(counts).tolist() == [4]
    counts = kept.arrays.kept("unfinished_swap", (device.num_swap_blocks,), np.int32, private=True)
    assert np.flatnonzero(counts).tolist() == [5]
    goes_on.set()
    before.close()
    device.close()


def pool_of(fake: FakeCuda, device: Any) -> Any:
    return fake.array(device.pool.pointer, (device.num_blocks, device.layout.block_bytes), np.uint8)


@pytest.mark.parametrize("sizes", [{}, {"num_blocks": None, "gpu_memory_utilization": 0.5}], ids=["given", "what fits"])
def test_the_pool_on_a_gpu_is_there_again(keeper: HeldFiles, fake: FakeCuda, sizes: dict[str, Any]) -> None:
    device, _ = started(keeper, device="cuda", **sizes)
    num_blocks, bytes_before = device.num_blocks, fake.used_bytes
    pool_of(fake, device)[3], device.swap_pool.blocks[2] = 7, 2.5
    for _ in range(2):
        device.close()
        device, kept = started(keeper, device="cuda", **sizes)
        assert kept.taken
        assert device.num_blocks == num_blocks  # although the free memory is another now
        assert (pool_of(fake, device)[3] == 7).all()
        assert (device.swap_pool.blocks[2] == 2.5).all()
        assert device.swap_pool.blocks.ctypes.data in fake.memory, "it is pinned"
        assert fake.used_bytes == bytes_before
        fake.total_bytes += 1 << 20
        with device.exported_pool() as pool:
            assert os.fstat(pool.descriptor).st_size == pool.num_bytes
    device.close()
    assert fake.used_bytes == 0


def test_a_pool_that_the_gpu_cannot_map_is_a_failed_take_over(keeper: HeldFiles, fake: FakeCuda) -> None:
    device, _ = started(keeper, device="cuda")
    device.close()
    (pool,) = (fd for name, fd in keeper.held.items() if name.endswith("pool"))
    os.truncate(pool, 4096)
    for _ in range(5):
        with pytest.raises(KeptStateError, match="cannot be mapped"):
            started(keeper, device="cuda")
        fake.memory.clear()
        fake.used_bytes = 0
    device, kept = started(keeper, device="cuda")
    assert kept.refused == "the take-over failed 5 times"
    device.close()


def test_after_a_kill_all_blocks_but_the_unfinished_ones_are_whole() -> None:
    """Every byte of the other blocks is compared."""
    kept = KeptState.open(KeptFiles(killed("cpu"), None), {})
    device = open_device(config_of("cpu"), kept)
    asyncio.run(check_taken_over(device, kept))
    device.close()
