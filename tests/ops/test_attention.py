"""Attention, compared with its definition in float64: shapes, options, instruction sets, threads; and mutants."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import attention_cases
import numpy as np
import pytest
from attention_reference import DTYPES, Case, check, make_batch, reference
from each_row import each_row
from todays_part import ENTRIES

from kvservice import ops

INSTRUCTION_SETS = ("portable", "avx2", "avx512", "avx512_bf16", "amx_bf16")


NUM_CASES = 480


def assert_sampled_right(cases: list[Case]) -> None:
    """Compare each case with float64."""
    with each_row() as row:
        for case in cases:
            with row(case):
                attention_cases.check_cases([case])


def assert_instruction_set_right(isa: str, cases: range) -> None:
    """Compare sampled cases with float64 in a process of their own."""
    script = str(Path(attention_cases.__file__))
    ran = subprocess.run(
        [sys.executable, script, str(cases.start), str(cases.stop)],
        env={**os.environ, "KVSERVICE_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    if f"this processor has no {isa}" in ran.stderr:
        pytest.skip(f"this processor has no {isa}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == [isa, str(len(cases))]


def test_sampled_cases() -> None:
    assert_sampled_right(attention_cases.sample_cases(NUM_CASES)[::4])


@pytest.mark.slow
def test_other_sampled_cases() -> None:
    """A run tries a third of them."""
    others = [case for at, case in enumerate(attention_cases.sample_cases(NUM_CASES)) if at % 4]
    assert_sampled_right(others[ENTRIES])


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_sampled_cases_on_every_instruction_set(isa: str) -> None:
    assert_instruction_set_right(isa, range(40))


@pytest.mark.slow
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_more_sampled_cases_on_every_instruction_set(isa: str) -> None:
    assert_instruction_set_right(isa, range(40, 150))


def test_an_unknown_instruction_set_is_named() -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-c", "from kvservice import ops; ops.cpu_isa()"],
        env={**os.environ, "KVSERVICE_CPU_ISA": "sse9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "InvalidArgumentError: KVSERVICE_CPU_ISA: unknown instruction set 'sse9'" in ran.stderr


def test_long_sequences_are_split_over_threads() -> None:
    """The cases are compared with float64."""
    before = ops.num_threads()
    try:
        with each_row() as row:
            for dtype in DTYPES:
                case = Case((1, 2, 1), (2900, 1500, 7), dtype=dtype, head_size=128, group=2, num_layers=1, layer=0)
                batch = make_batch(case)
                for threads in (1, 2, 5):
                    ops.set_num_threads(threads)
                    with row((dtype, threads)):
                        check(batch, *ops.attention(*batch.arguments(), return_lse=True))
    finally:
        ops.set_num_threads(before)


def test_several_python_threads_at_once() -> None:
    cases = [Case((3, 40), (700, 90), dtype=dtype, head_size=64, seed=seed) for dtype in DTYPES for seed in range(4)]
    batches = [make_batch(case) for case in cases]
    alone = [ops.attention(*batch.arguments()).tobytes() for batch in batches]

    def wrong(index: int) -> Case | None:
        batch, expected = batches[index % len(batches)], alone[index % len(batches)]
        return None if ops.attention(*batch.arguments()).tobytes() == expected else batch.case

    with ThreadPoolExecutor(4) as executor:
        assert set(executor.map(wrong, range(300))) == {None}


def test_a_forked_child_can_attend() -> None:
    """The script fails if an output differs, and hangs if the child waits for threads that it does not have."""
    script = """
import os, numpy as np
from kvservice import ops
pool = np.random.default_rng(0).standard_normal((512, 1, 2, 4, 64 * 16), np.float32)
query = np.ones((1, 4, 64), np.float32)
lens = [np.array([n], np.int32) for n in (1, 8192)]
def attend():
    return ops.attention(pool, 0, query, lens[0], np.arange(512, dtype=np.int32)[None], lens[1]).tobytes()
before = attend()
child = os.fork()
if child == 0:
    os._exit(0 if attend() == before else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and attend() == before
"""
    subprocess.run([sys.executable, "-P", "-W", "ignore::DeprecationWarning", "-c", script], check=True, timeout=60)


def test_out_and_strided_inputs() -> None:
    batch = make_batch(Case((2, 5), (20, 33)))
    expected = ops.attention(*batch.arguments())
    out = np.full_like(expected, np.nan)
    wide = np.repeat(batch.query, 2, axis=2)[:, :, ::2]
    tables = np.asfortranarray(batch.block_tables)
    result = ops.attention(batch.pool, 1, wide, batch.query_lens, tables, batch.context_lens, out=out)
    assert result is out
    assert out.tobytes() == expected.tobytes()


def test_empty_batches() -> None:
    for query_lens, context_lens in (((), ()), ((0, 0), (0, 7))):
        batch = make_batch(Case(query_lens, context_lens))
        out, lse = ops.attention(*batch.arguments(), return_lse=True)
        assert (out.shape, lse.shape) == ((0, 4, 64), (0, 4)), query_lens


def test_blocks_before_the_window_are_not_read() -> None:
    """The output is compared with float64; to read block -7 would crash."""
    batch = make_batch(Case((1,), (200,), sliding_window=20))
    batch.block_tables[0, : (200 - 20) // 16] = -7
    check(batch, *ops.attention(*batch.arguments(), **batch.options, return_lse=True))


def test_large_logits_do_not_overflow() -> None:
    for dtype in DTYPES:
        batch = make_batch(Case((2, 1), (150, 33), dtype=dtype, scale=40.0))
        expected, _ = reference(batch)
        got = ops.attention(*batch.arguments(), **batch.options).astype(np.float64)
        # One key gets nearly all weight, or two with almost equal logits share it, at the accuracy of logits of
        # thousands.
        close = np.linalg.norm(got - expected, axis=-1) <= 0.02 * np.linalg.norm(expected, axis=-1)
        assert np.isfinite(got).all(), dtype
        assert close.mean() > 0.8, dtype


MUTANT_CASE = Case(
    (1, 6), (90, 70), num_kv_heads=2, group=2, scale=0.25, sliding_window=60, logits_soft_cap=4.0, alibi=True
)


def mean_of_values(batch):
    heads = [np.repeat(values.astype(np.float64).mean(0), batch.case.group, 0) for values in batch.values]
    return np.stack([heads[seq] for seq, length in enumerate(batch.case.query_lens) for _ in range(length)])


def call(batch, *, pool=None, layer=None, query=None, tables=None, contexts=None, **options):
    return ops.attention(
        batch.pool if pool is None else pool,
        batch.case.layer if layer is None else layer,
        batch.query if query is None else query,
        batch.query_lens,
        batch.block_tables if tables is None else tables,
        batch.context_lens if contexts is None else contexts,
        **{**batch.options, **options},
    )


def with_tables(batch, change):
    tables = batch.block_tables.copy()
    change(tables)
    return call(batch, tables=tables)


def swap_blocks(tables):
    tables[0, 3], tables[1, 3] = tables[1, 3], tables[0, 3]


def skip_block(tables):
    tables[0, 2:-1] = tables[0, 3:]
    tables[0, 5] = tables[0, 4]


def repeat_block(tables):
    tables[0, 4] = tables[0, 3]


def each_token_sees_all(batch):
    parts = []
    for seq, length in enumerate(batch.case.query_lens):
        ones = np.ones(length, np.int32)
        tables = np.repeat(batch.block_tables[seq : seq + 1], length, 0)
        first = sum(batch.case.query_lens[:seq])
        query = batch.query[first : first + length]
        parts.append(ops.attention(batch.pool, 1, query, ones, tables, batch.context_lens[seq] * ones, **batch.options))
    return np.concatenate(parts)


MUTANTS = {
    "mean of V": mean_of_values,
    "two sequences' blocks swapped": lambda batch: with_tables(batch, swap_blocks),
    "block skipped": lambda batch: with_tables(batch, skip_block),
    "block read twice": lambda batch: with_tables(batch, repeat_block),
    "one token too few": lambda batch: call(batch, contexts=batch.context_lens - 1),
    "one token too many": lambda batch: call(batch, contexts=batch.context_lens + 1),
    "no causal mask": each_token_sees_all,
    "KV heads reversed": lambda batch: call(batch, pool=np.ascontiguousarray(batch.pool[:, :, :, ::-1])),
    "KV heads interleaved": lambda batch: call(batch, query=batch.query[:, [0, 2, 1, 3]])[:, [0, 2, 1, 3]],
    "K and V exchanged": lambda batch: call(batch, pool=np.ascontiguousarray(batch.pool[:, :, ::-1])),
    "scale left out": lambda batch: call(batch, scale=1.0),
    "scale of the head size": lambda batch: call(batch, scale=None),
    "window one too wide": lambda batch: call(batch, sliding_window=61),
    "window one too narrow": lambda batch: call(batch, sliding_window=59),
    "no window": lambda batch: call(batch, sliding_window=0),
    "no soft cap": lambda batch: call(batch, logits_soft_cap=0.0),
    "no ALiBi": lambda batch: call(batch, alibi_slopes=None),
    "ALiBi the wrong way round": lambda batch: call(batch, alibi_slopes=-batch.options["alibi_slopes"]),
    "ALiBi of the next head": lambda batch: call(batch, alibi_slopes=np.roll(batch.options["alibi_slopes"], 1)),
    "queries one place further": lambda batch: np.roll(call(batch), 1, axis=0),
    "left as it was": lambda batch: np.full(batch.query.shape, np.nan),
    "zeros": lambda batch: np.zeros(batch.query.shape),
}


def test_the_check_rejects_mutants() -> None:
    with each_row() as row:
        for dtype in DTYPES:
            batch = make_batch(replace(MUTANT_CASE, dtype=dtype))
            check(batch, call(batch))
            for name, mutant in MUTANTS.items():
                failing = pytest.raises(AssertionError, match="relative error")
                with row((dtype, name)), np.errstate(invalid="ignore"), failing:
                    check(batch, mutant(batch))


def test_the_check_rejects_a_wrong_log_sum_exp() -> None:
    batch = make_batch(MUTANT_CASE)
    out, lse = ops.attention(*batch.arguments(), **batch.options, return_lse=True)
    check(batch, out, lse)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(batch, out, lse / np.float32(np.log(2)))
