"""Block management for the KV pool: block tables, allocation, prefix cache and swap. Python and NumPy, with
native loops over tables where a step would otherwise spend its time.

`BlockManager` is the API: it is the state together with all operations. Imports point down this list:

manager      BlockManager: the list of all operations
loading      Loader: blocks from outside, and copies of blocks
recovery     the state of an earlier process, and live steps of an orderly take-over
integrity    checks of all invariants
inspection   slots of tokens, descriptions, statistics
prefix       chain hashes; cached prefixes are found, pinned, dropped
swapping     to the swap tier and back; sequences as values and back
freeing      truncate, free, close a namespace
advancing    mixed batches, steps that follow another one, steps ahead
layers       written layers of a step, and its commit
steps        append and open a step: new blocks, copies of shared ones
allocation   new sequences: allocated, forked, rearranged

state        BlockState: session namespaces, rows of sequences, pins and the intent of the operation in progress
pool         ref counts, free blocks, the prefix index, the eviction queue, ages
quarantine   blocks that processes of lost sessions may still write, while these live
quotas       TenantQuota: what the namespaces of a tenant may have together
events       EventJournal: changes of the index
kept         values that survive the process; the tables of extra keys and of pins
arguments    sizes, limits and validation
slices       operations in slices
plans        frozen results
"""

from kvservice.blocks.allocation import FoundPrompt
from kvservice.blocks.arguments import BlocksConfig, TenantSalt, extra_keys_by_block
from kvservice.blocks.events import Cleared, EventJournal, RemovedBlocks, StoreChange, StoredBlock
from kvservice.blocks.kept import KeptMaps
from kvservice.blocks.loading import Loader, MissingBlocks, PoolCopy, PoolLoad
from kvservice.blocks.manager import BlockManager
from kvservice.blocks.plans import (
    Allocation,
    AllocationRequest,
    AllocStatus,
    BlockCopies,
    BlocksStats,
    PinnedPrefix,
    SequenceSnapshot,
    StepPlan,
    SwapPlan,
    numpy_memory,
)
from kvservice.blocks.pool import BUCKETS_S as AGE_BUCKETS_S
from kvservice.blocks.pool import IDLE_BEFORE_EVICTION, LIFETIME, REUSE_GAP
from kvservice.blocks.prefix import chain_hashes
from kvservice.blocks.quarantine import WaitingForWriters
from kvservice.blocks.quotas import TenantQuota, quota_exceeded
from kvservice.blocks.recovery import Recovery
from kvservice.blocks.slices import SLICE_SEQUENCES, Slices, Waits, finish, in_turn
from kvservice.blocks.state import (
    COMPUTED_TOKENS,
    NAMESPACE,
    NUM_BLOCKS,
    NUM_COUNTERS,
    SCHEDULED,
    SEQUENCE_ID,
    STEP,
    SWAPPED,
    DiskSequence,
    SessionNamespace,
)
from kvservice.blocks.swapping import RestoredBlocks, SavedSequence, SavedSequences, SavedTables

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
    "TenantQuota",
    "TenantSalt",
    "WaitingForWriters",
    "Waits",
    "chain_hashes",
    "extra_keys_by_block",
    "finish",
    "in_turn",
    "numpy_memory",
    "quota_exceeded",
]
