"""The CPU kernels, for pools that are NumPy arrays.

    pool    T[num_blocks, num_layers, 2, num_kv_heads, head_size * block_size]

T is float32, float16 or bfloat16 (`ml_dtypes.bfloat16`). Head sizes are multiples of 8 from 32 to 256, block sizes are
powers of two up to 256. `kvservice.pool.layout` describes the layout of a block.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from kvservice import _ext

Array: TypeAlias = npt.NDArray[Any]
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
Float32: TypeAlias = npt.NDArray[np.float32]


def write_kv(pool: Array, layer: int, slot_mapping: Int64, key: Array, value: Array) -> None:
    """Write the keys and values of new tokens into their slots (vLLM's `reshape_and_cache`).

    `slot_mapping` int64[num_tokens], `key` and `value` T[num_tokens, num_kv_heads, head_size]. If a slot occurs twice,
    the later token is kept.
    """
    _ext.write_kv(pool, layer, slot_mapping, key, value)


def read_kv(pool: Array, layer: int, slots: Int64, *, head_size: int) -> tuple[Array, Array]:
    """Return the keys and values of `slots` int64[num_tokens], each T[num_tokens, num_kv_heads, head_size]. This is the
    inverse of `write_kv`. It needs the head size because the pool's shape has only its product with the block size.
    """
    key, value = _ext.read_kv(pool, layer, slots, head_size)
    return key, value


@overload
def attention(
    pool: Array,
    layer: int,
    query: Array,
    query_lens: Int32,
    block_tables: Int32,
    context_lens: Int32,
    *,
    scale: float | None = ...,
    sliding_window: int = ...,
    logits_soft_cap: float = ...,
    alibi_slopes: Float32 | None = ...,
    batch_invariant: bool = ...,
    out: Array | None = ...,
    return_lse: Literal[False] = ...,
) -> Array: ...


@overload
def attention(
    pool: Array,
    layer: int,
    query: Array,
    query_lens: Int32,
    block_tables: Int32,
    context_lens: Int32,
    *,
    scale: float | None = ...,
    sliding_window: int = ...,
    logits_soft_cap: float = ...,
    alibi_slopes: Float32 | None = ...,
    batch_invariant: bool = ...,
    out: Array | None = ...,
    return_lse: Literal[True],
) -> tuple[Array, Float32]: ...


def attention(
    pool: Array,
    layer: int,
    query: Array,
    query_lens: Int32,
    block_tables: Int32,
    context_lens: Int32,
    *,
    scale: float | None = None,
    sliding_window: int = 0,
    logits_soft_cap: float = 0.0,
    alibi_slopes: Float32 | None = None,
    batch_invariant: bool = False,
    out: Array | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Float32]:
    """Paged attention over ragged queries: decode, extend and prefill (vLLM's paged attention, SGLang's extend).

    query           T[num_tokens, num_heads, head_size]; the new tokens of all sequences, one sequence after the other
    query_lens      int32[num_seqs]; new tokens of each sequence, their sum is num_tokens
    block_tables    int32[num_seqs, max_blocks]; entries past the context, or before the window, are not read
    context_lens    int32[num_seqs]; tokens in the pool, the new ones included
    scale           factor of the products, 1 / sqrt(head_size) if not given
    sliding_window  a query at position p attends to the positions p - window + 1 to p; 0: all up to p
    logits_soft_cap logits become cap * tanh(logit / cap), before bias and mask (Gemma 2); 0: off
    alibi_slopes    float32[num_heads]; adds slope * (key position - query position) (ALiBi)
    batch_invariant a sequence's result is bitwise independent of the rest of the batch
    out             destination of the result, contiguous, shares no memory with query
    return_lse      also return float32[num_tokens, num_heads], the natural logarithm of the sum of exponentials

    Query token j of a sequence is at position `context_len - query_len + j` and attends to all positions up to its own.
    Query head h reads KV head `h // (num_heads // num_kv_heads)`. Returns T[num_tokens, num_heads, head_size], or that
    and the log-sum-exp. Accumulation is in float32. With bfloat16 the attention weights are rounded to bfloat16 if the
    processor has bfloat16 multiplication.
    """
    options = scale, sliding_window, logits_soft_cap, alibi_slopes
    tables = query_lens, block_tables, context_lens
    if batch_invariant and _can_be_parted(query, *tables):
        return _one_by_one(pool, layer, query, tables, options, out, return_lse)
    result: Array | tuple[Array, Float32] = _ext.attention(pool, layer, query, *tables, *options, out, return_lse)
    return result


def _can_be_parted(query: Array, query_lens: Int32, *tables: Array) -> bool:
    """Return whether a batch can be split by sequence. An invalid batch is not split, so that the kernel reports the
    error for the whole call."""
    if not all(isinstance(array, np.ndarray) and array.ndim for array in (query, query_lens, *tables)):
        return False
    same = all(len(table) == len(query_lens) for table in tables)
    return same and len(query_lens) > 1 and bool((query_lens >= 0).all()) and int(query_lens.sum()) == len(query)


def _one_by_one(
    pool: Array,
    layer: int,
    query: Array,
    tables: tuple[Int32, Int32, Int32],
    options: tuple[Any, Any, Any, Any],
    out: Array | None,
    return_lse: bool,
) -> Array | tuple[Array, Float32]:
    """Attend to one sequence per call. The split of a call's work among threads depends on the whole batch, and the
    rounding of sums depends on the split."""
    if out is None:
        out = np.empty(query.shape, query.dtype)
    lse = np.empty(query.shape[:2], np.float32)
    start = 0
    for i, query_len in enumerate(tables[0].tolist()):
        part, one = slice(start, start + query_len), slice(i, i + 1)
        query_lens, block_tables, context_lens = (table[one] for table in tables)
        _, lse[part] = _ext.attention(
            pool, layer, query[part], query_lens, block_tables, context_lens, *options, out[part], True
        )
        start += query_len
    return (out, lse) if return_lse else out


def copy_blocks(src_pool: Array, dst_pool: Array, src_ids: Int32, dst_ids: Int32) -> None:
    """Copy block `src_ids[i]` of one pool to block `dst_ids[i]` of another or the same pool (vLLM's `copy_blocks` and
    `swap_blocks`). Each block is one contiguous range. `src_ids` and `dst_ids` are int32[num_copies]. No destination
    may occur twice, and within one pool no source may be a destination.
    """
    _ext.copy_blocks(src_pool, dst_pool, src_ids, dst_ids)


def num_threads() -> int:
    """Return the number of threads for a large call. The default is the number of CPUs available to the process."""
    return _ext.num_threads()


def set_num_threads(count: int) -> None:
    """Set the number of threads, from 1 to 1024. It applies from the next call on."""
    _ext.set_num_threads(count)


def cpu_isa() -> str:
    """Return the instruction set in use: the CPU's best one, or the value of `KVSERVICE_CPU_ISA` at the first call."""
    return _ext.cpu_isa()
