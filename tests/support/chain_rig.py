"""A block store with tiers below it, on an event loop of the test."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Coroutine
from typing import Any

import numpy as np
from blocks_rig import BLOCK_BYTES, SLAB_BYTES, identity, keys, make
from fake_tier import FakeTier
from manual_clock import ManualClock

from kvservice import _ext
from kvservice.tiers import TierChain, WritePolicy


class ChainRig:
    """Call `run` with a coroutine function that gets the rig; the loop runs as long as that."""

    def __init__(
        self, num_slabs: int = 4, num_tiers: int = 1, policies: dict[str, WritePolicy] | None = None, **changes: Any
    ) -> None:
        self.memory = mmap.mmap(-1, num_slabs * SLAB_BYTES)
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data
        self.clock = ManualClock()
        self.rig = make("native", num_slabs, self.memory, self.clock, **changes)  # it has the kept memory
        self.store = self.rig.store
        self.tiers = [FakeTier(self.memory, f"fake{i}") for i in range(num_tiers)]
        self.chain = TierChain(self.store, self.tiers, self.clock, policies)
        self.namespace: Any = self.store.open(identity())

    @property
    def tier(self) -> FakeTier:
        return self.tiers[0]

    def put(self, *numbers: int) -> bytes:
        """Store blocks in memory. Returns the statuses."""
        reserved = self.store.reserve(self.namespace, keys(*numbers))
        for key, offset in zip(numbers_of(reserved.keys), np.frombuffer(reserved.offsets, "<u8"), strict=True):
            self.memory[offset : offset + BLOCK_BYTES] = block(key)
        checksums = _ext.store_checksums(self.address, reserved.offsets, BLOCK_BYTES, 1) if reserved.slots else b""
        self.store.commit(self.namespace, reserved.slots, reserved.keys, checksums)
        return reserved.statuses

    def put_below(self, *numbers: int, tier: int = 0) -> None:
        """Store blocks in a tier only."""
        digest = self.chain.space(self.namespace).digest
        self.tiers[tier].values.update(
            ((digest, keys(one)), (block(one), one.to_bytes(8, "little"))) for one in numbers
        )

    def below(self, tier: int = 0) -> list[int]:
        return sorted(int.from_bytes(key, "little") for _, key in self.tiers[tier].values)

    def in_memory(self, *numbers: int) -> list[int]:
        """Return those that are in memory, after a check of their bytes."""
        pinned = self.store.acquire(self.namespace, keys(*numbers))
        bits = np.unpackbits(np.frombuffer(pinned.found, np.uint8), count=len(numbers), bitorder="little")
        found = [number for number, bit in zip(numbers, bits, strict=True) if bit]
        for number, offset in zip(found, np.frombuffer(pinned.offsets, "<u8"), strict=True):
            assert self.memory[offset : offset + BLOCK_BYTES] == block(number), number
        self.store.release(pinned.slots)
        return found

    async def bring_up(self, *numbers: int, **options: Any) -> list[int]:
        """Bring blocks up. Returns those that are pinned then, after a check of their bytes."""
        pinned = await self.chain.bring_up(self.namespace, keys(*numbers), **options)
        found = self.in_memory(*numbers)
        assert len(found) >= pinned.num_blocks
        asked = np.unpackbits(np.frombuffer(pinned.found, np.uint8), bitorder="little")[: len(numbers)]
        self.store.release(pinned.slots)
        return [number for number, bit in zip(numbers, asked, strict=False) if bit]

    async def lookup(self, *numbers: int, **options: Any) -> list[int]:
        found = await self.chain.lookup(self.namespace, keys(*numbers), **options)
        return [number for number, flag in zip(numbers, found, strict=True) if flag]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def whole() -> None:
            try:
                await work
            finally:
                for tier in self.tiers:
                    for gate in tier.gates.values():
                        gate.set()
                await self.chain.close()

        asyncio.run(whole())
        for _ in self.store.check_in_slices():
            pass
        stats = self.store.totals()
        assert (stats.num_leased, stats.num_reserved) == (0, 0)
        self.clock.close()

    async def round(self) -> None:
        """Let the chain write what is to be written now. A second later a round begins anyway."""
        self.chain.start()
        await soon()
        self.clock.advance(1.0)
        for _ in range(10):
            await soon()


async def soon() -> None:
    """Let all tasks run until they wait for something."""
    for _ in range(20):
        await asyncio.sleep(0)


def block(number: int) -> bytes:
    return np.random.default_rng(number).bytes(BLOCK_BYTES)


def numbers_of(packed: bytes) -> list[int]:
    return [int.from_bytes(packed[begin : begin + 32], "little") for begin in range(0, len(packed), 32)]
