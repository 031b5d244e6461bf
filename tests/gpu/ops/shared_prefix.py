"""Batches whose sequences share their first blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from attention_reference import Batch, Case, compare, reference
from gpu_attention import OnDevice, bounds, make_trapped
from gpu_cases import DTYPES, HEAD_SIZES
from gpu_memory import GpuMemory

from kvservice.errors import InvalidArgumentError

# Number of KV heads, and number of query heads per KV head.
HEADS = ((2, 1), (1, 2), (2, 3), (2, 4), (1, 7), (2, 8), (1, 16), (1, 17), (3, 2))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"scale": 0.3},
    {"logits_soft_cap": 3.0},
    {"logits_soft_cap": 30.0},
    {"logits_soft_cap": 2000.0},  # above the extend kernel's limit
)


def sample_shared(count: int, *, seed: int = 0) -> list[tuple[Case, int]]:
    """Return cases with the number of first blocks that their sequences share. Some sequences have no queries, some
    have no own tokens besides the queries."""
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        num_kv_heads, group = rng.choice(HEADS)
        head_size, block_size = rng.choice(HEAD_SIZES), rng.choice((8, 16, 32, 64, 128))
        dtype, pool_dtype = rng.choice(DTYPES)
        most = max(1, (16 if head_size > 128 else 32) // group)
        num_common = rng.choice((1, 1, 2, 3, 7, 16, 33))
        num_seqs = rng.choice((2, 2, 3, 5, 9, 20))
        with_queries = rng.randrange(num_seqs)
        query_lens, context_lens = [], []
        for seq in range(num_seqs):
            query_len = rng.choice((1, 1, 1, 0, most, rng.randint(1, most))) if seq != with_queries else 1
            own = query_len + rng.choice((0, 0, 1, block_size, rng.randint(0, 300)))
            query_lens.append(query_len)
            context_lens.append(num_common * block_size + own if query_len else rng.choice((0, 3, own)))
        case = Case(
            tuple(query_lens),
            tuple(context_lens),
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
        cases.append((case, num_common))
    return cases


def make_shared(case: Case, num_common: int, trap: int | None = None) -> Batch:
    """Return a batch in which all sequences with queries share the first blocks of the first of them."""
    batch = make_trapped(case, trap)
    with_queries = [seq for seq, query_len in enumerate(case.query_lens) if query_len]
    first, num_positions = with_queries[0], num_common * case.block_size
    for seq in with_queries[1:]:
        batch.block_tables[seq, :num_common] = batch.block_tables[first, :num_common]
        for side in (batch.keys, batch.values):
            side[seq] = side[seq].copy()
            side[seq][:num_positions] = side[first][:num_positions]
    return batch


def run_shared_cases(cases: Sequence[tuple[Case, int]], trap: int | None = None) -> None:
    """Raise AssertionError unless all results match the reference and nothing else was written."""
    failures = []
    for case, num_common in cases:
        batch = make_shared(case, num_common, trap)
        try:
            with GpuMemory() as memory:
                out, lse = OnDevice(memory, batch).attend(kernel="cascade", num_common_blocks=num_common)
                memory.check_guards()
            compare(case, reference(batch), out, lse, **bounds(case, "cascade"))
        except (AssertionError, InvalidArgumentError) as error:
            failures.append(f"{num_common} common blocks: {error}"[:600])
    assert not failures, "\n".join([f"{len(failures)} of {len(cases)} failed", *failures[:6]])
