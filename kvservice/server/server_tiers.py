"""The tiers below the block store that the configuration names."""

from __future__ import annotations

from kvservice.config import ServeConfig
from kvservice.pool.sealed import SealedMemory
from kvservice.server.clock import Clock, SystemClock
from kvservice.server.mooncake import open_mooncake
from kvservice.store import BlockStore
from kvservice.tiers import LowerTier, TierChain


def open_chain(
    config: ServeConfig, blocks: BlockStore, memory: SealedMemory, clock: Clock | None = None
) -> TierChain | None:
    """Return the chain of tiers below the block store, or None if the configuration names none. Tiers open in the
    background: values in them are misses until then."""
    tiers = _tiers(config, memory)
    return TierChain(blocks, tiers, clock or SystemClock()) if tiers else None


def _tiers(config: ServeConfig, memory: SealedMemory) -> list[LowerTier]:
    """Return the tiers in the order in which they are asked: the fastest first."""
    return [open_mooncake(config, memory)] if config.mooncake else []
