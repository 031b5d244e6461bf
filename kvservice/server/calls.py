"""The handlers of all calls within a session."""

from __future__ import annotations

from kvservice.config import ServeConfig
from kvservice.engine import CacheEngine
from kvservice.server.attention_calls import AttentionCalls
from kvservice.server.block_calls import BlockCalls
from kvservice.server.handlers import Handler
from kvservice.server.host_calls import HostCalls
from kvservice.server.loop import Clock, SystemClock
from kvservice.server.region_calls import RegionCalls
from kvservice.server.scheduler_calls import SchedulerCalls
from kvservice.server.sessions.saved import SavedSessions
from kvservice.server.store_calls import StoreCalls
from kvservice.server.store_copy_calls import StoreCopyCalls
from kvservice.server.tiering.pool_tier import PoolTier
from kvservice.server.tiering.store import ServerStore
from kvservice.server.transfer_calls import TransferCalls


def session_handlers(
    config: ServeConfig,
    engine: CacheEngine,
    store: ServerStore | None,
    saved: SavedSessions,
    tier: PoolTier | None = None,
    clock: Clock | None = None,
) -> tuple[Handler, ...]:
    return (
        *BlockCalls(config, engine, saved.swaps, tier).handlers(),
        *AttentionCalls(config, engine).handlers(),
        *RegionCalls().handlers(),
        *TransferCalls().handlers(),
        *HostCalls(engine.manager).handlers(),
        *SchedulerCalls(config, engine, tier, (clock or SystemClock()).time).handlers(),
        *StoreCalls(store).handlers(),
        *StoreCopyCalls(config, store).handlers(),
        *saved.handlers(),
    )
