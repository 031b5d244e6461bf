"""The CUDA kernels with the parameters that all calls of a configuration share, and the sizes of their workspaces."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from kvservice.attention_options import AttentionOptions
from kvservice.config import ServeConfig
from kvservice.devices.arena import ALIGNMENT, DeviceStepTables, aligned
from kvservice.errors import ResourceExhaustedError
from kvservice.ops.cuda import DTYPE_NUMBERS, set_options
from kvservice.pool.layout import TENSOR_DTYPES

if TYPE_CHECKING:
    from kvservice import _cuda


def common_attributes(config: ServeConfig) -> dict[str, float]:
    """Return the attributes that all attention calls of a configuration share."""
    layout = config.layout
    return {
        "pool_dtype": DTYPE_NUMBERS[layout.dtype],
        "dtype": DTYPE_NUMBERS[config.dtype],
        "num_layers": layout.num_layers,
        "num_kv_heads": layout.num_kv_heads,
        "head_size": layout.head_size,
        "block_size": layout.block_size,
        "scale": layout.head_size**-0.5,
        "batch_invariant": config.batch_invariant,
    }


def new_attention(cuda: ModuleType, attributes: Mapping[str, float]) -> _cuda.Attention:
    call: _cuda.Attention = cuda.Attention()
    for name, value in attributes.items():
        setattr(call, name, value)
    return call


class CudaPoolKernels:
    """The kernels for one pool. `pool` is the address of `num_blocks` blocks. `scales` is the address of
    float32[2, num_layers, num_kv_heads], or 0."""

    def __init__(
        self, cuda: ModuleType, config: ServeConfig, stream: int, pool: int, num_blocks: int, scales: int
    ) -> None:
        layout = config.layout
        self.cuda = cuda
        self.config = config
        self.stream = stream
        self._common = common_attributes(config) | {"pool": pool, "num_blocks": num_blocks, "stream": stream}
        sizes = (num_blocks, layout.num_layers, layout.num_kv_heads, layout.head_size, layout.block_size)
        self._pool_arguments = (pool, DTYPE_NUMBERS[layout.dtype], *sizes)
        self._dtype = DTYPE_NUMBERS[config.dtype]
        row_bytes = 4 * layout.num_kv_heads
        # Addresses of the scales of keys and of values, per layer.
        self._scales = [
            (scales + row_bytes * layer, scales + row_bytes * (layout.num_layers + layer)) if scales else (0, 0)
            for layer in range(layout.num_layers)
        ]

    def write(self, layer: int, num_tokens: int, slots: int, key: int, value: int) -> None:
        self.cuda.write_kv(*self._kv(layer, num_tokens, slots, key, value))

    def read(self, layer: int, num_tokens: int, slots: int, key: int, value: int) -> None:
        self.cuda.read_kv(*self._kv(layer, num_tokens, slots, key, value))

    def _kv(self, layer: int, num_tokens: int, slots: int, key: int, value: int) -> tuple[int, ...]:
        tensors = (layer, num_tokens, slots, key, value, self._dtype)
        return (*self._pool_arguments, *tensors, *self._scales[layer], self.stream)

    def attention(self, layer: int) -> _cuda.Attention:
        call = new_attention(self.cuda, self._common)
        call.layer = layer
        call.k_scale, call.v_scale = self._scales[layer]
        return call

    def attention_over(
        self, tables: DeviceStepTables, layer: int, num_heads: int, options: AttentionOptions
    ) -> _cuda.Attention:
        """Return an attention call without its tensors and its workspace."""
        call = self.attention(layer)
        call.num_tokens, call.num_seqs, call.num_heads = tables.num_tokens, tables.num_seqs, num_heads
        call.max_blocks, call.max_query_len = tables.max_blocks, tables.max_query_len
        call.query_lens, call.context_lens = tables.query_lens, tables.context_lens
        call.block_tables, call.num_common_blocks = tables.block_tables, tables.num_common_blocks
        set_options(call, options)
        return call


# ---- sizes of the daemon's workspaces on a GPU, and the number of blocks that fit beside them


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
