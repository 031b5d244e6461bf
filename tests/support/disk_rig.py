"""A disk tier over memory of its own, and values whose bytes derive from their keys."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvservice._ext import store_checksums
from kvservice.tiers import DiskOptions, DiskTier, Space, Values

MEMORY_BYTES = 16 << 20
SLAB_BYTES = 1 << 20
SECTOR = 4096
# A slab with its header and its records.
TOTAL_SLAB_BYTES = SLAB_BYTES + SECTOR + SLAB_BYTES // SECTOR * 128


def space(block_bytes: int, name: str = "m") -> Space:
    return Space(hashlib.sha256(f"{name} {block_bytes}".encode()).digest()[:16], block_bytes, name)


def key(number: int) -> bytes:
    return hashlib.sha256(struct.pack("<Q", number)).digest()


def keys(numbers: Sequence[int]) -> bytes:
    return b"".join(map(key, numbers))


def content(of: Space, number: int) -> bytes:
    """Return the bytes of a value: different for each space and key."""
    pattern = hashlib.sha256(of.digest + key(number)).digest() * 16
    return (pattern * (of.block_bytes // len(pattern) + 1))[: of.block_bytes]


def options(directory: Path, num_slabs: int = 8, num_threads: int = 4, **others: Any) -> DiskOptions:
    slab_bytes = others.pop("slab_bytes", SLAB_BYTES)
    total = slab_bytes + SECTOR + slab_bytes // SECTOR * 128
    return DiskOptions(directory, num_slabs * total, num_threads=num_threads, slab_bytes=slab_bytes, **others)


class Disk:
    """A tier, and the memory that it reads and writes."""

    def __init__(self, settings: DiskOptions) -> None:
        self.memory = mmap.mmap(-1, MEMORY_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.tier = DiskTier(settings, self.address, MEMORY_BYTES)

    def places(self, of: Space, count: int, first: int = 0) -> tuple[int, ...]:
        """Return where values lie as in the block store: those of at least 4 KiB are aligned."""
        stride = -(-of.block_bytes // SECTOR) * SECTOR if of.block_bytes >= SECTOR else -(-of.block_bytes // 64) * 64
        assert first + count * stride <= MEMORY_BYTES
        return tuple(first + i * stride for i in range(count))

    def values(self, of: Space, numbers: Sequence[int], fill: bool, first: int = 0) -> Values:
        """Return where values lie. Their memory has their bytes, or zeros."""
        places = self.places(of, len(numbers), first)
        for place, number in zip(places, numbers, strict=True):
            self.memory[place : place + of.block_bytes] = content(of, number) if fill else bytes(of.block_bytes)
        offsets = struct.pack(f"<{len(places)}Q", *places)
        checksums = store_checksums(self.address, offsets, of.block_bytes, 1) if fill else b""
        return Values(keys(numbers), offsets, checksums)

    async def put(self, of: Space, numbers: Sequence[int], first: int = 0) -> list[int]:
        """Return the numbers of the values that are stored. They lie in memory from `first` on."""
        stored = await self.tier.put(of, self.values(of, numbers, fill=True, first=first))
        return [number for number, done in zip(numbers, stored, strict=True) if done]

    async def get(self, of: Space, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of the values found, whose bytes and checksums are right."""
        result = await self.tier.get(of, self.values(of, numbers, fill=False))
        offsets = struct.pack(f"<{len(numbers)}Q", *self.places(of, len(numbers)))
        actual = store_checksums(self.address, offsets, of.block_bytes, 1)
        found = []
        for i, (place, number) in enumerate(zip(self.places(of, len(numbers)), numbers, strict=True)):
            checksum = result.checksums[8 * i : 8 * i + 8]
            if not result.found[i]:
                assert checksum == bytes(8)
                continue
            assert self.memory[place : place + of.block_bytes] == content(of, number), f"value {number} is wrong"
            assert checksum == actual[8 * i : 8 * i + 8]
            found.append(number)
        return found

    async def lookup(self, of: Space, numbers: Sequence[int]) -> list[int]:
        found = await self.tier.lookup(of, keys(numbers))
        return [number for number, there in zip(numbers, found, strict=True) if there]


@asynccontextmanager
async def opened(settings: DiskOptions) -> AsyncIterator[Disk]:
    """Yield a tier that has recovered its index, and close it."""
    disk = Disk(settings)
    try:
        await disk.tier.opened()
        yield disk
    finally:
        await disk.tier.close()


def with_modules_of(script: str) -> str:
    """Return the PYTHONPATH of a child that runs a script of the tests, and kvservice as this process has it."""
    return os.pathsep.join(filter(None, [str(Path(script).parent), os.environ.get("PYTHONPATH")]))
