"""A pool small enough to be exhausted, with a shape that reveals swapped axes."""

from __future__ import annotations

from typing import Any

SMALL_POOL: dict[str, Any] = {
    "num_layers": 2,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": "float32",
    "block_size": 4,
    "num_blocks": 64,
    "swap_space_gib": 32 * 4096 / 2**30,
    "watermark": 0.0,
    "max_sequences": 64,
    "max_sequence_tokens": 512,
    "session_grace_s": 0.5,
    "max_message_mib": 4,
    "max_regions": 4,
    "max_region_mib": 32,
    "share_pool": "write",
    "store_gib": 1 / 64,
    "share_store": "write",
}
