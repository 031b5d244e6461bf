"""Sizes of the daemon's workspaces on a GPU, and the number of blocks that fit beside them."""

from __future__ import annotations

from types import ModuleType

from kvservice.config import ServeConfig
from kvservice.devices.arena import ALIGNMENT, aligned
from kvservice.devices.kernels import common_attributes, new_attention
from kvservice.errors import ResourceExhaustedError
from kvservice.pool.layout import TENSOR_DTYPES

# Allocation granularity of device memory.
GRANULE_BYTES = 2 << 20
# Initial workspace of the lanes' executor. Few calls need more.
LANE_WORKSPACE_BYTES = 64 << 20
# GQA group sizes for which the workspace is computed. The number of query heads of clients is not known in advance.
GROUPS = (1, 4, 8, 16, 64)
# Limit of the kernels.
NUM_HEADS_MAX = 65535


def max_blocks_per_sequence(config: ServeConfig) -> int:
    return -(-config.max_sequence_tokens // config.block_size)


def arena_bytes(config: ServeConfig) -> int:
    """Return the arena size for the largest call: one message in, one message out, and the tables of its step."""
    max_blocks = max_blocks_per_sequence(config)
    if config.pool_blocks is not None:
        max_blocks = min(max_blocks, config.pool_blocks)
    tables = config.max_sequences * 4 * (max_blocks + 2)
    # A token's slot takes 8 bytes; its K and V take at least 64 bytes per head.
    slots = config.max_message_bytes // 8
    return 2 * config.max_message_bytes + aligned(tables) + aligned(slots) + 16 * ALIGNMENT


def workspace_bytes(cuda: ModuleType, config: ServeConfig) -> int:
    """Return the largest workspace that the largest calls need: all sequences and a single one, each with one token and
    with many."""
    wanted = 0
    attributes = common_attributes(config)
    for num_heads in (group * config.num_kv_heads for group in GROUPS):
        if num_heads > NUM_HEADS_MAX:
            break
        token_bytes = (num_heads + 2 * config.num_kv_heads) * config.head_size * TENSOR_DTYPES[config.dtype].itemsize
        most = max(1, config.max_message_bytes // token_bytes)
        for num_seqs in {1, min(config.max_sequences, most)}:
            longest = min(config.max_sequence_tokens, most - num_seqs + 1)
            for num_tokens, max_query_len in {(num_seqs, 1), (min(most, num_seqs * longest), longest)}:
                call = new_attention(cuda, attributes)
                call.num_blocks = 1 << 24
                call.max_blocks = call.num_common_blocks = max_blocks_per_sequence(config)
                call.num_heads, call.num_seqs = num_heads, num_seqs
                call.num_tokens, call.max_query_len = num_tokens, max_query_len
                wanted = max(wanted, call.wanted_workspace_bytes())
    return wanted


def blocks_that_fit(cuda: ModuleType, device: int, config: ServeConfig) -> int:
    """Return the number of blocks in the configured share of the memory that is free now, after the workspaces.

    Raises ResourceExhaustedError with the sizes if no block fits.
    """
    free, total = cuda.memory_info(device)
    free -= LANE_WORKSPACE_BYTES if config.shares_memory else 0
    usable = int(free * config.gpu_memory_utilization) // GRANULE_BYTES * GRANULE_BYTES
    num_blocks = usable // config.layout.block_bytes
    if num_blocks < 1:
        raise ResourceExhaustedError(
            f"no block of {config.layout.block_bytes} bytes fits: the GPU has {free} bytes free of {total} beside the "
            f"daemon's workspaces, of which {config.gpu_memory_utilization:g} may be used",
            field="gpu_memory_utilization",
            wanted=config.layout.block_bytes,
            free=free,
            total=total,
        )
    return num_blocks
