"""Attention options: every checker accepts and refuses the same values, with the same fields and texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from each_row import each_row
from option_vectors import BLOCK_SIZE, INVALID, NUM_HEADS, VALID

from kvservice import ops
from kvservice.attention_options import AttentionOptions, BlockSparse
from kvservice.errors import InvalidArgumentError

CPU_VALID = [options for options in VALID if "block_sparse" not in options]
CPU_INVALID = [vector for vector in INVALID if "block_sparse" not in vector.options]


def made(options: dict[str, Any]) -> AttentionOptions:
    changes: dict[str, Any] = {}
    if "block_sparse" in options:
        changes["block_sparse"] = BlockSparse(**options["block_sparse"])
    if "alibi_slopes" in options:
        changes["alibi_slopes"] = np.array(options["alibi_slopes"], np.float32)
    return AttentionOptions(**options | changes)


def test_python_refuses() -> None:
    with each_row() as row:
        for vector in INVALID:
            with row(vector.options):
                with pytest.raises(InvalidArgumentError) as refused:
                    made(vector.options).check(NUM_HEADS, BLOCK_SIZE)
                assert (refused.value.field, refused.value.message) == (f"options.{vector.field}", vector.text)


def test_python_accepts() -> None:
    """`check` raises if it refuses a value at the end of a limit."""
    with each_row() as row:
        for options in VALID:
            with row(options):
                made(options).check(NUM_HEADS, BLOCK_SIZE)


def test_there_is_one_slope_for_each_head() -> None:
    for num_slopes in (1, NUM_HEADS - 1, NUM_HEADS + 1):
        options = AttentionOptions(alibi_slopes=np.ones(num_slopes, np.float32))
        with pytest.raises(InvalidArgumentError, match=f"are {num_slopes} for {NUM_HEADS} heads") as refused:
            options.check(NUM_HEADS, BLOCK_SIZE)
        assert refused.value.field == "options.alibi_slopes"


def test_values_that_only_python_can_have() -> None:
    for number in (2**31, 1e39):
        name = "sliding_window" if isinstance(number, int) else "scale"
        with pytest.raises(InvalidArgumentError) as refused:
            AttentionOptions(**{name: number}).check(NUM_HEADS, BLOCK_SIZE)  # type: ignore[arg-type]
        assert refused.value.field == f"options.{name}"


def attend(options: dict[str, Any]) -> np.ndarray:
    pool = np.ones((1, 1, 2, 2, 32 * BLOCK_SIZE), np.float32)
    lens, tables = np.ones(1, np.int32), np.zeros((1, 1), np.int32)
    arrays = {name: np.array(value, np.float32) for name, value in options.items() if name == "alibi_slopes"}
    return ops.attention(pool, 0, np.zeros((1, NUM_HEADS, 32), np.float32), lens, tables, lens, **options | arrays)


def test_the_cpu_kernels_refuse() -> None:
    with each_row() as row:
        for vector in CPU_INVALID:
            with row(vector.options):
                with pytest.raises(InvalidArgumentError) as refused:
                    attend(vector.options)
                assert (refused.value.field, refused.value.message) == (vector.field, vector.text)


def test_the_cpu_kernels_accept() -> None:
    with each_row() as row:
        for options in CPU_VALID:
            with row(options):
                assert np.isfinite(attend(options)).all()
