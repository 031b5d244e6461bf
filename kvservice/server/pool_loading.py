"""Missing blocks of prompts are loaded into the pool, from the block store and the tiers below it.

missing blocks ─▶ in the store's memory, or brought up ─▶ blocks taken in the pool ─▶ copied, checksums ─▶ found by all

That happens if it takes less time than computing the blocks, by measured speeds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Final

import numpy as np

from kvservice.blocks import Loader, MissingBlocks
from kvservice.blocks.plans import BoolArray
from kvservice.devices import Device
from kvservice.server.loop import Clock, uninterrupted
from kvservice.server.pool_namespace import PoolNamespace
from kvservice.server.spill_counters import SpillCounters
from kvservice.store import BlockStore, StoredNamespace
from kvservice.store.index import KEY_BYTES
from kvservice.store.store import Pinned
from kvservice.tiers import TierChain

# Blocks of one prompt that are looked up at once.
MAX_BLOCKS: Final = 8192
# A wait of a prompt for a tier, however long computing would take.
MAX_WAIT_S: Final = 30.0


class PoolLoader:
    """Loads missing blocks of prompts."""

    def __init__(
        self,
        loader: Loader,
        device: Device,
        blocks: BlockStore,
        memory: int,
        chain: TierChain | None,
        namespace: PoolNamespace,
        counters: SpillCounters,
        clock: Clock,
    ) -> None:
        """`memory` is the address of the store's memory."""
        self._loader, self._device, self._blocks, self._memory = loader, device, blocks, memory
        self._chain = chain if namespace.identity.outlives_daemon else None
        self._namespace, self._counters, self._clock = namespace, counters, clock
        # The loads in progress, by the hash of their first block.
        self._in_progress: dict[bytes, asyncio.Task[None]] = {}
        self.num_loading = 0
        # What was loaded before a reset is not published after it.
        self._num_resets = 0

    def reset(self) -> None:
        """Let no load in progress publish its blocks."""
        self._num_resets += 1

    def start(self, missing: Sequence[MissingBlocks], num_kept: int, token_s: float) -> asyncio.Future[object] | None:
        """Load what is missing if that is faster than computing it, at `token_s` seconds for a token. Returns what to
        wait for, or None. `num_kept` blocks stay available."""
        if (namespace := self._namespace.find() if self._chain is None else self._namespace.open()) is None:
            return None
        tasks = [task for one in missing if (task := self._start(namespace, one, num_kept, token_s)) is not None]
        return asyncio.ensure_future(asyncio.wait(tasks)) if tasks else None

    def _start(
        self, namespace: StoredNamespace, missing: MissingBlocks, num_kept: int, token_s: float
    ) -> asyncio.Task[None] | None:
        first = missing.chain_hashes[0]
        if (task := self._in_progress.get(first)) is not None:
            return task
        keys = b"".join(missing.chain_hashes)
        in_memory, _ = self._blocks.lookup(namespace, keys, counted=False)
        if not in_memory and self._chain is None:
            return None
        num_blocks, size = in_memory or len(missing), missing.tokens.shape[1]
        copy_s = self._counters.load_speed.seconds(num_blocks * namespace.block_bytes)
        spare_s = min(num_blocks * size * token_s - copy_s, MAX_WAIT_S)
        if spare_s <= 0:
            self._counters.slower += len(missing)
            return None
        task = asyncio.get_running_loop().create_task(self._load(namespace, missing, keys, num_kept, spare_s))
        self._in_progress[first] = task
        task.add_done_callback(lambda _: self._in_progress.pop(first))
        return task

    async def _load(
        self, namespace: StoredNamespace, missing: MissingBlocks, keys: bytes, num_kept: int, spare_s: float
    ) -> None:
        async with self._brought_up(namespace, keys, spare_s) as pinned:
            if pinned.num_blocks:
                await uninterrupted(self._fill(namespace, missing.first(pinned.num_blocks), pinned, num_kept))

    @contextlib.asynccontextmanager
    async def _brought_up(self, namespace: StoredNamespace, keys: bytes, max_wait_s: float) -> AsyncIterator[Pinned]:
        """Pin the first blocks in the store, within the context."""
        if self._chain is None:
            pinned = self._blocks.acquire(namespace, keys, True, counted=False)
        else:
            pinned = await self._chain.bring_up(namespace, keys, leading_only=True, max_wait_s=max_wait_s)
        try:
            yield pinned
        finally:
            self._blocks.release(pinned.slots)

    async def _fill(self, namespace: StoredNamespace, missing: MissingBlocks, pinned: Pinned, num_kept: int) -> None:
        """Copy pinned values into blocks of the pool, and publish them."""
        load = self._loader.begin_load(missing, num_kept)
        if load is None or len(load) < len(missing):
            self._counters.crowded += len(missing) - (0 if load is None else len(load))
        if load is None:
            return
        count, resets, began_s = len(load), self._num_resets, self._clock.time()
        self.num_loading += count
        try:
            addresses = np.frombuffer(pinned.offsets, np.uint64)[:count] + np.uint64(self._memory)
            checksums = np.frombuffer(self._blocks.checksums(pinned.slots[: 8 * count]), np.uint64)
            right = await self._device.load_blocks(addresses, load.blocks.astype(np.int32), checksums)
        finally:
            self.num_loading -= count
        num_right = int(np.logical_and.accumulate(right).sum())
        num_loaded = self._loader.end_load(load, num_right if resets == self._num_resets else 0)
        self._counters.loaded(num_loaded, num_loaded * namespace.block_bytes, self._clock.time() - began_s)
        self._counters.hit_tokens += num_loaded * missing.tokens.shape[1]
        if num_right < count:
            self._remove_corrupt(namespace, load.missing.chain_hashes, ~right)

    def _remove_corrupt(self, namespace: StoredNamespace, chain_hashes: list[bytes], wrong: BoolArray) -> None:
        keys = np.frombuffer(b"".join(chain_hashes), np.uint8).reshape(-1, KEY_BYTES)[wrong]
        self._counters.corrupt += len(keys)
        self._blocks.remove_corrupt(namespace, keys.tobytes())

    async def close(self) -> None:
        """Wait for all loads in progress."""
        while self._in_progress:
            await asyncio.wait(list(self._in_progress.values()))
