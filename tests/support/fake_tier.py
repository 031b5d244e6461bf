"""A tier in a dict: calls wait for gates, and fail on demand. It reads and writes the memory of a store."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np

from kvservice.tiers import GetResult, Space, TierError, TierStats, Values

KEY_BYTES, WORD_BYTES = 32, 8


class FakeTier:
    """`gates` holds back calls by their method until the event is set; `unstoppable` does so with calls that end no
    sooner if they are cancelled. `faults` are methods that raise TierError. A tier that `is_full`
    refuses values.
    `calls` counts by method, `state` is that of the figures."""

    fault = ""

    def __init__(self, memory: Any, name: str = "fake") -> None:
        self.name, self.memory = name, memory
        self.values: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.unstoppable: dict[str, asyncio.Event] = {}
        self.faults: set[str] = set()
        self.calls: dict[str, int] = {}
        self.state = "open"
        self.batches: list[int] = []
        self.is_closed, self.is_full = False, False
        # Calls that touch the memory now.
        self.touching = 0

    async def _enter(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if method in self.gates:
            await self.gates[method].wait()
        if method in self.unstoppable:
            await _to_the_end(self.unstoppable[method].wait())
        if method in self.faults:
            raise TierError(f"{method} fails")

    async def opened(self) -> None:
        await self._enter("opened")

    async def lookup(self, space: Space, keys: bytes) -> bytes:
        await self._enter("lookup")
        return bytes((space.digest, key) in self.values for key in split(keys, KEY_BYTES))

    async def get(self, space: Space, values: Values) -> GetResult:
        self.touching += 1
        self.batches.append(len(values))
        try:
            await self._enter("get")
            found, checksums = bytearray(), bytearray()
            for key, offset in zip(split(values.keys, KEY_BYTES), np.frombuffer(values.offsets, "<u8"), strict=True):
                data, checksum = self.values.get((space.digest, key), (b"", bytes(WORD_BYTES)))
                self.memory[offset : offset + len(data)] = data
                found.append(bool(data))
                checksums += checksum
            return GetResult(bytes(found), bytes(checksums))
        finally:
            self.touching -= 1

    async def put(self, space: Space, values: Values) -> bytes:
        self.touching += 1
        try:
            await self._enter("put")
            if self.is_full:
                return bytes(len(values))
            places = np.frombuffer(values.offsets, "<u8")
            sums = split(values.checksums, WORD_BYTES)
            for key, offset, checksum in zip(split(values.keys, KEY_BYTES), places, sums, strict=True):
                data = bytes(self.memory[offset : offset + space.block_bytes])
                self.values[space.digest, key] = data, checksum
            return b"\1" * len(values)
        finally:
            self.touching -= 1

    async def remove(self, space: Space, keys: bytes) -> int:
        await self._enter("remove")
        return sum(self.values.pop((space.digest, key), None) is not None for key in split(keys, KEY_BYTES))

    async def clear(self, space: Space) -> None:
        await self._enter("clear")
        self.values = {name: value for name, value in self.values.items() if name[0] != space.digest}

    def stats(self) -> TierStats:
        return TierStats(self.name, state=self.state, num_values=len(self.values))

    async def close(self) -> None:
        assert not self.touching, "a call touches the memory"
        self.is_closed = True


async def _to_the_end(waiting: Coroutine[Any, Any, object]) -> None:
    task, is_cancelled = asyncio.ensure_future(waiting), False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


def split(packed: bytes, size: int) -> list[bytes]:
    return [packed[begin : begin + size] for begin in range(0, len(packed), size)]
