"""The pool and the tiers below it: blocks are saved in the block store, and loaded from there before they are computed.

Allocate, Pin, Schedule ─▶ PoolTier ─▶ PoolLoader ─▶ TierChain or BlockStore ─▶ Device.load_blocks ─▶ Loader
cached blocks ─▶ Spiller ─▶ Device.save_blocks ─▶ BlockStore ─▶ what its tiers do with values
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Final, NamedTuple

import numpy as np

from kvservice.blocks import Loader, MissingBlocks, SessionNamespace, Slices
from kvservice.blocks.allocation import NewSequence
from kvservice.blocks.plans import BoolArray, Int32Array
from kvservice.blocks.slices import Waits
from kvservice.config import ServeConfig
from kvservice.devices import Device
from kvservice.engine import CacheEngine
from kvservice.server.loop import Clock, SystemClock, uninterrupted
from kvservice.server.tiering.spilling import PoolNamespace, SpillCounters, Spiller, pool_identity
from kvservice.server.tiering.store import ServerStore
from kvservice.store import BlockStore, StoredNamespace
from kvservice.store.index import KEY_BYTES
from kvservice.store.store import Pinned
from kvservice.tiers import TierChain
from kvservice.tiers.spill_stats import SpillStats

logger = logging.getLogger(__name__)

# Estimates of an engine that nobody has measured, rather fast than slow: tokens of prompts, and bytes of K/V that it
# computes in a second.
_TOKENS_PER_S: Final = 50_000
_BYTES_PER_S: Final = 4e9
# Sequences of one request whose missing blocks are looked up.
_MAX_SEQUENCES: Final = 256


class PromptLoad(NamedTuple):
    """A load of a prompt's missing blocks: the hash of the first one, and its end."""

    chain_hash: bytes
    done: asyncio.Future[object]


class PoolTier:
    """Both directions, and what handlers and the daemon need of them."""

    def __init__(
        self, config: ServeConfig, engine: CacheEngine, store: ServerStore, clock: Clock | None = None
    ) -> None:
        manager, clock = engine.manager, clock or SystemClock()
        self._loader, self._store = manager.loader, store
        self._fixed_token_s = 1 / config.prefill_tokens_per_s if config.prefill_tokens_per_s else 0.0
        self._estimated_token_s = max(1 / _TOKENS_PER_S, config.layout.token_bytes / _BYTES_PER_S)
        self._counters = SpillCounters()
        self.namespace = PoolNamespace(pool_identity(config), store.blocks)
        memory = store.memory.address
        self.spiller = Spiller(
            manager,
            engine.device,
            store.blocks,
            memory,
            self.namespace,
            self._counters,
            clock,
        )
        self.pool_loader = PoolLoader(
            manager.loader,
            engine.device,
            store.blocks,
            memory,
            store.chain,
            self.namespace,
            self._counters,
            clock,
        )

    def before_allocation(
        self, session: SessionNamespace, sequences: Sequence[NewSequence]
    ) -> Awaitable[object] | None:
        """Load missing blocks of new sequences. Returns what to wait for before they are allocated, or None."""
        self.spiller.note_arrival()
        missing: list[MissingBlocks] = []
        for new in sequences[:_MAX_SEQUENCES]:
            if len(new.found):
                self.spiller.note_used(new.found)
            one = self._loader.missing(new.tokens, new.extra, new.found, MAX_BLOCKS, session.quota)
            if one is not None:
                missing.append(one)
        if not missing:
            return None
        required = sum(new.required - len(new.found) for new in sequences)
        num_kept = max(required - sum(map(len, missing)), 0)
        return self.pool_loader.start(missing, num_kept, self._fixed_token_s or self._estimated_token_s)

    def before_admission(
        self, session: SessionNamespace, tokens: Int32Array, chain_hashes: list[bytes], token_s: float
    ) -> PromptLoad | None:
        """Load missing blocks of a prompt whose chain hashes are known, and whose engine computes a token in `token_s`
        seconds. Returns None if there is nothing to load."""
        self.spiller.note_arrival()
        self.spiller.note_used(self._loader.find(chain_hashes))
        missing = self._loader.missing_of(tokens, chain_hashes, MAX_BLOCKS, session.quota)
        if missing is None:
            return None
        done = self.pool_loader.start([missing], 0, self._fixed_token_s or token_s)
        return None if done is None else PromptLoad(missing.chain_hashes[0], done)

    def before_pin(
        self, session: SessionNamespace, tokens: Int32Array, extra_keys: Sequence[tuple[int, bytes]]
    ) -> Awaitable[object] | None:
        """Load missing blocks of a prefix. Returns what to wait for, or None. Raises InvalidArgumentError."""
        missing = self._loader.missing_prefix(tokens, extra_keys, MAX_BLOCKS, session.quota)
        token_s = self._fixed_token_s or self._estimated_token_s
        return None if missing is None else self.pool_loader.start([missing], 0, token_s)

    def reset(self, reset_pool: Slices[int]) -> Waits[int]:
        """Reset the prefix cache of the pool, and remove all its blocks from the tiers below, so that none comes
        back."""
        self.pool_loader.reset()
        namespace, chain = self.namespace.open(), self._store.chain
        begun = [] if chain is None or namespace is None else chain.begin_clear(namespace)
        num_freed = yield from reset_pool
        if namespace is not None:
            yield from self._store.blocks.clear_in_slices(namespace)
        self.pool_loader.reset()
        self._loader.forget_copied()
        if chain is not None:
            yield asyncio.ensure_future(chain.finish_clear(begun))
        return num_freed

    async def run(self) -> None:
        """Save blocks until the task is cancelled."""
        await self.spiller.run()

    async def flush(self, limit_s: float) -> None:
        """Save all cached blocks that may outlive the daemon, for at most so many seconds."""
        if self.namespace.identity.outlives_daemon:
            await self.spiller.flush(limit_s)

    async def close(self) -> None:
        """Wait for the loads in progress."""
        await self.pool_loader.close()

    def stats(self) -> SpillStats:
        """Return counters and gauges."""
        counters = {name: value for name, value in vars(self._counters).items() if name in SpillStats._fields}
        return SpillStats(
            **counters,
            queued=self.spiller.num_queued,
            loading=self.pool_loader.num_loading,
            save_bytes_per_s=self._counters.save_speed.bytes_per_s,
            load_bytes_per_s=self._counters.load_speed.bytes_per_s,
        )


def open_pool_tier(
    config: ServeConfig, engine: CacheEngine, store: ServerStore | None, clock: Clock | None = None
) -> PoolTier | None:
    """Return the pool's tier. Returns None without a store or a prefix cache, or if the option is off."""
    if store is None or not config.spill or not config.enable_prefix_caching:
        return None
    tier = PoolTier(config, engine, store, clock)
    if store.chain is not None and not tier.namespace.identity.outlives_daemon:
        logger.warning("computed blocks of the pool stay in memory, and go to no tier below: weights has no name")
    return tier


# ---- loading
#
# missing blocks ─▶ in the store's memory, or brought up ─▶ allocated in the pool ─▶ copied, checksums ─▶ found by all

# Blocks of one prompt that are looked up at once.
MAX_BLOCKS: Final = 8192
# A wait of a prompt for a tier, however long computing would take.
MAX_WAIT_S: Final = 30.0


class PoolLoader:
    """Loads missing blocks of prompts, if that takes less time than computing them, by measured speeds."""

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
        # Blocks that were loaded before a reset are not published after it.
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
