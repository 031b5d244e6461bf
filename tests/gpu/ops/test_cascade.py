"""The shared-prefix (cascade) kernel against float64. Memory that must not be read is NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_reference import Batch, Case, Sparse, compare, make_batch, reference
from gpu_attention import OnDevice, bounds
from gpu_cases import DTYPES
from gpu_memory import GpuMemory
from shared_prefix import make_shared, run_shared_cases, sample_shared

from kvservice.errors import InvalidArgumentError

PARTS = 8
SAMPLES = 240
# Number of common blocks of the long cases.
LONG_COMMON = 64


def attend(batch: Batch, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    with GpuMemory() as memory:
        results = OnDevice(memory, batch).attend(**options)
        memory.check_guards()
    return results


@pytest.mark.parametrize("part", range(PARTS))
def test_sampled_cases(part: int) -> None:
    """Each case is compared with float64."""
    run_shared_cases(sample_shared(SAMPLES)[part::PARTS])


def long_case(**changed: Any) -> Case:
    contexts = tuple(16 * LONG_COMMON + own for own in (1, 2, 700, 16, 17, 333, 64, 1500, *range(3, 59)))
    case = Case((1,) * len(contexts), contexts, dtype="bfloat16", head_size=128, num_kv_heads=2, group=4)
    return replace(case, **changed)


@pytest.mark.parametrize(("dtype", "pool_dtype"), DTYPES[:4])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_long_prefix_of_many_sequences(dtype: str, pool_dtype: str | None, group: int) -> None:
    """The number of queries per KV head covers both kernels."""
    case = long_case(dtype=dtype, pool_dtype=pool_dtype, group=group)
    batch = make_shared(case, LONG_COMMON)
    expected = reference(batch)
    for num_common in (LONG_COMMON, LONG_COMMON - 1, 1):
        results = attend(batch, kernel="cascade", num_common_blocks=num_common)
        compare(case, expected, *results, **bounds(case, "cascade"))


def test_a_count_that_is_too_large_is_noticed() -> None:
    case = Case((1, 2, 1), (200, 190, 170), dtype="bfloat16", head_size=128)
    batch = make_shared(case, 8)
    expected = reference(batch)
    compare(case, expected, *attend(batch, kernel="cascade", num_common_blocks=8), **bounds(case, "cascade"))
    out, _ = attend(batch, kernel="cascade", num_common_blocks=9)
    with pytest.raises(AssertionError, match="relative error"):
        compare(case, expected, out, **bounds(case, "cascade"))


def large_batch(num_seqs: int = 256, **changed: Any) -> Batch:
    """Return a batch large enough for cascade. The common prefix repeats the blocks of the first two sequences."""
    case = Case((1,) * num_seqs, (32,) * num_seqs, dtype="bfloat16", head_size=128, num_layers=1, layer=0)
    case = replace(case, num_kv_heads=8, **{"query_lens": case.query_lens, **changed})
    batch = make_batch(case)
    prefix = np.tile(np.resize(batch.block_tables[:2, :2].ravel(), LONG_COMMON), (num_seqs, 1))
    batch.block_tables = np.concatenate([prefix, batch.block_tables[:, :2]], axis=1)
    batch.context_lens = batch.context_lens + np.int32(LONG_COMMON * case.block_size)
    return batch


def test_it_is_chosen_where_it_pays() -> None:
    for num_seqs, wanted in ((256, "cascade"), (20, "decode")):
        batch = large_batch(num_seqs)
        without, chosen, *explicit = (
            attend(batch, kernel=kernel, num_common_blocks=num_common)[0].tobytes()
            for kernel, num_common in (("auto", 0), ("auto", 64), ("decode", 64), ("cascade", 64))
        )
        assert explicit[0] != explicit[1]
        assert without == explicit[0]
        assert chosen == explicit[wanted == "cascade"]


UNSHARED: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 700},
    "slopes": {"alibi": True},
    "a sparse pattern": {"sparse": Sparse(3, 2, 16, 1, 0)},
    "float32": {"dtype": "float32"},
    "another head size": {"head_size": 120},
    "many queries": {"query_lens": (1,) * 255 + (30,)},
    "batch invariance": {},
}


@pytest.mark.parametrize("option", UNSHARED)
def test_what_needs_more_is_done_without(option: str) -> None:
    """Options that cascade does not support use another kernel, although cascade would be faster."""
    batch, invariant = large_batch(**UNSHARED[option]), option == "batch invariance"
    with_it, without = (
        attend(batch, num_common_blocks=num_common, batch_invariant=invariant)[0] for num_common in (LONG_COMMON, 0)
    )
    assert with_it.tobytes() == without.tobytes()
    with pytest.raises(InvalidArgumentError) as raised:
        attend(batch, kernel="cascade", num_common_blocks=LONG_COMMON, batch_invariant=invariant)
    assert raised.value.field == "kernel"


@pytest.mark.parametrize(("num_common", "field"), [(0, "kernel"), (1000, "num_common_blocks")])
def test_counts_that_are_refused(num_common: int, field: str) -> None:
    batch = make_shared(Case((1, 1), (40, 50), dtype="bfloat16"), 2)
    with pytest.raises(InvalidArgumentError) as raised:
        attend(batch, kernel="cascade", num_common_blocks=num_common)
    assert raised.value.field == field
