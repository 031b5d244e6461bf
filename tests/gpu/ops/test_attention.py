"""Every kernel against float64 over its grid. Memory that must not be read, and results before the call, are NaN."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_reference import Array, Case, Sparse, compare, reference
from gpu_attention import OnDevice, bounds, make_trapped, run_case, run_cases
from gpu_cases import DTYPES, HEAD_SIZES, sample_cases, sample_little_cases, sample_short_cases
from gpu_memory import GpuMemory

from kvservice.errors import InvalidArgumentError
from kvservice.ops.cuda import Kernel

PARTS = 10
SAMPLES = {"reference": 300, "decode": 400, "extend": 300, "auto": 300}
FAST: tuple[Kernel, ...] = ("decode", "extend")
KERNELS: tuple[Kernel, ...] = ("reference", "decode", "extend", "auto")
# Query lengths of a batch that each kernel supports.
SOME_LENS = {"reference": (3, 1, 0, 40), "decode": (1, 1, 0, 1), "extend": (70, 1, 0, 40), "auto": (3, 1, 0, 90)}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kernel", KERNELS)
def test_sampled_cases(kernel: Kernel, part: int) -> None:
    """Each case is compared with float64."""
    run_cases(sample_cases(kernel, SAMPLES[kernel])[part::PARTS], kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_sampled_cases_batch_invariant(kernel: Kernel) -> None:
    """Each case is compared with float64."""
    run_cases(sample_cases(kernel, 40, seed=1), kernel, batch_invariant=True)


def test_the_longest_query_may_be_overestimated() -> None:
    """Each case is compared with float64."""
    run_cases(sample_cases("auto", 30, seed=2), "auto", spare_query_len=9)


EDGES = (*range(1, 140), *(edge + by for edge in (144, 160, 192, 256, 384, 512) for by in (-1, 0, 1)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "pool_dtype"), [DTYPES[0], DTYPES[3]])
def test_contexts_at_every_edge(kernel: Kernel, dtype: str, pool_dtype: str | None) -> None:
    """One batch has sequences of all lengths with one query each; for extend, query lengths cover the tile edges."""
    lens = (1,) * len(EDGES)
    if kernel in ("extend", "auto"):
        lens = tuple(min(context, 1 + 8 * index % 130) for index, context in enumerate(EDGES))
    cases = [
        Case(lens, EDGES, dtype=dtype, pool_dtype=pool_dtype, head_size=128, block_size=16, group=4, seed=1),
        Case(lens, EDGES, dtype=dtype, pool_dtype=pool_dtype, head_size=64, block_size=32, group=2, sliding_window=65),
    ]
    run_cases(cases, kernel)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "pool_dtype"), DTYPES[:3])
def test_long_contexts(kernel: Kernel, dtype: str, pool_dtype: str | None, invariant: bool) -> None:
    """Each case is compared with float64."""
    contexts = (4095, 4096, 4097, 1, 2049)
    lens = {"decode": (1, 1, 1, 1, 0), "extend": (65, 128, 3, 1, 0)}.get(kernel, (1, 128, 3, 1, 0))
    base = Case(
        lens, contexts, dtype=dtype, pool_dtype=pool_dtype, head_size=128, num_kv_heads=1, num_layers=1, layer=0
    )
    cases = [base, replace(base, sliding_window=1000), replace(base, group=8, alibi=True)]
    run_cases(cases, kernel, batch_invariant=invariant)


SOFT_CAPS = (0.01, 200.0, 1024.0, 1025.0, 30_000.0, 1e30)


# The extend kernel refuses caps above 1024, see REFUSED.
@pytest.mark.parametrize(
    ("kernel", "soft_cap"),
    [(kernel, soft_cap) for kernel in KERNELS for soft_cap in SOFT_CAPS if kernel != "extend" or soft_cap <= 1024],
)
def test_soft_caps_at_both_ends(kernel: Kernel, soft_cap: float) -> None:
    """Each case is compared with float64. The logits are far below a large cap, where its tanh is almost linear."""
    base = Case(SOME_LENS[kernel], (300, 33, 5, 600), dtype="bfloat16", head_size=128, logits_soft_cap=soft_cap)
    run_cases([base, replace(base, dtype="float16", head_size=64), replace(base, scale=2.0, group=8)], kernel)


@pytest.mark.parametrize("kernel", ["extend", "auto", "reference"])
def test_whole_prompts(kernel: Kernel) -> None:
    """Each case is compared with float64."""
    base = Case((1100, 513), (1100, 600), dtype="bfloat16", head_size=128, num_kv_heads=1, group=2)
    run_cases([base, replace(base, dtype="float16", head_size=64, block_size=64, sliding_window=300)], kernel)


@pytest.mark.parametrize("part", range(PARTS))
def test_batches_of_short_prompts(part: int) -> None:
    """Each case is compared with float64. Each call finds what the last one left in the workspace, and gives the same
    bits."""
    for case in sample_short_cases(16, seed=part):
        batch = make_trapped(case)
        with GpuMemory() as memory:
            device = OnDevice(memory, batch)
            out, lse = device.attend(kernel="extend")
            memory.check_guards()
            compare(case, reference(batch), out, lse, **bounds(case, "extend"))
            for _ in range(3):
                again, again_lse = device.attend(kernel="extend")
                assert again.tobytes() == out.tobytes(), case
                assert again_lse.tobytes() == lse.tobytes(), case


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("head_size", [80, 96, 112, 192])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_many_tiles_of_a_padded_head(dtype: str, head_size: int, invariant: bool) -> None:
    """A thread block has many tiles, of few and more rows by turns, and what one leaves in shared memory, NaN of a
    user's included, is not seen by the next. Each case is compared with float64."""
    rng = np.random.default_rng(head_size)
    lens = tuple(int(length) for length in rng.choice([2, 4, 4, 4, 9, 40], 1200))
    case = Case(lens, (300,) * 1200, dtype=dtype, head_size=head_size, num_kv_heads=1, num_layers=1, layer=0)
    batch = make_trapped(case)
    expected = reference(batch)
    with GpuMemory() as memory:
        out, lse = OnDevice(memory, batch).attend(kernel="extend", batch_invariant=invariant)
        compare(case, expected, out, lse, **bounds(case, "extend"))
        ends = np.cumsum(lens)
        broken = np.concatenate([np.arange(ends[seq] - lens[seq], ends[seq]) for seq in range(0, 1200, 7)])
        others = np.setdiff1d(np.arange(ends[-1]), broken)
        batch.query[broken] = np.nan
        again, again_lse = OnDevice(memory, batch).attend(kernel="extend", batch_invariant=invariant)
        assert again[others].tobytes() == out[others].tobytes()
        assert again_lse[others].tobytes() == lse[others].tobytes()
        assert np.isnan(again[broken].astype(np.float32)).all()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("group", [1, 8])
def test_many_sequences_of_unequal_lengths(kernel: Kernel, group: int) -> None:
    """The case is compared with float64."""
    rng = np.random.default_rng(0)
    contexts = tuple(int(length) for length in np.exp(rng.uniform(0, np.log(3000), 70)))
    lens = [1] * 70
    if kernel != "decode":
        lens[3], lens[20] = min(contexts[3], 200), min(contexts[20], 100)
    run_case(Case(tuple(lens), contexts, dtype="bfloat16", head_size=128, group=group, num_kv_heads=2), kernel)


def most_queries_of_decode(group: int) -> int:
    """Find the maximum number of queries per sequence that the decode kernel accepts."""
    batch = make_trapped(Case((1,), (40,), dtype="bfloat16", head_size=128, group=group))
    with GpuMemory() as memory:
        device = OnDevice(memory, batch)
        for most in range(2, 129):
            try:
                device.attend(kernel="decode", max_query_len=most)
            except InvalidArgumentError:
                return most - 1
    return 128


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("invariant", [False, True])
def test_decode_of_a_few_queries_each(group: int, invariant: bool) -> None:
    """This is the shape of speculative verification: each query of a sequence has its own causal limit."""
    most = most_queries_of_decode(group)
    assert most >= 2 or group > 4
    rng = np.random.default_rng(group)
    cases = []
    for seed, (dtype, pool_dtype) in enumerate(DTYPES[:4]):
        contexts = tuple(int(length) for length in rng.integers(most, 700, 12))
        lens = tuple(int(length) for length in rng.integers(0, most + 1, 12))
        case = Case(lens, contexts, dtype=dtype, pool_dtype=pool_dtype, head_size=128, group=group, seed=seed)
        cases += [case, replace(case, sliding_window=33), replace(case, alibi=True, sparse=Sparse(3, 1, 16, 1, 0))]
    run_cases(cases, "decode", batch_invariant=invariant)


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_sequences_than_threads_of_a_block(kernel: Kernel) -> None:
    """The case is compared with float64."""
    contexts = tuple(1 + index % 40 for index in range(2100))
    lens = tuple(int(index % 7 != 3) for index in range(2100))
    run_case(Case(lens, contexts, dtype="float16", head_size=64, num_kv_heads=1, num_layers=1, layer=0), kernel)


def batch_that_fills_the_device(seed: int) -> Case:
    """Between a few KV tiles and several for each thread block: sequences alike, or of any lengths."""
    rng = np.random.default_rng(seed)
    dtype, pool_dtype = DTYPES[seed % 4]
    num_kv_heads, group = int(rng.choice([1, 2, 4])), int(rng.choice([1, 3, 4, 8, 12, 16]))
    tokens = int(np.exp(rng.uniform(np.log(2_000), np.log(500_000)))) // num_kv_heads
    count = int(min(np.exp(rng.uniform(0, np.log(600))), tokens))
    mean = tokens // count
    contexts = np.full(count, mean) if rng.random() < 0.5 else rng.integers(1, 2 * mean + 1, count)
    lens = np.minimum(rng.integers(0, 3, count) if group <= 4 and rng.random() < 0.3 else 1, contexts)
    return Case(
        tuple(int(length) for length in lens),
        tuple(int(context) for context in contexts),
        dtype=dtype,
        pool_dtype=pool_dtype,
        head_size=128,
        group=group,
        num_kv_heads=num_kv_heads,
        num_layers=1,
        layer=0,
        sliding_window=int(rng.choice([0, 0, 0, 700])),
        seed=seed,
    )


@pytest.mark.parametrize("part", range(PARTS))
def test_how_work_is_divided(part: int) -> None:
    """Each call finds what the last one left in the workspace, and gives the same bits."""
    for seed in range(10 * part, 10 * part + 10):
        case = batch_that_fills_the_device(seed)
        batch = make_trapped(case)
        with GpuMemory() as memory:
            device = OnDevice(memory, batch)
            out, lse = device.attend(kernel="decode")
            compare(case, reference(batch), out, lse, **bounds(case, "decode"))
            for _ in range(5):
                again, again_lse = device.attend(kernel="decode")
                assert again.tobytes() == out.tobytes(), seed
                assert again_lse.tobytes() == lse.tobytes(), seed
            compare(case, reference(batch), *in_equal_ranges(device), **bounds(case, "decode"))


def in_equal_ranges(device: OnDevice) -> tuple[Array, Array]:
    """Attend with tables so much wider than the contexts that work is hardly ever direct: each thread block gets an
    equal range of it."""
    tables = device.batch.block_tables
    wider = np.full((len(tables), tables.shape[1] + (12_000 if len(tables) < 70 else 3_000)), tables.max(), np.int32)
    wider[:, : tables.shape[1]] = tables
    return device.attend(kernel="decode", block_tables=wider)


@pytest.mark.parametrize("part", range(PARTS))
def test_little_decode_work(part: int) -> None:
    """Work for few SMs, whose sequences are a cluster's each, if they are about equally long: all sizes of clusters,
    with and without work for each member. Each case is compared with float64, and gives the same bits again."""
    for case in sample_little_cases(24, seed=part):
        batch = make_trapped(case)
        with GpuMemory() as memory:
            device = OnDevice(memory, batch)
            out, lse = device.attend(kernel="decode")
            memory.check_guards()
            compare(case, reference(batch), out, lse, **bounds(case, "decode"))
            for _ in range(3):
                again, again_lse = device.attend(kernel="decode")
                assert again.tobytes() == out.tobytes(), case
                assert again_lse.tobytes() == lse.tobytes(), case
            wider = np.pad(batch.block_tables, ((0, 0), (0, 40)), mode="edge")
            again, again_lse = device.attend(kernel="decode", block_tables=wider)
            compare(case, reference(batch), again, again_lse, **bounds(case, "decode"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_tables_far_wider_than_the_contexts(kernel: Kernel) -> None:
    """The case is compared with float64."""
    case = Case(SOME_LENS[kernel], (900, 33, 5, 200), dtype="bfloat16", head_size=128)
    batch = make_trapped(case)
    trap = batch.block_tables[0, -1]
    batch.block_tables = np.pad(batch.block_tables, ((0, 0), (0, 3000)), constant_values=trap)
    with GpuMemory() as memory:
        compare(case, reference(batch), *OnDevice(memory, batch).attend(kernel=kernel), **bounds(case, kernel))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("query_lens", [(), (0, 0)])
def test_empty_batches(kernel: Kernel, query_lens: tuple[int, ...]) -> None:
    """Each case is compared with float64; a launch of no blocks would be a CUDA error."""
    run_case(Case(query_lens, (0, 7)[: len(query_lens)], dtype="float16"), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_large_logits_do_not_overflow(kernel: Kernel, dtype: str) -> None:
    case = Case(SOME_LENS[kernel], (150, 33, 5, 600), dtype=dtype, head_size=128, scale=40.0)
    batch = make_trapped(case)
    expected, _ = reference(batch)
    with GpuMemory() as memory:
        got, _ = OnDevice(memory, batch).attend(kernel=kernel)
    # One key has nearly all the weight, or two keys with nearly equal logits share it. Logits are in the thousands,
    # which limits the accuracy.
    close = np.linalg.norm(got.astype(np.float64) - expected, axis=-1) <= 0.02 * np.linalg.norm(expected, axis=-1)
    assert np.isfinite(got.astype(np.float32)).all()
    assert close.mean() > 0.8


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("pool_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_queries_of_any_size_with_8_bit_pools(kernel: Kernel, dtype: str, pool_dtype: str) -> None:
    """Tensor cores use FP8 keys as float16, whose range is smaller than that of bfloat16 queries."""
    sizes = (1e-7, 1e-2, 5e3) if dtype == "float16" else (1e-20, 1e-7, 1e6, 1e20)
    for size in sizes:
        case = Case(
            SOME_LENS[kernel], (150, 33, 5, 200), dtype=dtype, pool_dtype=pool_dtype, scaled=True, scale=0.1 / size
        )
        batch = make_trapped(case)
        batch.query = (batch.query.astype(np.float32) * np.float32(size)).astype(batch.query.dtype)
        expected = reference(batch)
        with GpuMemory() as memory:
            out, lse = OnDevice(memory, batch).attend(kernel=kernel)
        wide = {name: 4 * bound for name, bound in bounds(case, kernel).items()}  # float16 loses bits below 6e-5
        compare(case, expected, out, lse, **(wide if size < 1e-4 and dtype == "float16" else bounds(case, kernel)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_is_not_a_number_stays_so(kernel: Kernel) -> None:
    """A NaN key affects exactly the queries that attend to it."""
    case = Case(SOME_LENS[kernel], (150, 33, 5, 600), dtype="bfloat16", head_size=128, num_kv_heads=1)
    batch = make_trapped(case)
    block = batch.block_tables[0, 2]
    batch.pool[block, case.layer, 0] = np.nan
    with GpuMemory() as memory:
        out, _ = OnDevice(memory, batch).attend(kernel=kernel)
    nan = np.isnan(out.astype(np.float32)).all(axis=(1, 2))
    finite = np.isfinite(out.astype(np.float32)).all(axis=(1, 2))
    first = SOME_LENS[kernel][0]
    # In sequence 0, the queries at position 32 or later. With the longest query length these are not all queries.
    sees = np.arange(150 - first, 150) >= 32
    np.testing.assert_array_equal(nan[:first], sees)
    assert finite[first:].all()


INVARIANT = {
    "reference": ((1, 30, 1, 130, 2), (700, 30, 17, 400, 1300)),
    "decode": ((1, 1, 1, 1, 1), (700, 30, 17, 4000, 1300)),
    "extend": ((70, 30, 100, 130, 20), (700, 30, 170, 400, 1300)),
    "auto": ((1, 30, 1, 130, 2), (700, 30, 17, 400, 1300)),
}


class Invariance:
    """A batch, with its batch-invariant results, of which any selection must have the same bits."""

    def __init__(self, memory: GpuMemory, case: Case, kernel: Kernel) -> None:
        self.case, self.kernel, self.batch = case, kernel, make_trapped(case)
        self.device = OnDevice(memory, self.batch)
        self.out, self.lse = self.device.attend(kernel=kernel, batch_invariant=True)

    def check(self, chosen: list[int]) -> None:
        """Run these sequences, which may repeat."""
        case, batch, kernel = self.case, self.batch, self.kernel
        ends = np.cumsum(case.query_lens)
        rows = np.concatenate([np.arange(ends[seq] - case.query_lens[seq], ends[seq]) for seq in chosen])
        width = -(-max(case.context_lens[seq] for seq in chosen) // case.block_size)
        changed: dict[str, Any] = {
            "query": batch.query[rows],
            "query_lens": batch.query_lens[chosen],
            "block_tables": batch.block_tables[chosen, :width],
            "context_lens": batch.context_lens[chosen],
        }
        alone = copy.copy(self.device)
        alone.case = replace(case, query_lens=tuple(case.query_lens[seq] for seq in chosen))
        alone.batch = replace(batch, case=alone.case, query=batch.query[rows])
        out, lse = alone.attend(kernel=kernel, batch_invariant=True, **changed)
        assert out.tobytes() == self.out[rows].tobytes(), f"{chosen[:9]} of {len(chosen)} differ"
        assert lse.tobytes() == self.lse[rows].tobytes(), f"log-sum-exp of {chosen[:9]} of {len(chosen)} differ"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("dtype", "pool_dtype"), DTYPES[:3])
def test_results_do_not_depend_on_the_batch(kernel: Kernel, dtype: str, pool_dtype: str | None) -> None:
    """The bits of a sequence are the same alone, in part of the batch, and many times over."""
    lens, contexts = INVARIANT[kernel]
    case = Case(lens, contexts, dtype=dtype, pool_dtype=pool_dtype, head_size=128, group=4)
    with GpuMemory() as memory:
        results = Invariance(memory, case, kernel)
        for seq in range(len(lens)):
            results.check([seq])
        results.check([4, 2, 0])
        results.check([3, 1, 4, 2, 0] * 9)


# Lengths around those at which the number of chunks changes.
CHUNK_EDGES = (1, 512, 1023, 1024, 1025, 1088, 1537, 4096, 8191, 8192, 8193, 20_000)


@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("sliding_window", [0, 1500])
@pytest.mark.parametrize(("dtype", "pool_dtype"), DTYPES[:3])
def test_chunks_do_not_depend_on_the_batch(
    dtype: str, pool_dtype: str | None, sliding_window: int, query_len: int
) -> None:
    """A thread block has, of a sequence and head, a part of a chunk, some of the chunks, or many sequences whole."""
    lens = tuple(min(query_len, context) for context in CHUNK_EDGES)
    case = Case(
        lens,
        CHUNK_EDGES,
        dtype=dtype,
        pool_dtype=pool_dtype,
        head_size=128,
        group=4,
        num_kv_heads=1,
        num_layers=1,
        layer=0,
        sliding_window=sliding_window,
    )
    everything = list(range(len(CHUNK_EDGES)))
    rng = np.random.default_rng(0)
    with GpuMemory() as memory:
        results = Invariance(memory, case, "decode")
        for seq in everything:
            results.check([seq])
        for count in (2, 7, 40, 200):
            results.check(rng.choice(everything, count).tolist())
        results.check([2, 3, 4, 5, 6] * 160)
        results.check([7] * 600)


def test_the_same_call_gives_the_same_bits() -> None:
    for kernel in KERNELS:
        case = Case(SOME_LENS[kernel], (3000, 33, 5, 600), dtype="bfloat16", head_size=128)
        batch = make_trapped(case)
        with GpuMemory() as memory:
            device = OnDevice(memory, batch)
            first = device.attend(kernel=kernel)[0].tobytes()
            assert all(device.attend(kernel=kernel)[0].tobytes() == first for _ in range(20)), kernel


WRONG: dict[str, dict[str, Any]] = {
    "scale": {"scale": 0.26},
    "window one too wide": {"sliding_window": 61},
    "window one too narrow": {"sliding_window": 59},
    "no window": {"sliding_window": 0},
    "soft cap": {"logits_soft_cap": 4.4},
    "no slopes": {"alibi_slopes": None},
    "slopes of the next head": {"alibi_slopes": np.array([2.0**-4.5, 2.0**-8, 2.0**-1, 2.0**-3], np.float32)},
    "layer": {"layer": 0},
    "no key scale": {"k_scale": None},
    "no value scale": {"v_scale": None},
    "value scales exchanged": {"v_scale": np.array([0.5, 2.0], np.float32)},
    "one token too few": {"context_lens": np.array([89, 69], np.int32)},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_argument_is_found(kernel: Kernel, wrong: str) -> None:
    lens = (1, 1) if kernel == "decode" else (1, 6)
    case = Case(
        lens,
        (90, 70),
        dtype="bfloat16",
        pool_dtype="float8_e4m3fn",
        scaled=True,
        scale=0.25,
        sliding_window=60,
        logits_soft_cap=4.0,
        alibi=True,
    )
    batch = make_trapped(case)
    batch.v_scale = np.array([2.0, 0.5], np.float32)
    # Tokens before the window are valid, so a window that is too wide changes the result. The other layer differs.
    plain = make_trapped(replace(case, sliding_window=0))
    batch.block_tables = plain.block_tables
    batch.pool[:, 0] = np.roll(batch.pool[:, 1], 1, axis=-1)
    expected = reference(batch)
    with GpuMemory() as memory:
        device = OnDevice(memory, batch)
        compare(case, expected, *device.attend(kernel=kernel), **bounds(case, kernel))
        out, _ = device.attend(kernel=kernel, **WRONG[wrong])
    with np.errstate(invalid="ignore"), pytest.raises(AssertionError, match="relative error"):
        compare(case, expected, out, **bounds(case, kernel))


REFUSED: dict[str, tuple[str, Kernel, dict[str, Any]]] = {
    "decode of float32": ("kernel", "decode", {"dtype": "float32"}),
    "extend of float32": ("kernel", "extend", {"dtype": "float32"}),
    "extend of a soft cap that it cannot compute": ("kernel", "extend", {"logits_soft_cap": 1025.0}),
    "extend of head size 40": ("kernel", "extend", {"head_size": 40}),
    "decode of long queries": ("kernel", "decode", {"query_lens": (200,), "context_lens": (300,)}),
    "sparse blocks smaller than the pool's": ("block_sparse.block_size", "auto", {"sparse": Sparse(2, 1, 8, 0, 0)}),
    "no local sparse block": ("block_sparse.local_blocks", "auto", {"sparse": Sparse(2, 0, 16, 0, 0)}),
    "a negative stride": ("block_sparse.vert_stride", "auto", {"sparse": Sparse(-2, 1, 16, 0, 0)}),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_a_kernel_does_not_take_is_named(memory: GpuMemory, wrong: str) -> None:
    field, kernel, changed = REFUSED[wrong]
    device = OnDevice(memory, make_trapped(replace(Case((1,), (20,), dtype="bfloat16"), **changed)))
    with pytest.raises(InvalidArgumentError) as raised:
        device.attend(kernel=kernel)
    assert raised.value.field == field


@pytest.mark.parametrize("kernel", FAST)
def test_queries_that_are_not_aligned_are_refused(memory: GpuMemory, kernel: Kernel) -> None:
    device = OnDevice(memory, make_trapped(Case((1, 1), (20, 20), dtype="bfloat16")))
    query = device.arrays["query"]
    device.arrays["query"] = replace(query, pointer=query.pointer + 8)
    with pytest.raises(InvalidArgumentError) as raised:
        device.attend(kernel=kernel)
    assert raised.value.field == "query"


def test_queries_longer_than_said_are_refused_where_the_host_can_tell(memory: GpuMemory) -> None:
    device = OnDevice(memory, make_trapped(Case((3, 3), (20, 20), dtype="bfloat16")))
    with pytest.raises(InvalidArgumentError) as raised:
        device.attend(max_query_len=2)
    assert raised.value.field == "max_query_len"


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_float32_is_exact_at_every_head_size(head_size: int) -> None:
    """Each case is compared with float64."""
    run_case(Case((1, 20), (600, 20), head_size=head_size, alibi=True, logits_soft_cap=20.0), "auto")
