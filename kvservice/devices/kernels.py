"""The CUDA kernels with what all calls of a configuration have in common filled in."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from kvservice.config import ServeConfig
from kvservice.devices.base import AttentionOptions
from kvservice.devices.tables import StepTables
from kvservice.ops.device_array import DTYPE_NUMBERS

if TYPE_CHECKING:
    from kvservice import _cuda

# What is zero of a workspace before its first launch, and after every one.
COUNTER_BYTES = 1 << 16


def new_attention(cuda: ModuleType, config: ServeConfig) -> _cuda.Attention:
    """A call of the configuration's shape, default scale."""
    call: _cuda.Attention = cuda.Attention()
    layout = config.layout
    call.pool_dtype, call.dtype = DTYPE_NUMBERS[layout.dtype], DTYPE_NUMBERS[config.dtype]
    call.num_layers, call.num_kv_heads = layout.num_layers, layout.num_kv_heads
    call.head_size, call.block_size = layout.head_size, layout.block_size
    call.scale = layout.head_size**-0.5
    call.batch_invariant = config.batch_invariant
    return call


@dataclass
class Kernels:
    """`pool` is the address of `num_blocks` blocks; `scales` that of float32[2, num_layers, num_kv_heads], or 0."""

    cuda: ModuleType
    config: ServeConfig
    stream: int
    pool: int
    num_blocks: int
    scales: int

    def write(self, layer: int, num_tokens: int, slots: int, key: int, value: int) -> None:
        self.cuda.write_kv(*self._kv(layer, num_tokens, slots, key, value))

    def read(self, layer: int, num_tokens: int, slots: int, key: int, value: int) -> None:
        self.cuda.read_kv(*self._kv(layer, num_tokens, slots, key, value))

    def _kv(self, layer: int, num_tokens: int, slots: int, key: int, value: int) -> tuple[int, ...]:
        layout = self.config.layout
        return (
            self.pool,
            DTYPE_NUMBERS[layout.dtype],
            self.num_blocks,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_size,
            layout.block_size,
            layer,
            num_tokens,
            slots,
            key,
            value,
            DTYPE_NUMBERS[self.config.dtype],
            *self._scales(layer),
            self.stream,
        )

    def _scales(self, layer: int) -> tuple[int, int]:
        """Of keys and of values."""
        if not self.scales:
            return 0, 0
        layers, row_bytes = self.config.num_layers, 4 * self.config.num_kv_heads
        return self.scales + row_bytes * layer, self.scales + row_bytes * (layers + layer)

    def attention(self, layer: int) -> _cuda.Attention:
        call = new_attention(self.cuda, self.config)
        call.pool, call.num_blocks, call.layer = self.pool, self.num_blocks, layer
        call.k_scale, call.v_scale = self._scales(layer)
        call.stream = self.stream
        return call

    def attention_over(
        self, tables: StepTables, layer: int, num_heads: int, options: AttentionOptions
    ) -> _cuda.Attention:
        """A call but for its tensors and its workspace."""
        call = self.attention(layer)
        call.num_tokens, call.num_seqs, call.num_heads = tables.num_tokens, tables.num_seqs, num_heads
        call.max_blocks, call.max_query_len = tables.max_blocks, tables.max_query_len
        call.query_lens, call.context_lens = tables.query_lens, tables.context_lens
        call.block_tables = tables.block_tables
        if options.scale is not None:
            call.scale = options.scale
        call.soft_cap, call.sliding_window = options.logits_soft_cap, options.sliding_window
        sparse = options.block_sparse
        if sparse is not None:
            call.sparse = (
                sparse.vert_stride,
                sparse.local_blocks,
                sparse.block_size,
                sparse.head_sliding_step,
                sparse.tp_rank,
            )
        return call
