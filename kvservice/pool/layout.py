"""Layout of a pool.

    pool[num_blocks][num_layers][K,V][num_kv_heads][...]      one allocation per device
      K of one (block, layer, head): [head_size/x][block_size][x]    x = 16 bytes / element size
      V of one (block, layer, head): [head_size][block_size]

The innermost part is vLLM's paged layout. The outermost index is the block, so the bytes of a block over all layers are
one contiguous range, and a copy-on-write copy or a swap is one copy per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

# Dtypes of keys, values, queries and outputs.
TENSOR_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# Dtypes of a pool: the same, and FP8 with a scale.
DTYPES: dict[str, np.dtype[Any]] = TENSOR_DTYPES | {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}


@dataclass(frozen=True)
class PoolLayout:
    """Shape of the K/V of one model in the pool. `dtype`, a key of `DTYPES`, is the storage type."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return DTYPES[self.dtype]

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of one block: `[num_layers, 2, num_kv_heads, head_size * block_size]`."""
        return (self.num_layers, 2, self.num_kv_heads, self.head_size * self.block_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of K/V of one token, over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * self.numpy_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size
