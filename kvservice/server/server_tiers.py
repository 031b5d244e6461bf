"""The tiers below the block store that the configuration names."""

from __future__ import annotations

import functools
from pathlib import Path

from kvservice.config import GIB, ServeConfig
from kvservice.pool.sealed import SealedMemory
from kvservice.server.clock import Clock, SystemClock
from kvservice.server.mooncake import open_mooncake
from kvservice.server.private_folders import private_folder
from kvservice.store import BlockStore
from kvservice.tiers import ChildrenPipe, DiskOptions, DiskTier, LateTier, LowerTier, TierChain, TierError, WritePolicy


def open_chain(
    config: ServeConfig,
    blocks: BlockStore,
    memory: SealedMemory,
    children: ChildrenPipe,
    clock: Clock | None = None,
) -> TierChain | None:
    """Return the chain of tiers below the block store, or None if the configuration names none. Tiers open in the
    background: values in them are misses until then."""
    clock = clock or SystemClock()
    tiers = _tiers(config, memory, children, clock)
    # What one daemon has computed, others find in the Mooncake Store at once.
    policies = {"disk": WritePolicy(config.disk_admission), "mooncake": WritePolicy(soon=True)}
    return TierChain(blocks, tiers, clock, policies) if tiers else None


def _tiers(config: ServeConfig, memory: SealedMemory, children: ChildrenPipe, clock: Clock) -> list[LowerTier]:
    """Return the tiers in the order in which they are asked: the fastest first."""
    tiers: list[LowerTier] = []
    if config.disk_gib:
        tiers.append(LateTier("disk", functools.partial(_disk, config, memory), clock))
    if config.mooncake:
        tiers.append(open_mooncake(config, memory, children))
    return tiers


def _disk(config: ServeConfig, memory: SealedMemory) -> DiskTier:
    """Raises TierError, also while another process has the directory."""
    directory = Path(config.disk) / "values"
    try:
        private_folder(directory)
    except OSError as error:
        raise TierError(f"{directory}: {error.strerror}") from None
    options = DiskOptions(directory, int(config.disk_gib * GIB), num_threads=config.disk_threads)
    return DiskTier(options, memory.address, memory.num_bytes)
