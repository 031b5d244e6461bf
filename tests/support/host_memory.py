"""Host memory that whole blocks of a device are copied to and from, on the CPU or on the GPU of `fake_cuda`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import numpy as np
from fake_cuda import FakeCuda
from kv_model import POOL

from kvservice import _ext
from kvservice.config import ServeConfig
from kvservice.devices import open_device
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
            memory = sys.modules["kvservice._cuda"].array(self.device.pool.pointer, (num_bytes,), np.uint8)
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


def save_after_copies(memory: Memory) -> None:
    """Check that a save sees the copies before it."""
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


def save_on_fake_gpus() -> None:
    """Do `save_after_copies` on fake GPUs, whose streams run in many orders."""
    for seed in range(20):
        sys.modules["kvservice._cuda"] = FakeCuda(seed)
        memory = Memory("cuda", seed)
        try:
            save_after_copies(memory)
        finally:
            memory.close()
