"""Wrong arguments: each error names the argument, nothing is written, nothing crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_reference import Batch, Case, check, make_batch
from each_row import each_row

from kvservice import ops
from kvservice.errors import InvalidArgumentError


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def overlap() -> tuple[np.ndarray, np.ndarray]:
    memory = np.zeros((4, 4, 64), np.float32)
    return memory[:3], memory[1:]


# Three tokens of two sequences, 4 query heads on 2 KV heads of 64, blocks of 16, context lengths 20 and 33.
ATTENTION: dict[str, tuple[str, Callable[[Batch], dict[str, Any]]]] = {
    "pool is a list": ("pool", lambda b: {"pool": b.pool.tolist()}),
    "pool is float64": ("pool", lambda b: {"pool": b.pool.astype(np.float64)}),
    "pool is big-endian": ("pool", lambda b: {"pool": b.pool.astype(">f4")}),
    "pool has four dimensions": ("pool", lambda b: {"pool": b.pool[0]}),
    "pool without the K, V axis": ("pool", lambda b: {"pool": np.ascontiguousarray(b.pool[:, :, :1])}),
    "pool is strided": ("pool", lambda b: {"pool": b.pool[:, :, :, ::-1]}),
    "pool is empty": ("pool", lambda b: {"pool": b.pool[:0]}),
    "block size is not a power of two": ("pool", lambda b: {"pool": np.ascontiguousarray(b.pool[..., : 64 * 12])}),
    "block size is 512": ("pool", lambda _: {"pool": np.zeros((3, 2, 2, 2, 64 * 512), np.float32)}),
    "layer is negative": ("layer", lambda _: {"layer": -1}),
    "layer is too large": ("layer", lambda _: {"layer": 2}),
    "layer is huge": ("layer", lambda _: {"layer": 2**80}),
    "layer is a float": ("layer", lambda _: {"layer": 1.0}),
    "query has another dtype": ("query", lambda b: {"query": b.query.astype(np.float16)}),
    "query is bfloat16 bits": ("query", lambda b: {"query": b.query.astype(ml_dtypes.bfloat16).view(np.uint16)}),
    "query has two dimensions": ("query", lambda b: {"query": b.query[0]}),
    "head size does not fit the pool": ("query", lambda _: {"query": np.zeros((3, 4, 72), np.float32)}),
    "head size is 4": ("query", lambda b: {"query": np.ascontiguousarray(b.query[..., :4])}),
    "head size is no multiple of 8": ("query", lambda _: {"query": np.zeros((3, 4, 36), np.float32)}),
    "heads are no multiple of KV heads": ("query", lambda b: {"query": b.query[:, :3]}),
    "no heads": ("query", lambda b: {"query": b.query[:, :0]}),
    "query lengths are int64": ("query_lens", lambda _: {"query_lens": np.array([1, 2])}),
    "query lengths have two dimensions": ("query_lens", lambda _: {"query_lens": int32(1, 2)[None]}),
    "a query length is negative": ("query_lens", lambda _: {"query_lens": int32(-1, 4)}),
    "query lengths do not add up": ("query_lens", lambda _: {"query_lens": int32(1, 1)}),
    "a query length is huge": ("context_lens", lambda _: {"query_lens": int32(1, 2**31 - 1)}),
    "block tables have one dimension": ("block_tables", lambda b: {"block_tables": b.block_tables[0]}),
    "block tables of three sequences": ("block_tables", lambda b: {"block_tables": b.block_tables[[0, 1, 1]]}),
    "block tables are int64": ("block_tables", lambda b: {"block_tables": b.block_tables.astype(np.int64)}),
    "a block id is negative": ("block_tables", lambda b: {"block_tables": b.block_tables - 100}),
    "a block id is past the pool": ("block_tables", lambda b: {"block_tables": b.block_tables + 100}),
    "block tables are too narrow": ("context_lens", lambda b: {"block_tables": b.block_tables[:, :2]}),
    "context lengths of one sequence": ("context_lens", lambda _: {"context_lens": int32(20)}),
    "a context length is negative": ("context_lens", lambda _: {"context_lens": int32(20, -1)}),
    "a context is shorter than its query": ("context_lens", lambda _: {"context_lens": int32(20, 1)}),
    "a context is past its table": ("context_lens", lambda _: {"context_lens": int32(20, 65)}),
    "a context length is huge": ("context_lens", lambda _: {"context_lens": int32(20, 2**31 - 1)}),
    "scale is NaN": ("scale", lambda _: {"scale": float("nan")}),
    "scale is infinite as a float32": ("scale", lambda _: {"scale": 1e300}),
    "scale is a string": ("scale", lambda _: {"scale": "1"}),
    "window is negative": ("sliding_window", lambda _: {"sliding_window": -1}),
    "window is a float": ("sliding_window", lambda _: {"sliding_window": 3.5}),
    "soft cap is negative": ("logits_soft_cap", lambda _: {"logits_soft_cap": -1.0}),
    "soft cap is NaN": ("logits_soft_cap", lambda _: {"logits_soft_cap": float("nan")}),
    "slopes of too few heads": ("alibi_slopes", lambda _: {"alibi_slopes": np.ones(2, np.float32)}),
    "slopes are float64": ("alibi_slopes", lambda _: {"alibi_slopes": np.ones(4)}),
    "out has another shape": ("out", lambda b: {"out": b.query[:2].copy()}),
    "out has another dtype": ("out", lambda b: {"out": b.query.astype(np.float16)}),
    "out is read-only": ("out", lambda b: {"out": read_only(b.query.copy())}),
    "out is strided": ("out", lambda b: {"out": np.repeat(b.query, 2, axis=0)[::2]}),
    "out is the query": ("out", lambda b: {"out": b.query}),
    "out overlaps the query": ("out", lambda _: dict(zip(("query", "out"), overlap(), strict=True))),
}


def attend(batch: Batch, changed: dict[str, Any]) -> np.ndarray:
    names = ("pool", "layer", "query", "query_lens", "block_tables", "context_lens")
    arguments = {**dict(zip(names, batch.arguments(), strict=True)), **changed}
    return ops.attention(**arguments)


def test_attention_names_the_wrong_argument() -> None:
    batch = make_batch(Case((1, 2), (20, 33)))
    with each_row() as row:
        for name, (field, change) in ATTENTION.items():
            with row(name):
                with pytest.raises(InvalidArgumentError) as raised:
                    attend(batch, change(batch))
                assert raised.value.field == field
                check(batch, attend(batch, {}))


WRITE: dict[str, tuple[str, dict[str, Any]]] = {
    "a slot is negative": ("slot_mapping", {"slot_mapping": np.array([0, -1])}),
    "a slot is past the pool": ("slot_mapping", {"slot_mapping": np.array([0, 48])}),
    "slots are int32": ("slot_mapping", {"slot_mapping": int32(0, 1)}),
    "slots have two dimensions": ("slot_mapping", {"slot_mapping": np.array([[0, 1]])}),
    "one slot for two tokens": ("key", {"slot_mapping": np.array([0])}),
    "key has another dtype": ("key", {"key": np.zeros((2, 2, 64))}),
    "key has two dimensions": ("key", {"key": np.zeros((2, 128), np.float32)}),
    "key of three heads": ("key", {"key": np.zeros((2, 3, 64), np.float32)}),
    "value of one token": ("value", {"value": np.zeros((1, 2, 64), np.float32)}),
    "value of another head size": ("value", {"value": np.zeros((2, 2, 32), np.float32)}),
    "layer is too large": ("layer", {"layer": 1}),
    "pool is read-only": ("pool", {"pool": read_only(np.zeros((3, 1, 2, 2, 64 * 16), np.float32))}),
}


def test_write_names_the_wrong_argument_and_writes_nothing() -> None:
    pool, tokens = np.zeros((3, 1, 2, 2, 64 * 16), np.float32), np.ones((2, 2, 64), np.float32)
    slots = np.array([0, 1])
    arguments: dict[str, Any] = {"pool": pool, "layer": 0, "slot_mapping": slots, "key": tokens, "value": tokens}
    with each_row() as row:
        for name, (field, changed) in WRITE.items():
            with row(name):
                with pytest.raises(InvalidArgumentError) as raised:
                    ops.write_kv(**arguments | changed)
                assert raised.value.field == field
                assert not pool.any()


def test_read_names_the_wrong_argument() -> None:
    pool = np.zeros((3, 1, 2, 2, 64 * 16), np.float32)
    rows = [("slots", 48, 64), ("slots", -1, 64), ("head_size", 0, 0), ("head_size", 0, -64), ("head_size", 0, 72)]
    with each_row() as row:
        for field, slot, head_size in rows:
            with row((field, slot, head_size)):
                with pytest.raises(InvalidArgumentError) as raised:
                    ops.read_kv(pool, 0, np.array([slot]), head_size=head_size)
                assert raised.value.field == field


def test_thread_counts_out_of_range() -> None:
    before = ops.num_threads()
    for count in (0, -1, 1025, 2**70):
        with pytest.raises(InvalidArgumentError) as raised:
            ops.set_num_threads(count)
        assert (raised.value.field, ops.num_threads()) == ("count", before), count


def test_random_integers_are_refused_or_computed() -> None:
    """Any integers give a typed error, or a result for which every sequence was within the pool."""
    rng = np.random.default_rng(0)
    batch = make_batch(Case((1, 2), (20, 33)))
    pool = np.nan_to_num(batch.pool)
    refused = computed = 0
    for _ in range(3000):
        spread = int(rng.choice([2, 8, 40, 2**31 - 1]))
        lens = rng.integers(-1, 4, 2).astype(np.int32)
        tables = rng.integers(-1, min(spread, 2**20), (2, 3)).astype(np.int32)
        contexts = rng.integers(-spread // 8, spread, 2).astype(np.int32)
        tokens = max(0, int(lens.sum()))
        query = np.ones((tokens, 4, 64), np.float32)
        window = int(rng.choice([0, 1, 7, 2**62]))
        try:
            out = ops.attention(pool, int(rng.integers(-1, 3)), query, lens, tables, contexts, sliding_window=window)
        except InvalidArgumentError:
            refused += 1
        else:
            computed += 1
            assert np.isfinite(out).all()
    assert refused > 500
    assert computed > 100
