"""What the daemon reports to its observer about the tiers below the pool."""

from __future__ import annotations

from kvservice.server.sessions.saved import SavedSessions
from kvservice.server.tiering.pool_tier import PoolTier
from kvservice.telemetry.arrays import SharedArrays
from kvservice.telemetry.figures import FiguresTable, SavedStats
from kvservice.telemetry.tiers import TierTable
from kvservice.tiers import TierChain, TierStats
from kvservice.tiers.spill_stats import SpillStats


class TierReports:
    """Writes the figures of what a daemon has of these parts into shared memory."""

    def __init__(
        self, arrays: SharedArrays, chain: TierChain | None, pool_tier: PoolTier | None, saved: SavedSessions
    ) -> None:
        self._chain, self._pool_tier, self._saved = chain, pool_tier, saved
        self._tiers = TierTable(arrays.zeros)
        self._spill_table = FiguresTable("spill", SpillStats, arrays.zeros)
        self._saved_table = FiguresTable("saved", SavedStats, arrays.zeros)

    def tiers(self) -> tuple[TierStats, ...]:
        """Return the figures of the tiers below the block store."""
        return () if self._chain is None else self._chain.stats()

    def write(self) -> None:
        self._tiers.write(self.tiers())
        if self._pool_tier is not None:
            self._spill_table.write(self._pool_tier.stats())
        if self._saved.files is not None:
            self._saved_table.write(self._saved.stats())
