"""Attention and the pool's layout from their definitions, in float64 and one token at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Relative error of one token and head, in the Euclidean norm over the head's dimensions. The result is rounded once to
# the dtype: unit roundoff u = 2^-24, 2^-11, 2^-8, of which a norm over many dimensions sees about half. Where the
# processor multiplies bfloat16, weights are rounded to it too before they meet V, errors random in sign. float32 sums
# over up to 256 dimensions and a few hundred keys, and an exponential of relative error 2e-7, stay well below 1e-5,
# also behind a soft cap, which multiplies the exponential's error by the cap.
ERROR_BOUND = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 1.5 * 2.0**-8}


@dataclass(frozen=True)
class Case:
    """One call: shapes and options."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    dtype: str = "float32"
    head_size: int = 64
    block_size: int = 16
    num_kv_heads: int = 2
    group: int = 2
    num_layers: int = 2
    layer: int = 1
    scale: float | None = None
    sliding_window: int = 0
    logits_soft_cap: float = 0.0
    alibi: bool = False
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass
class Batch:
    """A pool filled for a case: unused slots are NaN, the block tables a random permutation, unused entries -1."""

    case: Case
    pool: Array
    query: Array
    query_lens: Array
    block_tables: Array
    context_lens: Array
    keys: list[Array]  # of each sequence, [context_len, num_kv_heads, head_size]
    values: list[Array]
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, ...]:
        return self.pool, self.case.layer, self.query, self.query_lens, self.block_tables, self.context_lens


def put(pool: Array, layer: int, block: int, offset: int, block_size: int, key: Array, value: Array) -> None:
    """One token's key and value [num_kv_heads, head_size] into the pool, element by element as the layout says."""
    num_kv_heads, head_size = key.shape
    x = 16 // pool.itemsize
    k = pool[block, layer, 0].reshape(num_kv_heads, head_size // x, block_size, x)
    v = pool[block, layer, 1].reshape(num_kv_heads, head_size, block_size)
    k[:, :, offset, :] = key.reshape(num_kv_heads, head_size // x, x)
    v[:, :, offset] = value


def make_batch(case: Case) -> Batch:
    rng = np.random.default_rng(case.seed)
    dtype = DTYPES[case.dtype]
    blocks_of = [-(-length // case.block_size) for length in case.context_lens]
    num_blocks = sum(blocks_of) + 3
    shape = (num_blocks, case.num_layers, 2, case.num_kv_heads, case.head_size * case.block_size)
    pool = np.full(shape, np.nan, dtype)
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(case.context_lens), max(blocks_of, default=0) + 1), -1, np.int32)
    keys, values, used = [], [], 0
    for seq, length in enumerate(case.context_lens):
        tables[seq, : blocks_of[seq]] = ids[used : used + blocks_of[seq]]
        used += blocks_of[seq]
        key, value = (
            rng.standard_normal((length, case.num_kv_heads, case.head_size), np.float32).astype(dtype) for _ in range(2)
        )
        for pos in range(length):
            block = int(tables[seq, pos // case.block_size])
            put(pool, case.layer, block, pos % case.block_size, case.block_size, key[pos], value[pos])
        keys.append(key)
        values.append(value)
    num_tokens = sum(case.query_lens)
    query = rng.standard_normal((num_tokens, case.num_heads, case.head_size), np.float32).astype(dtype)
    options: dict[str, Any] = {
        "scale": case.scale,
        "sliding_window": case.sliding_window,
        "logits_soft_cap": case.logits_soft_cap,
        "alibi_slopes": None,
    }
    if case.alibi:
        options["alibi_slopes"] = (2.0 ** -np.linspace(1, 8, case.num_heads)).astype(np.float32)
    lens = np.asarray(case.query_lens, np.int32), np.asarray(case.context_lens, np.int32)
    return Batch(case, pool, query, lens[0], tables, lens[1], keys, values, options)


def reference(batch: Batch) -> tuple[Array, Array]:
    """Output float64[num_tokens, num_heads, head_size] and log-sum-exp float64[num_tokens, num_heads]."""
    case = batch.case
    scale = case.scale if case.scale is not None else case.head_size**-0.5
    query = batch.query.astype(np.float64)
    out, lse = np.zeros(query.shape), np.zeros(query.shape[:2])
    token = 0
    for query_len, context_len, key, value in zip(
        case.query_lens, case.context_lens, batch.keys, batch.values, strict=True
    ):
        key, value = key.astype(np.float64), value.astype(np.float64)
        for position in range(context_len - query_len, context_len):
            first = max(0, position - case.sliding_window + 1) if case.sliding_window else 0
            seen = np.arange(first, position + 1)
            for head in range(case.num_heads):
                kv_head = head // case.group
                logits = key[seen, kv_head] @ query[token, head] * scale
                if case.logits_soft_cap:
                    logits = case.logits_soft_cap * np.tanh(logits / case.logits_soft_cap)
                if case.alibi:
                    logits = logits + float(batch.options["alibi_slopes"][head]) * (seen - position)
                top = logits.max()
                weights = np.exp(logits - top)
                out[token, head] = weights @ value[seen, kv_head] / weights.sum()
                lse[token, head] = top + np.log(weights.sum())
            token += 1
    return out, lse


def relative_error(got: Array, expected: Array) -> float:
    """Of each token and head, the largest: |got - expected| / |expected|. NaN where anything is NaN."""
    if expected.size == 0:
        return 0.0
    difference = np.linalg.norm(got.astype(np.float64) - expected, axis=-1)
    return float(np.max(difference / np.linalg.norm(expected, axis=-1)))


def check(batch: Batch, got: Array, lse: Array | None = None) -> None:
    """Raises AssertionError unless `got` (and the log-sum-exp) are those of the batch, within the dtype's bound."""
    expected, expected_lse = reference(batch)
    error = relative_error(got, expected)
    assert error <= ERROR_BOUND[batch.case.dtype], f"relative error {error:.3g} in {batch.case}"
    if lse is not None:
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
