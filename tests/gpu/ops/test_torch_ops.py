"""The torch custom ops on CUDA tensors: results, torch's operator checks, CUDA graphs, compilation, and a long context
against float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_reference import DTYPES, Batch, Case, Sparse, compare, reference
from gpu_attention import ROUNDED_WEIGHTS_BOUND, bounds, make_trapped
from shared_prefix import make_shared

from kvservice.errors import InvalidArgumentError

torch = pytest.importorskip("torch")

from kvservice.ops import torch_cuda, torch_ops  # noqa: E402  torch may be missing

CASE = Case((1, 3), (20, 33))
OPS = ("attention", "attention_lse", "write_kv", "read_kv", "copy_blocks", "copy_blocks_")


def as_tensor(array: Any, device: str = "cuda") -> Any:
    name = array.dtype.name
    if name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    if name.startswith("float8"):
        return torch.from_numpy(array.view(np.uint8)).to(device).view(getattr(torch, name))
    return torch.from_numpy(array).to(device)


def tensors(batch: Batch) -> tuple[Any, ...]:
    return tuple(as_tensor(value) if isinstance(value, np.ndarray) else value for value in batch.arguments())


def options_of(batch: Batch) -> dict[str, Any]:
    options = {**batch.options, "k_scale": batch.k_scale, "v_scale": batch.v_scale}
    options = {name: as_tensor(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    return {**options, "block_sparse": batch.case.sparse and list(batch.case.sparse)}


def numpy_of(tensor: Any) -> np.ndarray:
    return torch_ops.as_numpy(tensor.cpu())


@pytest.mark.parametrize("pool_dtype", [None, "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(dtype: str, pool_dtype: str | None) -> None:
    """The output is compared with float64."""
    case = Case((1, 3), (20, 90), dtype=dtype, pool_dtype=pool_dtype, scaled=pool_dtype is not None, alibi=True)
    for batch in (make_trapped(case), make_trapped(Case((1, 3), (20, 90), dtype=dtype, sparse=Sparse(3, 1, 16, 1, 0)))):
        options = options_of(batch)
        out, lse = torch.ops.kvservice.attention_lse(*tensors(batch), **options)
        compare(batch.case, reference(batch), numpy_of(out), numpy_of(lse), **bounds(batch.case, "auto"))
        for more in ({}, {"max_query_len": 3}, {"batch_invariant": True}):
            again = torch.ops.kvservice.attention(*tensors(batch), **options, **more)
            compare(batch.case, reference(batch), numpy_of(again), **bounds(batch.case, "auto"))


def test_strided_queries_and_other_streams() -> None:
    """The outputs are compared with float64; without an order of streams they are of old data."""
    batch = make_trapped(Case((1, 70), (20, 90), dtype="bfloat16"))
    pool, layer, query, *lens = tensors(batch)
    wide = torch.cat([query, torch.full_like(query, float("nan"))], dim=1)[:, : query.shape[1]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = torch.ops.kvservice.attention(pool, layer, wide, *lens)
    stream.synchronize()
    compare(batch.case, reference(batch), numpy_of(out), **bounds(batch.case, "auto"))


class LateArguments:
    """Arguments that become right only in the last moment before the call, behind work that takes long."""

    def __init__(self, batch: Batch) -> None:
        self.layer, self.max_query_len = tensors(batch)[1], max(batch.case.query_lens)
        self.right = [value for value in tensors(batch) if isinstance(value, torch.Tensor)]
        self.arguments = [torch.zeros_like(value) for value in self.right]
        self.many = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        self.beside = torch.cuda.Stream()

    def prepare(self, by: str) -> None:
        """Write the arguments by kernels, by copies, by kernels of another stream, or by kernels before a memset."""
        for value in self.arguments:
            value.zero_()
        here = torch.cuda.current_stream()
        self.beside.wait_stream(here)
        with torch.cuda.stream(self.beside if by == "another stream" else here):
            self.many.add_(1)
            for to, value in zip(self.arguments, self.right, strict=True):
                if by == "copies":
                    to.copy_(value)
                else:
                    to.view(torch.uint8).bitwise_or_(value.view(torch.uint8))
        if by == "a memset":
            self.many.zero_()
        here.wait_stream(self.beside)

    def attend(self) -> Any:
        pool, *others = self.arguments
        return torch.ops.kvservice.attention(pool, self.layer, *others, max_query_len=self.max_query_len)


@pytest.mark.parametrize("by", ["kernels", "copies", "another stream", "a memset"])
@pytest.mark.parametrize("lens", [(1, 1, 1), (40, 30, 20), (300, 1, 200)])
def test_kernels_that_start_early_wait_for_their_arguments(lens: tuple[int, ...], by: str) -> None:
    """The outputs are compared with float64, eager and of a graph. Thread blocks start before the work before them has
    ended, and one after the other of the same kernel."""
    batch = make_trapped(Case(lens, (300, 90, 200), dtype="bfloat16", head_size=128, group=4))
    late = LateArguments(batch)
    expected = reference(batch)

    def step() -> tuple[Any, ...]:
        late.prepare(by)
        return late.attend(), late.attend()

    for _ in range(10):
        for out in step():
            compare(batch.case, expected, numpy_of(out), **bounds(batch.case, "auto"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for _ in range(10):
        for out in outs:
            out.zero_()
        graph.replay()
        for out in outs:
            compare(batch.case, expected, numpy_of(out), **bounds(batch.case, "auto"))


def arguments_of(name: str) -> tuple[Any, ...]:
    batch = make_trapped(CASE)
    pool, layer, query, *lens = tensors(batch)
    pool = torch.nan_to_num(pool)  # torch's checks compare pools, and NaN is not equal to itself
    tokens = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(0)).cuda()
    ids, slots = torch.tensor([0, 1], dtype=torch.int32), torch.arange(5, device="cuda")
    return {
        "attention": (pool, layer, query, *lens),
        "attention_lse": (pool, layer, query, *lens),
        "write_kv": (pool, layer, slots, tokens, tokens + 1),
        "read_kv": (pool, layer, slots, 64),
        "copy_blocks": (pool, pool.clone() + 1, ids, ids + 2),
        "copy_blocks_": (pool, ids, ids + 2),
    }[name]


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name: str) -> None:
    """opcheck raises if the schema, the fake kernel or the registration is wrong."""
    torch.library.opcheck(getattr(torch.ops.kvservice, name).default, arguments_of(name))


@pytest.mark.parametrize("pool_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_8_bit_pools_are_written_and_read(pool_dtype: Any, dtype: Any) -> None:
    pool = torch.zeros(4, 1, 2, 2, 64 * 16, device="cuda").to(pool_dtype)
    key, value = torch.randn(2, 9, 2, 64, generator=torch.Generator().manual_seed(0)).cuda().to(dtype)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:9].cuda()
    scales = {"k_scale": torch.tensor([0.5, 2.0], device="cuda"), "v_scale": torch.tensor([0.25, 1.0], device="cuda")}
    torch.ops.kvservice.write_kv(pool, 0, slots, key, value, **scales)
    got = torch.ops.kvservice.read_kv(pool, 0, slots, 64, **scales, dtype=dtype)
    for read, tokens, scale in zip(got, (key, value), scales.values(), strict=True):
        scale = scale[:, None]
        expected = ((tokens.float() / scale).to(pool_dtype).float() * scale).to(dtype)
        assert torch.equal(read, expected)
    with pytest.raises(InvalidArgumentError) as raised:
        torch.ops.kvservice.read_kv(pool, 0, slots, 64)
    assert raised.value.field == "dtype"


@pytest.mark.parametrize("there", ["cuda", "pinned"])
def test_copies_either_way(there: str) -> None:
    src, dst = torch.randn(2, 8, 1, 2, 2, 64 * 16, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([0, 1, 5], dtype=torch.int32), torch.tensor([2, 3, 4], dtype=torch.int32)
    expected = dst.clone()
    expected[ids[1].long()] = src[ids[0].long()]
    other = {"cuda": lambda tensor: tensor.cuda(), "pinned": lambda tensor: tensor.pin_memory()}[there]
    for from_, to in ((src.cuda(), other(dst)), (other(src), dst.cuda())):
        torch.ops.kvservice.copy_blocks(from_, to, *ids)
        torch.cuda.synchronize()
        assert torch.equal(to.cpu(), expected)
    with pytest.raises(InvalidArgumentError) as raised:
        torch.ops.kvservice.copy_blocks(src.cuda(), dst, *ids)
    assert raised.value.field == "dst_pool"


def write_and_attend(pool: Any, layer: int, slots: Any, key: Any, query: Any, ids: Any, *lens: Any) -> tuple[Any, ...]:
    torch.ops.kvservice.write_kv(pool, layer, slots, key, key)
    torch.ops.kvservice.copy_blocks_(pool, ids[:1], ids[1:])
    read_key, _ = torch.ops.kvservice.read_kv(pool, layer, slots, 64)
    return torch.ops.kvservice.attention(pool, layer, query.view(query.shape), *lens, max_query_len=3), read_key


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiles_as_one_graph() -> None:
    def run(function: Callable[..., Any]) -> tuple[Any, ...]:
        pool, layer, query, *lens = arguments_of("attention")
        key = torch.randn(5, 2, 64, generator=torch.Generator().manual_seed(1)).cuda()
        ids = torch.tensor([0, 1], dtype=torch.int32)
        return *function(pool, layer, torch.arange(5, device="cuda"), key, query, ids, *lens), pool

    for compiled, eager in zip(
        run(torch.compile(write_and_attend, fullgraph=True, backend="aot_eager")), run(write_and_attend), strict=True
    ):
        assert torch.equal(compiled, eager)


GRAPH_LENS = {"decode": (1, 1, 1, 1), "extend": (70, 3, 9, 40), "reference": (1, 3, 9, 40), "auto": (1, 3, 70, 40)}


@pytest.mark.parametrize("kernel", GRAPH_LENS)
@pytest.mark.parametrize("invariant", [False, True])
def test_graphs_follow_the_lengths_on_the_device(kernel: Any, invariant: bool) -> None:
    """A graph is captured once and replayed with other lengths, tables and queries. Results are compared to float64."""
    lens = GRAPH_LENS[kernel]
    most = max(lens)
    longest = Case(lens, (1500,) * 4, dtype="bfloat16", head_size=128, group=4)
    steps = [
        longest,
        Case(lens, (100, 1500, 700, 333), dtype="bfloat16", head_size=128, group=4, seed=1),
        Case(lens[::-1], (1200, 80, 90, 100), dtype="bfloat16", head_size=128, group=4, seed=2),
        Case(
            (0, *lens[1:-1], lens[0] + lens[3]), (7, 1100, 80, 1500), dtype="bfloat16", head_size=128, group=4, seed=3
        ),
    ]
    if kernel == "decode":
        steps.pop()  # its last length would be 2
    batch = make_trapped(longest)
    pool, layer, query, query_lens, tables, context_lens = tensors(batch)
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)

    def attend() -> None:
        torch_cuda.attend(
            out,
            lse,
            pool,
            layer,
            query,
            query_lens,
            tables,
            context_lens,
            max_query_len=2 * most if kernel in ("auto", "reference", "extend") else most,
            batch_invariant=invariant,
            kernel=kernel,
        )

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in [*steps, *steps[::-1]]:
        step = make_trapped(case)
        assert step.pool.shape[0] <= pool.shape[0]
        pool[: step.pool.shape[0]] = as_tensor(step.pool)
        tables.fill_(0)
        tables[:, : step.block_tables.shape[1]] = as_tensor(step.block_tables)
        query[:] = as_tensor(step.query)
        query_lens[:], context_lens[:] = as_tensor(step.query_lens), as_tensor(step.context_lens)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        compare(case, reference(step), numpy_of(out), numpy_of(lse), **bounds(case, kernel))


def test_graphs_of_a_shared_prefix() -> None:
    """A graph is captured once and replayed with other common blocks and other lengths after them."""
    num_common = 64
    longest = Case((1, 2, 1, 3), (1500,) * 4, dtype="bfloat16", head_size=128, group=4)
    steps = [
        longest,
        replace(longest, context_lens=(1025, 1500, 1100, 1333), seed=1),
        replace(longest, query_lens=(0, 3, 1, 3), context_lens=(7, 1027, 1240, 1111), seed=2),
    ]
    pool, layer, query, query_lens, tables, context_lens = tensors(make_shared(longest, num_common))
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    lengths: dict[str, Any] = {"max_query_len": 3, "num_common_blocks": num_common}

    def attend() -> None:
        where = (query_lens, tables, context_lens)
        torch_cuda.attend(out, lse, pool, layer, query, *where, **lengths, kernel="cascade")

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()
    for case in [*steps, *steps[::-1]]:
        step = make_shared(case, num_common)
        pool[: step.pool.shape[0]] = as_tensor(step.pool)
        tables.fill_(0)
        tables[:, : step.block_tables.shape[1]] = as_tensor(step.block_tables)
        query[:] = as_tensor(step.query)
        query_lens[:], context_lens[:] = as_tensor(step.query_lens), as_tensor(step.context_lens)
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        graph.replay()
        compare(case, reference(step), numpy_of(out), numpy_of(lse), **bounds(case, "cascade"))
        got, got_lse = torch.ops.kvservice.attention_lse(
            pool, layer, query, query_lens, tables, context_lens, **lengths
        )
        compare(case, reference(step), numpy_of(got), numpy_of(got_lse), **bounds(case, "auto"))


LONG = 131072


@pytest.mark.parametrize("kernel", ["reference", "decode", "extend", "auto"])
@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_context_of_131072(kernel: Any, pool_dtype: Any) -> None:
    contexts, block_size, head_size, kv_heads, group = (LONG, 1000), 16, 128, 2, 4
    query_lens = (17, 9) if kernel == "extend" else (1, 1)
    generator = torch.Generator(device="cuda").manual_seed(0)
    blocks_of = [-(-length // block_size) for length in contexts]
    num_blocks = sum(blocks_of)
    shape = (num_blocks, block_size, kv_heads, head_size)
    x = 16 // pool_dtype.itemsize
    stored = [torch.randn(shape, generator=generator, device="cuda").to(pool_dtype) for _ in range(2)]
    bits = [side.view(torch.uint8 if x == 16 else torch.int16) for side in stored]
    pool = torch.empty(num_blocks, 1, 2, kv_heads, head_size * block_size, dtype=bits[0].dtype, device="cuda")
    keys = bits[0].view(num_blocks, block_size, kv_heads, head_size // x, x).permute(0, 2, 3, 1, 4)
    pool[:, 0, 0] = keys.reshape(num_blocks, kv_heads, -1)
    pool[:, 0, 1] = bits[1].permute(0, 2, 3, 1).reshape(num_blocks, kv_heads, -1)
    ids = torch.randperm(num_blocks, generator=generator, device="cuda").int()
    pool[ids.long()] = pool.clone()  # block i in token order is stored at ids[i]
    tables = torch.full((2, blocks_of[0]), ids[0].item(), dtype=torch.int32, device="cuda")
    tables[0], tables[1, : blocks_of[1]] = ids[: blocks_of[0]], ids[blocks_of[0] :]
    query = torch.randn(sum(query_lens), kv_heads * group, head_size, generator=generator, device="cuda").bfloat16()
    out, lse = torch.full_like(query, float("nan")), query.new_full(query.shape[:2], float("nan"), dtype=torch.float32)
    lens = [torch.tensor(values, dtype=torch.int32, device="cuda") for values in (query_lens, contexts)]
    torch_cuda.attend(out, lse, pool.view(pool_dtype), 0, query, lens[0], tables, lens[1], kernel=kernel)
    token = 0
    for seq, (query_len, context) in enumerate(zip(query_lens, contexts, strict=True)):
        first = sum(blocks_of[:seq])
        key, value = (
            side[first : first + blocks_of[seq]].reshape(-1, kv_heads, head_size)[:context].double() for side in stored
        )
        rows = query[token : token + query_len].double().view(query_len, kv_heads, group, head_size)
        logits = torch.einsum("qhgd,khd->qhgk", rows, key) * head_size**-0.5
        hidden = (
            torch.arange(context, device="cuda") > torch.arange(context - query_len, context, device="cuda")[:, None]
        )
        logits.masked_fill_(hidden[:, None, None], float("-inf"))
        expected = torch.einsum("qhgk,khd->qhgd", logits.softmax(-1), value).flatten(1, 2)
        got = out[token : token + query_len].double()
        error = ((got - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
        assert error <= ROUNDED_WEIGHTS_BOUND["bfloat16"], (seq, error)
        expected_lse = logits.logsumexp(-1).flatten(1, 2)
        assert (lse[token : token + query_len] - expected_lse).abs().max().item() <= 2e-4
        token += query_len
