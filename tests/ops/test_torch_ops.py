"""The torch custom ops: equal results, torch's own checks, and full-graph compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attention_reference import DTYPES, Batch, Case, check, make_batch
from each_row import each_row

from kvservice.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

from kvservice.ops import torch_ops  # noqa: E402  torch may be missing

CASE = Case((1, 3), (20, 33))


def as_tensor(array: np.ndarray) -> Any:
    if array.dtype == DTYPES["bfloat16"]:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def tensors(batch: Batch) -> tuple[Any, ...]:
    return tuple(as_tensor(value) if isinstance(value, np.ndarray) else value for value in batch.arguments())


def test_attention() -> None:
    with each_row() as row:
        for dtype in DTYPES:
            batch = make_batch(Case((1, 3), (20, 33), dtype=dtype, alibi=True, sliding_window=9))
            slopes = as_tensor(batch.options["alibi_slopes"])
            options = {"sliding_window": 9, "alibi_slopes": slopes}
            with row(dtype):
                out, lse = torch.ops.kvservice.attention_lse(*tensors(batch), **options)
                check(batch, torch_ops.as_numpy(out), lse.numpy())
                assert torch.equal(torch.ops.kvservice.attention(*tensors(batch), **options), out)


def arguments_of(name: str) -> tuple[Any, ...]:
    batch = make_batch(CASE)
    pool, layer, query, *lens = tensors(batch)
    pool = torch.nan_to_num(pool)  # torch's checks compare pools, and NaN does not equal itself
    tokens = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 1], dtype=torch.int32)
    return {
        "attention": (pool, layer, query, *lens),
        "attention_lse": (pool, layer, query, *lens),
        "write_kv": (pool, layer, torch.arange(5), tokens, tokens + 1),
        "read_kv": (pool, layer, torch.arange(5), 64),
        "copy_blocks": (pool, pool.clone() + 1, ids, ids + 2),
        "copy_blocks_": (pool, ids, ids + 2),
    }[name]


OPS = ("attention", "attention_lse", "write_kv", "read_kv", "copy_blocks", "copy_blocks_")


def test_opcheck() -> None:
    """opcheck raises if the schema, the fake kernel or the registration is wrong."""
    with each_row() as row:
        for name in OPS:
            with row(name):
                torch.library.opcheck(getattr(torch.ops.kvservice, name).default, arguments_of(name))


CUDA_ONLY: dict[str, dict[str, Any]] = {
    "k_scale": {"k_scale": torch.ones(2)},
    "v_scale": {"v_scale": torch.ones(2)},
    "block_sparse": {"block_sparse": [2, 1, 16]},
}
REFUSED = [(name, field) for name in OPS[:2] for field in CUDA_ONLY]
REFUSED += [(name, field) for name in OPS[2:4] for field in ("k_scale", "v_scale")]


def test_the_cpu_refuses_what_its_kernels_have_not() -> None:
    with each_row() as row:
        for name, field in REFUSED:
            with row((name, field)):
                with pytest.raises(InvalidArgumentError) as raised:
                    getattr(torch.ops.kvservice, name)(*arguments_of(name), **CUDA_ONLY[field])
                assert raised.value.field == field
        pool, *rest = arguments_of("attention")
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            with row(dtype):
                with pytest.raises(InvalidArgumentError, match="expected float32, float16 or bfloat16") as raised:
                    torch.ops.kvservice.attention(pool.to(dtype), *rest)
                assert raised.value.field == "pool"


def test_what_is_read_has_the_dtype_of_the_pool() -> None:
    arguments = arguments_of("read_kv")
    key, _ = torch.ops.kvservice.read_kv(*arguments, dtype=torch.float32)
    assert torch.equal(key, torch.ops.kvservice.read_kv(*arguments)[0])
    with pytest.raises(InvalidArgumentError) as raised:
        torch.ops.kvservice.read_kv(*arguments, dtype=torch.float16)
    assert raised.value.field == "dtype"


def test_what_is_for_cuda_alone_changes_nothing() -> None:
    arguments = arguments_of("attention")
    out = torch.ops.kvservice.attention(*arguments, max_query_len=3, batch_invariant=True)
    assert torch.equal(out, torch.ops.kvservice.attention(*arguments))


def write_and_attend(pool: Any, layer: int, slots: Any, key: Any, query: Any, ids: Any, *lens: Any) -> tuple[Any, ...]:
    torch.ops.kvservice.write_kv(pool, layer, slots, key, key)
    torch.ops.kvservice.copy_blocks_(pool, ids[:1], ids[1:])
    read_key, _ = torch.ops.kvservice.read_kv(pool, layer, slots, 64)
    return torch.ops.kvservice.attention(pool, layer, query.view(query.shape), *lens), read_key


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiles_as_one_graph() -> None:
    def run(function: Callable[..., Any]) -> tuple[Any, ...]:
        pool, layer, query, *lens = arguments_of("attention")
        key = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1))
        ids = torch.tensor([0, 1], dtype=torch.int32)
        return *function(pool, layer, torch.arange(5), key, query, ids, *lens), pool

    for compiled, eager in zip(
        run(torch.compile(write_and_attend, fullgraph=True)), run(write_and_attend), strict=True
    ):
        assert torch.equal(compiled, eager)
