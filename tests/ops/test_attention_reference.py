"""The comparison with float64 detects the errors of wrong kernels, at the widest bound of all kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_reference import Array, Batch, Case, Sparse, compare, make_batch, reference
from each_row import each_row

CASE = Case(
    (1, 6),
    (90, 70),
    dtype="bfloat16",
    pool_dtype="float8_e4m3fn",
    scaled=True,
    num_kv_heads=2,
    group=2,
    scale=0.25,
    sliding_window=60,
    logits_soft_cap=4.0,
    alibi=True,
    sparse=Sparse(3, 1, 16, 1, 1),
)
WIDEST_BOUND = 1.5 * 2.0**-8


def case_of(batch: Batch, **changed: Any) -> Array:
    return reference(replace(batch, case=replace(batch.case, **changed)))[0]


def pattern_of(batch: Batch, **changed: int) -> Array:
    assert batch.case.sparse is not None
    return case_of(batch, sparse=batch.case.sparse._replace(**changed))


def values_of(batch: Batch, change: Callable[[Array], Array]) -> Array:
    return reference(replace(batch, values=[change(values) for values in batch.values]))[0]


def keys_of(batch: Batch, change: Callable[[Array], Array]) -> Array:
    return reference(replace(batch, keys=[change(keys) for keys in batch.keys]))[0]


def one_changed(out: Array, token: int, head: int) -> Array:
    out = out.copy()
    out[token, head] *= 1.02
    return out


def token_lost(values: Array) -> Array:
    """The values of the last one are as if they had not been written."""
    values = values.copy()
    values[-1] = 0
    return values


def tile_exchanged(keys: Array) -> Array:
    keys = keys.copy()
    keys[-16:-8], keys[-8:] = keys[-8:].copy(), keys[-16:-8].copy()
    return keys


MUTANTS: dict[str, Callable[[Batch], Array]] = {
    "one head of one token by 2 %": lambda batch: one_changed(reference(batch)[0], 4, 3),
    "two dimensions exchanged": lambda batch: reference(batch)[0][..., [1, 0, *range(2, 64)]],
    "heads by one further": lambda batch: np.roll(reference(batch)[0], 1, axis=1),
    "tokens by one further": lambda batch: np.roll(reference(batch)[0], 1, axis=0),
    "last token lost": lambda batch: values_of(batch, token_lost),
    "keys of two tiles exchanged": lambda batch: keys_of(batch, tile_exchanged),
    "values one token late": lambda batch: values_of(batch, lambda values: np.roll(values, 1, axis=0)),
    "dimensions of keys rotated": lambda batch: keys_of(batch, lambda keys: np.roll(keys, 8, axis=2)),
    "scale of the head size": lambda batch: case_of(batch, scale=None),
    "window one too wide": lambda batch: case_of(batch, sliding_window=61),
    "window one too narrow": lambda batch: case_of(batch, sliding_window=59),
    "no window": lambda batch: case_of(batch, sliding_window=0),
    "no soft cap": lambda batch: case_of(batch, logits_soft_cap=0.0),
    "soft cap 3 % off": lambda batch: case_of(batch, logits_soft_cap=4.12),
    "no ALiBi": lambda batch: case_of(batch, alibi=False),
    "no key scales": lambda batch: reference(replace(batch, k_scale=None))[0],
    "no value scales": lambda batch: reference(replace(batch, v_scale=None))[0],
    "value scales exchanged": lambda batch: reference(replace(batch, v_scale=batch.v_scale[::-1]))[0],
    "all blocks seen": lambda batch: case_of(batch, sparse=None),
    "another stride": lambda batch: pattern_of(batch, vert_stride=4),
    "another local block": lambda batch: pattern_of(batch, local_blocks=2),
    "smaller sparse blocks": lambda batch: pattern_of(batch, block_size=8),
    "a pattern that stands still": lambda batch: pattern_of(batch, head_sliding_step=0),
    "a pattern of KV heads": lambda batch: pattern_of(batch, head_sliding_step=-1),
    "another rank": lambda batch: pattern_of(batch, tp_rank=0),
    "zeros": lambda batch: np.zeros(batch.query.shape),
    "one NaN": lambda batch: np.where(np.arange(64) == 9, np.nan, reference(batch)[0]),
}


def test_the_comparison_rejects_mutants() -> None:
    batch = make_batch(CASE)
    expected = reference(batch)
    compare(CASE, expected, expected[0].astype(batch.query.dtype), expected[1], bound=WIDEST_BOUND)
    with each_row() as row:
        for name, mutant in MUTANTS.items():
            with row(name), pytest.raises(AssertionError, match="relative error"):
                compare(CASE, expected, mutant(batch), bound=WIDEST_BOUND)


def test_the_comparison_rejects_another_log_sum_exp() -> None:
    expected = reference(make_batch(CASE))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(CASE, expected, expected[0], expected[1] + 3e-3, bound=WIDEST_BOUND, lse_bound=1e-4)


def test_a_sparse_pattern_as_its_definition_lists_it() -> None:
    """One query at position 79, blocks of 16: the keys of head 2, computed by hand."""
    case = Case((1,), (80,), sparse=Sparse(3, 1, 16, 2, 0), num_kv_heads=2, group=2)
    batch = make_batch(case)
    # Offset 2 * 2 + 1 = 5: blocks 1 and 4 by the stride; 4 is also the query's own block.
    seen = np.concatenate([np.arange(16, 32), np.arange(64, 80)])
    key, value = batch.keys[0][seen, 1].astype(np.float64), batch.values[0][seen, 1].astype(np.float64)
    logits = key @ batch.query[0, 2].astype(np.float64) / 8
    weights = np.exp(logits) / np.exp(logits).sum()
    out, lse = reference(batch)
    np.testing.assert_allclose(out[0, 2], weights @ value)
    np.testing.assert_allclose(lse[0, 2], np.log(np.exp(logits).sum()))
