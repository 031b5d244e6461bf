"""Invalid attention options with their errors. The check in Python and the one in C++ must both return these."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

NUM_HEADS, BLOCK_SIZE = 4, 8


class Vector(NamedTuple):
    options: dict[str, Any]  # arguments of AttentionOptions; those of `block_sparse` are arguments of BlockSparse
    field: str  # without the prefix "options."
    text: str


def _sparse(**changes: int) -> dict[str, Any]:
    return {"block_sparse": {"vert_stride": 2, "local_blocks": 1, "block_size": 16} | changes}


INVALID = (
    *(Vector({"scale": number}, "scale", "is not finite") for number in (math.nan, math.inf, -math.inf)),
    *(Vector({"sliding_window": number}, "sliding_window", "is negative") for number in (-1, -(2**31))),
    *(Vector({"logits_soft_cap": number}, "logits_soft_cap", "is not finite") for number in (math.nan, math.inf)),
    Vector({"logits_soft_cap": -1.0}, "logits_soft_cap", "is negative"),
    Vector({"alibi_slopes": [1.0, 1.0, 1.0, math.nan]}, "alibi_slopes", "are not all finite"),
    Vector({"alibi_slopes": [math.inf] * 4}, "alibi_slopes", "are not all finite"),
    Vector(_sparse(vert_stride=-1), "block_sparse.vert_stride", "is negative"),
    Vector(_sparse(local_blocks=0), "block_sparse.local_blocks", "is less than 1"),
    Vector(_sparse(local_blocks=-1), "block_sparse.local_blocks", "is less than 1"),
    Vector(_sparse(block_size=0), "block_sparse.block_size", "is less than 1"),
    Vector(_sparse(block_size=12), "block_sparse.block_size", "is not a multiple of the pool's block size"),
    Vector(_sparse(tp_rank=-1), "block_sparse.tp_rank", "is negative"),
)
# Both ends of each limit.
VALID: tuple[dict[str, Any], ...] = (
    {},
    {"scale": -3.0e38},
    {"scale": 3.0e38},
    {"sliding_window": 1},
    {"sliding_window": 2**31 - 1},
    {"logits_soft_cap": 1e-30},
    {"logits_soft_cap": 3.0e38},
    {"alibi_slopes": [-3.0e38, 0.0, 1.0, 3.0e38]},
    # A pattern that is off has no other values.
    {"block_sparse": {"vert_stride": 1, "local_blocks": 0, "block_size": 0, "tp_rank": -1}},
)
