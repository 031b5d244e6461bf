"""Reference attention in float64 and the pool's layout, from their definitions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

# Pool dtypes only: the stored value times its head's scale is the value.
POOL_DTYPES = {
    **DTYPES,
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}

# Bounds of the relative error of one token and head, in the Euclidean norm over the head's dimensions. The result is
# rounded once to the dtype, with unit roundoff u = 2^-24, 2^-11, 2^-8; in a norm over many dimensions about half of it
# remains. If the processor multiplies bfloat16, weights are also rounded to bfloat16 before the product with V, with
# errors of random sign. The errors of float32 sums over up to 256 dimensions and a few hundred keys, and of an
# exponential with relative error 2e-7, are well below 1e-5, also with a soft cap, which multiplies the error of the
# exponential by the cap.
ERROR_BOUND = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 1.5 * 2.0**-8}


class Sparse(NamedTuple):
    """Block-sparse attention. Besides the last `local_blocks` sparse blocks, the attended blocks depend on the head."""

    vert_stride: int
    local_blocks: int
    block_size: int
    head_sliding_step: int
    tp_rank: int


@dataclass(frozen=True)
class Case:
    """Shapes and options of one call."""

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
    pool_dtype: str | None = None  # dtype of an FP8 pool; other pools have `dtype`
    scaled: bool = False
    sparse: Sparse | None = None

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


@dataclass
class Batch:
    """A pool filled for a case. Unused slots are NaN, block tables are a random permutation, unused entries are -1.

    `keys` and `values` are the stored numbers; with scales there are `k_scale` and `v_scale` float32[num_kv_heads].
    """

    case: Case
    pool: Array
    query: Array
    query_lens: Array
    block_tables: Array
    context_lens: Array
    keys: list[Array]  # per sequence, [context_len, num_kv_heads, head_size]
    values: list[Array]
    options: dict[str, Any] = field(default_factory=dict)
    k_scale: Array | None = None
    v_scale: Array | None = None

    def arguments(self) -> tuple[Any, ...]:
        return self.pool, self.case.layer, self.query, self.query_lens, self.block_tables, self.context_lens


def put(pool: Array, layer: int, block: int, offset: int, block_size: int, key: Array, value: Array) -> None:
    """Write one token's key and value [num_kv_heads, head_size] into the pool, element by element."""
    num_kv_heads, head_size = key.shape
    x = 16 // pool.itemsize
    k = pool[block, layer, 0].reshape(num_kv_heads, head_size // x, block_size, x)
    v = pool[block, layer, 1].reshape(num_kv_heads, head_size, block_size)
    k[:, :, offset, :] = key.reshape(num_kv_heads, head_size // x, x)
    v[:, :, offset] = value


def put_sequence(pool: Array, layer: int, blocks: Array, block_size: int, key: Array, value: Array) -> None:
    """Write keys and values [num_tokens, num_kv_heads, head_size] of a whole sequence into its blocks. The rest of the
    last block becomes NaN.
    """
    num_tokens, num_kv_heads, head_size = key.shape
    x = 16 // pool.itemsize
    padded = np.full((2, len(blocks) * block_size, num_kv_heads, head_size), np.nan, pool.dtype)
    padded[:, :num_tokens] = key, value
    shape = (len(blocks), num_kv_heads, head_size * block_size)
    keys = padded[0].reshape(-1, block_size, num_kv_heads, head_size // x, x).transpose(0, 2, 3, 1, 4)
    values = padded[1].reshape(-1, block_size, num_kv_heads, head_size).transpose(0, 2, 3, 1)
    pool[blocks, layer, 0], pool[blocks, layer, 1] = keys.reshape(shape), values.reshape(shape)


def make_batch(case: Case) -> Batch:
    rng = np.random.default_rng(case.seed)
    dtype, pool_dtype = DTYPES[case.dtype], POOL_DTYPES[case.pool_dtype or case.dtype]
    blocks_of = [-(-length // case.block_size) for length in case.context_lens]
    num_blocks = sum(blocks_of) + 3
    shape = (num_blocks, case.num_layers, 2, case.num_kv_heads, case.head_size * case.block_size)
    pool = np.full(shape, np.nan, pool_dtype)
    ids = rng.permutation(num_blocks).astype(np.int32)
    tables = np.full((len(case.context_lens), max(blocks_of, default=0) + 1), -1, np.int32)
    keys, values, used = [], [], 0
    for seq, length in enumerate(case.context_lens):
        tables[seq, : blocks_of[seq]] = ids[used : used + blocks_of[seq]]
        used += blocks_of[seq]
        key, value = (
            rng.standard_normal((length, case.num_kv_heads, case.head_size), np.float32).astype(pool_dtype)
            for _ in range(2)
        )
        put_sequence(pool, case.layer, tables[seq, : blocks_of[seq]], case.block_size, key, value)
        keys.append(key)
        values.append(value)
    query = rng.standard_normal((case.num_tokens, case.num_heads, case.head_size), np.float32).astype(dtype)
    options: dict[str, Any] = {
        "scale": case.scale,
        "sliding_window": case.sliding_window,
        "logits_soft_cap": case.logits_soft_cap,
        "alibi_slopes": None,
    }
    if case.alibi:
        options["alibi_slopes"] = (2.0 ** -np.linspace(1, 8, case.num_heads)).astype(np.float32)
    lens = np.asarray(case.query_lens, np.int32), np.asarray(case.context_lens, np.int32)
    batch = Batch(case, pool, query, lens[0], tables, lens[1], keys, values, options)
    if case.scaled:
        batch.k_scale, batch.v_scale = rng.uniform(0.25, 2.0, (2, case.num_kv_heads)).astype(np.float32)
    return batch


def visible(case: Case, head: int, positions: Array, num_keys: int) -> Array:
    """Return bool[len(positions), num_keys]: the keys to which the queries at these positions attend."""
    query, key = positions[:, None], np.arange(num_keys)[None]
    seen: Array = key <= query
    if case.sliding_window:
        seen &= key > query - case.sliding_window
    if case.sparse:
        step, rank = case.sparse.head_sliding_step, case.sparse.tp_rank
        if step >= 0:
            offset = (rank * case.num_heads + head) * step + 1
        else:
            offset = (rank * case.num_kv_heads + head // case.group) * -step + 1
        key_block, query_block = key // case.sparse.block_size, query // case.sparse.block_size
        local = key_block > query_block - case.sparse.local_blocks
        seen &= local | ((key_block + offset) % case.sparse.vert_stride == 0)
    return seen


def attend_head(
    batch: Batch, head: int, positions: Array, query: Array, key: Array, value: Array
) -> tuple[Array, Array]:
    """Return output and log-sum-exp of one sequence and head, for `query` [len(positions), head_size], `key` and
    `value` [num_keys, head_size], all float64.
    """
    case = batch.case
    scale = case.scale if case.scale is not None else case.head_size**-0.5
    logits = query @ key.T * scale
    if case.logits_soft_cap:
        logits = case.logits_soft_cap * np.tanh(logits / case.logits_soft_cap)
    if case.alibi:
        distance = np.arange(len(key))[None] - positions[:, None]
        logits = logits + float(batch.options["alibi_slopes"][head]) * distance
    logits = np.where(visible(case, head, positions, len(key)), logits, -np.inf)
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights @ value / total, (top + np.log(total))[:, 0]


def reference(batch: Batch) -> tuple[Array, Array]:
    """Return output float64[num_tokens, num_heads, head_size] and log-sum-exp float64[num_tokens, num_heads]."""
    case = batch.case
    query = batch.query.astype(np.float64)
    out, lse = np.zeros(query.shape), np.zeros(query.shape[:2])
    ends = np.cumsum(case.query_lens)
    k_scale, v_scale = (np.ones(case.num_kv_heads) if s is None else s for s in (batch.k_scale, batch.v_scale))
    for seq, (query_len, context_len) in enumerate(zip(case.query_lens, case.context_lens, strict=True)):
        if query_len == 0:
            continue
        tokens = slice(ends[seq] - query_len, ends[seq])
        positions = np.arange(context_len - query_len, context_len)
        for kv_head in range(case.num_kv_heads):
            key = batch.keys[seq][:, kv_head].astype(np.float64) * float(k_scale[kv_head])
            value = batch.values[seq][:, kv_head].astype(np.float64) * float(v_scale[kv_head])
            for head in range(kv_head * case.group, (kv_head + 1) * case.group):
                out[tokens, head], lse[tokens, head] = attend_head(
                    batch, head, positions, query[tokens, head], key, value
                )
    return out, lse


def relative_errors(got: Array, expected: Array) -> Array:
    """Return |got - expected| / |expected| per token and head, NaN where a value is NaN."""
    with np.errstate(invalid="ignore", over="ignore"):  # a wrong kernel may leave any values there
        difference = np.linalg.norm(got.astype(np.float64) - expected, axis=-1)
        return np.asarray(difference / np.linalg.norm(expected, axis=-1))


def compare(
    case: Case,
    expected: tuple[Array, Array],
    got: Array,
    lse: Array | None = None,
    *,
    bound: float,
    lse_bound: float = 2e-5,
) -> None:
    """Raise AssertionError unless `got` (and the log-sum-exp) match the expected values within the bounds."""
    errors = relative_errors(got, expected[0])
    if errors.size:
        worst = np.unravel_index(np.argmax(errors), errors.shape)  # NaN counts as the largest
        where = f"at token {worst[0]} head {worst[1]}, {np.sum(~(errors <= bound))} of {errors.size} too large"
        assert errors[worst] <= bound, f"relative error {errors[worst]:.3g} > {bound:.3g} {where} in {case}"
    if lse is not None:
        np.testing.assert_allclose(lse, expected[1], rtol=lse_bound, atol=lse_bound, err_msg=str(case))


def check(batch: Batch, got: Array, lse: Array | None = None) -> None:
    """Raise AssertionError unless `got` (and the log-sum-exp) match the batch within the bound of the dtype."""
    compare(batch.case, reference(batch), got, lse, bound=ERROR_BOUND[batch.case.dtype])
