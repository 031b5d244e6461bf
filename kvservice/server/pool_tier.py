"""The pool and the tiers below it: blocks are saved in the block store, and loaded from there before they are computed.

Allocate, Pin, Schedule ─▶ PoolTier ─▶ PoolLoader ─▶ TierChain or BlockStore ─▶ Device.load_blocks ─▶ Loader
cached blocks ─▶ Spiller ─▶ Device.save_blocks ─▶ BlockStore ─▶ what its tiers do with values
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Final, NamedTuple

from kvservice.blocks import MissingBlocks, Slices
from kvservice.blocks.allocation import NewSequence
from kvservice.blocks.plans import Int32Array
from kvservice.blocks.slices import Waits
from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.server.loop import Clock, SystemClock
from kvservice.server.pool_loading import MAX_BLOCKS, PoolLoader
from kvservice.server.pool_namespace import PoolNamespace, pool_identity
from kvservice.server.server_store import ServerStore
from kvservice.server.spill_counters import SpillCounters
from kvservice.server.spilling import Spiller
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

    def before_allocation(self, sequences: Sequence[NewSequence]) -> Awaitable[object] | None:
        """Load missing blocks of new sequences. Returns what to wait for before they are allocated, or None."""
        self.spiller.note_arrival()
        missing: list[MissingBlocks] = []
        for new in sequences[:_MAX_SEQUENCES]:
            if len(new.found):
                self.spiller.note_used(new.found)
            one = self._loader.missing(new.tokens, new.extra, new.found, MAX_BLOCKS)
            if one is not None:
                missing.append(one)
        if not missing:
            return None
        required = sum(new.required - len(new.found) for new in sequences)
        num_kept = max(required - sum(map(len, missing)), 0)
        return self.pool_loader.start(missing, num_kept, self._fixed_token_s or self._estimated_token_s)

    def before_admission(self, tokens: Int32Array, chain_hashes: list[bytes], token_s: float) -> PromptLoad | None:
        """Load missing blocks of a prompt whose chain hashes are known, and whose engine computes a token in `token_s`
        seconds. Returns None if there is nothing to load."""
        self.spiller.note_arrival()
        self.spiller.note_used(self._loader.find(chain_hashes))
        missing = self._loader.missing_of(tokens, chain_hashes, MAX_BLOCKS)
        if missing is None:
            return None
        done = self.pool_loader.start([missing], 0, self._fixed_token_s or token_s)
        return None if done is None else PromptLoad(missing.chain_hashes[0], done)

    def before_pin(self, tokens: Int32Array, extra_keys: Sequence[tuple[int, bytes]]) -> Awaitable[object] | None:
        """Load missing blocks of a prefix. Returns what to wait for, or None. Raises InvalidArgumentError."""
        missing = self._loader.missing_prefix(tokens, extra_keys, MAX_BLOCKS)
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
