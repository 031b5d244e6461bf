"""Tiers below the block store: disks and distributed stores that keep values when memory has no room for them.

`TierChain` is the API for the daemon. Imports point down this list:

chain        TierChain: finds values in memory and below, brings them up, writes them below, removes them everywhere;
             WriteBehind: writes values to the tiers before they are evicted from memory
links        Link: a tier of the chain, with its rules for writing (AdmitAll, AdmitReused); removals, and the
             writes that they wait for; Reads: values on their way from a tier into memory
disk         DiskTier: files on a disk; LateTier: a tier that is opened when that succeeds
mooncake     MooncakeTier: a Mooncake Store that several hosts share; processes with Mooncake's library
measured     MeasuredTier: a tier with its figures, its speed, its time limits and its circuit breaker
protocol     LowerTier, the interface of a tier, and TierError; TierStats and SpillStats, figures
"""

from kvservice.tiers.chain import TierChain
from kvservice.tiers.disk import DiskOptions, DiskTier, LateTier
from kvservice.tiers.links import AdmissionRule, AdmitAll, AdmitReused, WritePolicy
from kvservice.tiers.measured import Speed
from kvservice.tiers.mooncake import ChildrenPipe, MooncakeTier
from kvservice.tiers.protocol import GetResult, LowerTier, Space, TierError, TierStats, Values, space_of

__all__ = [
    "AdmissionRule",
    "AdmitAll",
    "AdmitReused",
    "ChildrenPipe",
    "DiskOptions",
    "DiskTier",
    "GetResult",
    "LateTier",
    "LowerTier",
    "MooncakeTier",
    "Space",
    "Speed",
    "TierChain",
    "TierError",
    "TierStats",
    "Values",
    "WritePolicy",
    "space_of",
]
