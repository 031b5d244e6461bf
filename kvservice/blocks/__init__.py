"""Bookkeeping of the KV pool: which sequence's tokens lie in which block. Plain Python and NumPy.

plans       the frozen values that go out       tier        who holds a block, which are free or cached
arguments   the caller's values, checked        eviction    the order in which cached blocks are given up
sequences   rows and the names for them         prefix      chain hashes and their index
ages        how long blocks live and idle       events      what enters and leaves the index
manager     BlockManager, of one file per kind of operation; integrity checks what they must keep true
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
