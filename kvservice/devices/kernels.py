"""The CUDA kernels, with the parameters that all calls of a configuration share filled in."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from kvservice.attention_options import AttentionOptions
from kvservice.config import ServeConfig
from kvservice.devices.tables import DeviceStepTables
from kvservice.ops.cuda import set_options
from kvservice.ops.device_array import DTYPE_NUMBERS

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
