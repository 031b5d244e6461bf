"""A sample of the grid of shapes and options for each kernel, the same on every run."""

from __future__ import annotations

import random
from typing import Any

from attention_reference import Case, Sparse

DTYPES: tuple[tuple[str, str | None], ...] = (
    ("bfloat16", None),
    ("float16", None),
    ("bfloat16", "float8_e4m3fn"),
    ("float16", "float8_e4m3fn"),
    ("bfloat16", "float8_e5m2"),
    ("float16", "float8_e5m2"),
)
SLOW_DTYPES = (("float32", None), ("float32", "float8_e4m3fn"), ("float32", "float8_e5m2"))
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
SLOW_HEAD_SIZES = (32, 40, 72, 120, 200)
BLOCK_SIZES = (8, 16, 32, 64, 128)
SLOW_BLOCK_SIZES = (1, 2, 4, 256)
# Number of KV heads, and number of query heads per KV head.
HEADS = ((2, 1), (1, 2), (2, 3), (2, 4), (1, 5), (1, 7), (2, 8), (1, 9), (1, 16), (1, 17), (1, 71), (3, 2), (1, 8))
EDGES = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.3},
    {"sliding_window": 1},
    {"sliding_window": 37},
    {"sliding_window": 128},
    {"logits_soft_cap": 3.0},
    {"logits_soft_cap": 30.0, "scale": 0.5},
    {"alibi": True},
    {"alibi": True, "sliding_window": 50, "logits_soft_cap": 5.0, "scale": 0.2},
)
# Sparse block sizes are multiples of the pool's block size.
SPARSE = (Sparse(2, 1, 1, 0, 0), Sparse(4, 2, 1, 1, 0), Sparse(3, 1, 2, 2, 1), Sparse(8, 3, 1, -1, 1))
# Limit on query-key products times heads of a sequence, so that the float64 reference is fast.
MOST_WORK = 1_500_000


def sample_lengths(
    rng: random.Random, kernel: str, block_size: int, num_heads: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    edges = [*EDGES, *(max(1, k * block_size + by) for k in (1, 2, 3) for by in (-1, 0, 1))]
    contexts, queries = [], []
    for _ in range(rng.choice([1, 1, 2, 3, 5, 9])):
        context = rng.choice([*edges, rng.randint(1, 700)])
        few, many = [1, 1, 1, 0], [1, 2, 16, 17, 63, 64, 65, 127, 128, 129, context, context, 0]
        if kernel == "extend":
            query = rng.choice(many)
        elif kernel == "decode":
            query = rng.choice(few)
        else:
            query = rng.choice(few + many)
        query = min(context, query)
        if query * context * num_heads > MOST_WORK:
            query = min(query, 17)
        contexts.append(context)
        queries.append(query)
    if rng.random() < 0.1:
        contexts.append(0)
        queries.append(0)
    return tuple(queries), tuple(contexts)


def sample_cases(kernel: str, count: int, *, seed: int = 0) -> list[Case]:
    """Cycle through each axis at its own pace, so that many combinations of two axes occur. The tensor-core kernels get
    the shapes that they support; extend gets no sparse patterns. reference and auto get all shapes.
    """
    rng = random.Random(f"{kernel} {seed}")
    slow = kernel in ("reference", "auto")
    sparse = () if kernel == "extend" else SPARSE
    axes: list[list[Any]] = [
        [*DTYPES, *(SLOW_DTYPES if slow else ())],
        [*HEAD_SIZES, *(SLOW_HEAD_SIZES if slow else ())],
        [*BLOCK_SIZES, *(SLOW_BLOCK_SIZES if slow else ())],
        list(HEADS),
        [*OPTIONS, *({"sparse": pattern} for pattern in sparse)],
    ]
    cases = []
    for index in range(count):
        if index % 11 == 0:
            for axis in axes:
                rng.shuffle(axis)
        (dtype, pool_dtype), head_size, block_size, (num_kv_heads, group), options = (
            axis[index % len(axis)] for axis in axes
        )
        if pool_dtype is not None:
            head_size = -(-head_size // 16) * 16
        if "sparse" in options:
            pattern = options["sparse"]
            options = {"sparse": pattern._replace(block_size=pattern.block_size * block_size)}
        query_lens, context_lens = sample_lengths(rng, kernel, block_size, num_kv_heads * group)
        cases.append(
            Case(
                query_lens,
                context_lens,
                dtype=dtype,
                pool_dtype=pool_dtype,
                scaled=pool_dtype is not None and rng.random() < 0.7,
                head_size=head_size,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                group=group,
                seed=index,
                **options,
            )
        )
    return cases


def sample_short_cases(count: int, *, seed: int = 0) -> list[Case]:
    """Return batches whose tables have room for few tokens: from one sequence to hundreds, most of them prompts, some
    without queries. Hopper has a kernel for them, whose limits, 256 and 512 tokens, are among the contexts."""
    rng = random.Random(f"short {seed}")
    cases = []
    for index in range(count):
        dtype, pool_dtype = DTYPES[index % len(DTYPES)]
        head_size, block_size = rng.choice(HEAD_SIZES), rng.choice(BLOCK_SIZES)
        num_kv_heads, group = rng.choice(HEADS)
        longest = rng.choice([1, 40, 64, 65, 100, 128, 200, 256, 257, 512])
        num_seqs = min(rng.choice([1, 3, 32, 33, 256, 257, 700]), 60_000 // (longest * num_kv_heads * group) + 1)
        contexts = [longest, *(rng.randint(1, longest) for _ in range(num_seqs - 1))]
        queries = [rng.choice([context, context, min(context, 17), rng.randint(0, context)]) for context in contexts]
        cases.append(
            Case(
                tuple(queries),
                tuple(contexts),
                dtype=dtype,
                pool_dtype=pool_dtype,
                scaled=pool_dtype is not None and rng.random() < 0.7,
                head_size=head_size,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                group=group,
                seed=index,
                **rng.choice(OPTIONS),
            )
        )
    return cases


def sample_little_cases(count: int, *, seed: int = 0) -> list[Case]:
    """Return batches of decode with few sequences and heads, or short sequences: equally long, or of any lengths."""
    rng = random.Random(f"little {seed}")
    cases = []
    for index in range(count):
        dtype, pool_dtype = DTYPES[index % len(DTYPES)]
        head_size, block_size = rng.choice([64, 128, 128, *HEAD_SIZES]), rng.choice([16, 16, *BLOCK_SIZES])
        num_kv_heads, group = rng.choice([1, 2, 3, 8, 16]), rng.choice([1, 2, 4, 7, 8, 16, 20])
        longest = rng.choice([1, 60, 64, 65, 130, 500, 1100, 2500, 6000])
        most_seqs = max(1, 200_000 // (longest * num_kv_heads * group))
        num_seqs = min(rng.choice([1, 1, 2, 3, 4, 8, 17, 40, 300]), most_seqs)
        shortest = rng.choice([longest, max(1, longest * 9 // 10), 1])
        contexts = tuple(rng.randint(shortest, longest) for _ in range(num_seqs))
        most_queries = rng.choice([1, 1, max(1, 16 // group)])
        queries = tuple(min(context, rng.choice([1, most_queries, most_queries, 0])) for context in contexts)
        cases.append(
            Case(
                queries,
                contexts,
                dtype=dtype,
                pool_dtype=pool_dtype,
                scaled=pool_dtype is not None and rng.random() < 0.7,
                head_size=head_size,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                group=group,
                num_layers=1,
                layer=0,
                seed=index,
                **rng.choice([{}, {}, *OPTIONS]),
            )
        )
    return cases
