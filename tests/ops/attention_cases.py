"""A sample of the grid of shapes and options, the same in every run. As a program it checks a range of it.

The program is for other instruction sets, which `KVSERVICE_CPU_ISA` selects once per process.
"""

from __future__ import annotations

import random
import sys

from attention_reference import DTYPES, Case, check, make_batch

from kvservice import ops

HEAD_SIZES = (32, 40, 64, 72, 80, 96, 112, 120, 128, 192, 256)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
HEADS = ((1, 1), (2, 1), (2, 2), (1, 3), (2, 4), (1, 5), (2, 8), (1, 17), (3, 2))
OPTIONS: tuple[dict[str, float | int | bool], ...] = (
    {},
    {"scale": 0.3},
    {"sliding_window": 1},
    {"sliding_window": 37},
    {"sliding_window": 128},
    {"logits_soft_cap": 3.0},
    {"logits_soft_cap": 1e6},
    {"logits_soft_cap": 3e38},
    {"alibi": True},
    {"alibi": True, "sliding_window": 50, "logits_soft_cap": 5.0, "scale": 0.2},
)


def sample_lengths(rng: random.Random, block_size: int, *, most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Contexts at the edges of blocks, of the kernels' 16-token units and of 128-token tiles; all kinds of queries."""
    edges = [edge + by for edge in (block_size, 2 * block_size, 16, 128, 256) for by in (-1, 0, 1)]
    contexts, queries = [], []
    for _ in range(rng.randint(1, 4)):
        context = min(most, max(1, rng.choice([*edges, rng.randint(1, most)])))
        contexts.append(context)
        queries.append(min(context, rng.choice([1, 1, 0, 2, 5, 16, 33, context])))
    return tuple(queries), tuple(contexts)


def sample_cases(count: int, seed: int = 0) -> list[Case]:
    """Cycle through each axis with a different stride, so that many pairs of values occur."""
    rng = random.Random(seed)
    axes = [list(axis) for axis in (DTYPES, HEAD_SIZES, BLOCK_SIZES, HEADS, OPTIONS)]
    for axis in axes:
        rng.shuffle(axis)
    cases = []
    for index in range(count):
        if index % 11 == 0:
            for axis in axes:
                rng.shuffle(axis)
        dtype, head_size, block_size, (num_kv_heads, group), options = (axis[index % len(axis)] for axis in axes)
        query_lens, context_lens = sample_lengths(rng, block_size, most=300)
        cases.append(
            Case(
                query_lens,
                context_lens,
                dtype=dtype,
                head_size=head_size,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                group=group,
                seed=index,
                **options,
            )
        )
    return cases


def check_cases(cases: list[Case]) -> None:
    for case in cases:
        batch = make_batch(case)
        check(batch, *ops.attention(*batch.arguments(), **batch.options, return_lse=True))


if __name__ == "__main__":
    first, stop = map(int, sys.argv[1:])
    sampled = sample_cases(stop)[first:]
    check_cases(sampled)
    print(ops.cpu_isa(), len(sampled))
