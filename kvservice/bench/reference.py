"""Attention in float64, which the outputs of kernels are compared with, on arrays of NumPy or of torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any


def attention_rows(xp: ModuleType, query: Any, keys: Any, values: Any, hidden: Any, scale: float) -> Any:
    """Return the attention of some tokens of one sequence, float64 `[num_rows, num_heads, head_size]`.

    `xp` is numpy or torch. `query` float64 `[num_rows, num_heads, head_size]`, `keys` and `values` float64
    `[num_kv_heads, context, head_size]`, `hidden` bool `[num_rows, context]`: the keys that a row
    does not attend to.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads = len(keys)
    grouped = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_size)
    out = xp.empty_like(grouped)
    for head in range(num_kv_heads):
        logits = xp.where(hidden[:, None], -xp.inf, grouped[:, head] @ keys[head].T * scale)
        weights = xp.exp(logits - xp.amax(logits, -1)[..., None])
        out[:, head] = weights @ values[head] / weights.sum(-1)[..., None]
    return out.reshape(query.shape)


def largest_error(got: Any, expected: Any) -> float:
    """Return the largest |got - expected| / |expected| over all heads, float64 `[..., head_size]`."""
    square = ((got - expected) ** 2).sum(-1) / (expected**2).sum(-1)
    return math.sqrt(square.max())


def sampled(count: int, samples: int, extra: Sequence[int] = ()) -> list[int]:
    """Return about `samples` of `range(count)` at equal distances, with the last one, and those in `extra`."""
    return sorted({*range(0, count, max(1, -(-count // samples))), count - 1, *extra})
