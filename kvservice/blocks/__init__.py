"""Block management for the KV pool: block tables, allocation, prefix cache and swap. Plain Python and NumPy.

plans       frozen result values                tier        reference counts, free and cached blocks
arguments   validation of arguments             eviction    LRU order of cached blocks
sequences   sequence slots and namespaces       prefix      chain hashes and the prefix index
ages        lifetimes and idle times of blocks  events      changes of the prefix index
manager     BlockManager, with one file per group of operations; `integrity` checks its invariants
"""

from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.events import EventJournal
from kvservice.blocks.manager import BlockManager
from kvservice.blocks.plans import (
    Allocation,
    AllocationRequest,
    AllocStatus,
    BlockCopies,
    BlocksStats,
    Pin,
    SequenceInfo,
    SequenceTables,
    Step,
    SwapPlan,
)
from kvservice.blocks.sequences import SequenceSpace
from kvservice.blocks.slices import Slices

__all__ = [
    "AllocStatus",
    "Allocation",
    "AllocationRequest",
    "BlockCopies",
    "BlockManager",
    "BlocksConfig",
    "BlocksStats",
    "EventJournal",
    "Pin",
    "SequenceInfo",
    "SequenceSpace",
    "SequenceTables",
    "Slices",
    "Step",
    "SwapPlan",
]
