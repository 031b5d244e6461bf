"""Shared first blocks that are read once for all sequences, against float64, with NaN in what must not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_reference import Batch, Case, Sparse, compare, reference
from gpu_attention import OnDevice, bounds
from gpu_cases import DTYPES
from gpu_memory import GpuMemory
from shared_prefix import make_shared, run_shared_cases, sample_shared

from kvservice.errors import InvalidArgumentError

PARTS = 8
SAMPLES = 240


def attend(batch: Batch, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    with GpuMemory() as memory:
        results = OnDevice(memory, batch).attend(**options)
        memory.check_guards()
    return results


@pytest.mark.parametrize("part", range(PARTS))
def test_sampled_cases(part: int) -> None:
    run_shared_cases(sample_shared(SAMPLES)[part::PARTS])


def long_case(**changed: Any) -> Case:
    contexts = tuple(1024 + own for own in (1, 2, 700, 16, 17, 333, 64, 1500, *range(3, 59)))
    case = Case((1,) * len(contexts), contexts, dtype="bfloat16", head_size=128, num_kv_heads=2, group=4)
    return replace(case, **changed)


LONG_COMMON = 64


@pytest.mark.parametrize(("dtype", "pool_dtype"), DTYPES[:4])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_long_prefix_of_many_sequences(dtype: str, pool_dtype: str | None, group: int) -> None:
    """As many queries of a KV head as one kernel takes, and as the other does."""
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


def test_it_is_chosen_where_it_pays() -> None:
    large = make_shared(long_case(num_kv_heads=8, group=2), LONG_COMMON)
    decoded, cascaded, chosen = (
        attend(large, kernel=kernel, num_common_blocks=LONG_COMMON)[0].tobytes()
        for kernel in ("decode", "cascade", "auto")
    )
    assert cascaded != decoded
    assert chosen == cascaded
    assert attend(large, num_common_blocks=0)[0].tobytes() == decoded
    small = make_shared(Case((1, 1, 1), (40, 50, 60), dtype="bfloat16", head_size=128), 2)
    decoded = attend(small, kernel="decode")[0].tobytes()
    assert attend(small, num_common_blocks=2)[0].tobytes() == decoded


UNSHARED: dict[str, dict[str, Any]] = {
    "a window": {"sliding_window": 700},
    "slopes": {"alibi": True},
    "a sparse pattern": {"sparse": Sparse(3, 2, 16, 1, 0)},
    "float32": {"dtype": "float32"},
    "another head size": {"head_size": 72},
    "many queries": {"query_lens": (1, 70, 1), "context_lens": (1100, 1200, 1300)},
}


@pytest.mark.parametrize("option", [*UNSHARED, "batch invariance"])
def test_what_needs_more_is_done_without(option: str) -> None:
    case = long_case(query_lens=(1, 1, 1), context_lens=(1100, 1200, 1300))
    case = replace(case, **UNSHARED.get(option, {}))
    invariant = option == "batch invariance"
    batch = make_shared(replace(case, sliding_window=0), LONG_COMMON)
    batch.case, batch.options["sliding_window"] = case, case.sliding_window
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
