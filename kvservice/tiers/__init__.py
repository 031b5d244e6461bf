"""Tiers below the block store: disks and distributed stores that keep values when memory has no room for them."""

from kvservice.tiers.errors import TierError
from kvservice.tiers.protocol import GetResult, LowerTier, Space, TierStats, Values, space_of

__all__ = ["GetResult", "LowerTier", "Space", "TierError", "TierStats", "Values", "space_of"]
