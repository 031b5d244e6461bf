"""Block management for the KV pool: block tables, allocation, prefix cache and swap. Python and NumPy, with
native loops over tables where a step would otherwise spend its time.

`BlockManager` is the API. Its parts do the work, each on the same `BlockState`. Imports point down this list:

manager      BlockManager                          integrity    checks of all invariants (with sums, invariants)
allocation   Allocator: new sequences              swapping     Swapper: moves between the tiers
advancing    Advancer: mixed and following steps   layers       LayerTracker: written layers and the commit
steps        StepPlanner: append and open_step     sharing      Forker: fork and common prefixes
growth       GrowthPlanner: new blocks, copies     rearranging  Rearranger: sequences continue others
freeing      Reclaimer: truncate, free, close      prefix_cache PrefixCache: match, pin and reset
reopening    Reopener: steps over computed tokens   inspection   Inspector: slots, descriptions, statistics
ahead        AheadStepper: tokens not known yet
recovery     Recoverer: state of an earlier process saved_steps  live steps for an orderly take-over
loading      Loader: blocks from outside, copies    restoring    Restorer: sequences as values and back

state        BlockState: pools, slots, pins, namespaces and counters, as one value
block_pool   BlockPool and CachingBlockPool        eviction     EvictionQueue: cached blocks, LRU first
sequences    SequenceSlots: tables and states      namespaces   SessionNamespace: ids, steps, pins of one client
pins         PinTable                              prefix       chain hashes and PrefixIndex
stats        BlocksStats: gauges and counters        intents     the operation in progress, for a restart
events       EventJournal: changes of the index    ages         BlockAges: lifetimes and idle times of blocks

config, limits, arguments     sizes, limits of a request, validation
kept                          values of kept maps
plans, slices, ranges         frozen results, operations in slices, concatenated ranges
"""

from kvservice.blocks.ages import BUCKETS_S as AGE_BUCKETS_S
from kvservice.blocks.ages import IDLE_BEFORE_EVICTION, LIFETIME, REUSE_GAP
from kvservice.blocks.allocation import FoundPrompt
from kvservice.blocks.arguments import extra_keys_by_block
from kvservice.blocks.config import BlocksConfig
from kvservice.blocks.events import Cleared, EventJournal, RemovedBlocks, StoreChange, StoredBlock
from kvservice.blocks.kept import KeptMaps
from kvservice.blocks.loading import Loader, MissingBlocks, PoolCopy, PoolLoad
from kvservice.blocks.manager import BlockManager
from kvservice.blocks.namespaces import COMPUTED_TOKENS, NUM_COUNTERS, DiskSequence, SessionNamespace
from kvservice.blocks.plans import (
    Allocation,
    AllocationRequest,
    AllocStatus,
    BlockCopies,
    PinnedPrefix,
    SequenceSnapshot,
    StepPlan,
    SwapPlan,
    numpy_memory,
)
from kvservice.blocks.prefix import chain_hashes
from kvservice.blocks.recovery import Recovery
from kvservice.blocks.restoring import RestoredBlocks, SavedSequence, SavedSequences, SavedTables
from kvservice.blocks.sequences import NAMESPACE, NUM_BLOCKS, SCHEDULED, SEQUENCE_ID, STEP, SWAPPED
from kvservice.blocks.slices import SLICE_SEQUENCES, Slices, Waits, finish, in_turn
from kvservice.blocks.stats import BlocksStats

__all__ = [
    "AGE_BUCKETS_S",
    "COMPUTED_TOKENS",
    "IDLE_BEFORE_EVICTION",
    "LIFETIME",
    "NAMESPACE",
    "NUM_BLOCKS",
    "NUM_COUNTERS",
    "REUSE_GAP",
    "SCHEDULED",
    "SEQUENCE_ID",
    "SLICE_SEQUENCES",
    "STEP",
    "SWAPPED",
    "AllocStatus",
    "Allocation",
    "AllocationRequest",
    "BlockCopies",
    "BlockManager",
    "BlocksConfig",
    "BlocksStats",
    "Cleared",
    "DiskSequence",
    "EventJournal",
    "FoundPrompt",
    "KeptMaps",
    "Loader",
    "MissingBlocks",
    "PinnedPrefix",
    "PoolCopy",
    "PoolLoad",
    "Recovery",
    "RemovedBlocks",
    "RestoredBlocks",
    "SavedSequence",
    "SavedSequences",
    "SavedTables",
    "SequenceSnapshot",
    "SessionNamespace",
    "Slices",
    "StepPlan",
    "StoreChange",
    "StoredBlock",
    "SwapPlan",
    "Waits",
    "chain_hashes",
    "extra_keys_by_block",
    "finish",
    "in_turn",
    "numpy_memory",
]
