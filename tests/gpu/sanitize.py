"""A small grid of all kernels for compute-sanitizer. It uses no torch, every array has its own allocation, and table
entries that must not be read have invalid block ids.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize.py [reference|decode|extend|auto|cascade|slots ...]

Results are compared as well. It runs for a second or two, or for minutes under racecheck.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "ops"), str(HERE.parent / "ops")]

import numpy as np  # noqa: E402  the path comes first
from attention_reference import Case, put_sequence  # noqa: E402
from gpu_attention import run_cases  # noqa: E402
from gpu_cases import sample_cases, sample_short_cases  # noqa: E402
from gpu_memory import GpuMemory, numpy_dtype  # noqa: E402
from shared_prefix import run_shared_cases, sample_shared  # noqa: E402

from kvservice.ops import cuda  # noqa: E402
from kvservice.ops.cuda import Kernel  # noqa: E402

KERNELS: tuple[Kernel, ...] = ("reference", "decode", "extend", "auto")
NOWHERE = 2**30
CASES = 26


def work(case: Case) -> int:
    pairs = sum(query * context for query, context in zip(case.query_lens, case.context_lens, strict=True))
    return pairs * case.num_heads * case.head_size


def attention(kernel: Kernel) -> None:
    """Run the cases of a sample with the least work, and two cases with split-KV."""
    cases = sorted(sample_cases(kernel, 2 * CASES, seed=9), key=work)[:CASES]
    split = Case((1, 1), (2500, 700), dtype="float16", head_size=128, num_kv_heads=1, group=4, num_layers=1, layer=0)
    if kernel == "extend":
        split = replace(split, query_lens=(33, 20))
        cases += sorted(sample_short_cases(CASES), key=work)[: CASES // 2]
    run_cases([*cases, split, replace(split, sliding_window=600)], kernel, trap=NOWHERE)
    run_cases([split, replace(split, sliding_window=600)], kernel, trap=NOWHERE, batch_invariant=True)


def cascade() -> None:
    cases = sorted(sample_shared(2 * CASES, seed=9), key=lambda sample: work(sample[0]))
    run_shared_cases(cases[:CASES], NOWHERE)


def slots() -> None:
    """Write, read and copy a prompt and a step with scattered slots, for every pool dtype."""
    for pool_dtype in ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtype = "float16" if pool_dtype.startswith("float8") else pool_dtype
        for block_size in (1, 8, 16, 64):
            with GpuMemory() as memory:
                write_read_copy(memory, pool_dtype, dtype, block_size)


def write_read_copy(memory: GpuMemory, pool_dtype: str, dtype: str, block_size: int) -> None:
    rng = np.random.default_rng(0)
    pool = np.zeros((20, 2, 2, 2, 48 * block_size), numpy_dtype(pool_dtype))
    blocks = rng.permutation(10)[:6]
    num_tokens = 6 * block_size - block_size // 2
    key, value = (
        rng.standard_normal((2, num_tokens, 2, 48), np.float32)
        .astype(numpy_dtype(pool_dtype))
        .astype(numpy_dtype(dtype))
    )
    mapping = (blocks[:, None] * block_size + np.arange(block_size)).ravel()[:num_tokens]
    padded = np.concatenate([mapping, [-1, 20 * block_size]])
    more = [np.concatenate([tokens, tokens[:2]]) for tokens in (key, value)]
    there = memory.upload(pool)
    cuda.write_kv(there, 1, memory.upload(padded), *(memory.upload(tokens) for tokens in more), stream=memory.stream)
    back = [memory.poisoned(key.shape, dtype) for _ in range(2)]
    cuda.read_kv(there, 1, memory.upload(mapping), key=back[0], value=back[1], stream=memory.stream)
    for got, tokens in zip(back, (key, value), strict=True):
        assert memory.download(got).tobytes() == tokens.tobytes(), (pool_dtype, block_size)
    ids = np.arange(10, dtype=np.int32)
    cuda.copy_blocks(there, there, ids, ids + 10, stream=memory.stream)
    expected = pool.copy()
    stored = [tokens.astype(pool.dtype) for tokens in (key, value)]
    put_sequence(expected, 1, blocks, block_size, *stored)
    # The reference has NaN past the end of the sequence; the pool here was never written there.
    expected = np.where(np.isnan(expected.astype(np.float32)), np.zeros((), pool.dtype), expected)
    expected[10:] = expected[:10]
    assert memory.download(there).tobytes() == expected.tobytes(), (pool_dtype, block_size)
    memory.check_guards()


def main(names: list[str]) -> None:
    others = {"cascade": cascade, "slots": slots}
    for name in names or [*KERNELS, *others]:
        if name in others:
            others[name]()
        else:
            attention(next(kernel for kernel in KERNELS if kernel == name))
        print(name, "ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
