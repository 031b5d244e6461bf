"""Shapes drawn at random."""

from __future__ import annotations

import pytest

from kvservice.bench.random_shapes import (
    HEAD_SIZES,
    HEADS,
    MAX_FLOP,
    MAX_KV_BYTES,
    MAX_LENGTH,
    MAX_QUERY_LEN,
    MAX_SEQS,
    random_shapes,
)


def test_a_seed_draws_the_same_shapes_and_others_draw_others() -> None:
    assert random_shapes(50, 7) == random_shapes(100, 7)[:50]
    assert not set(random_shapes(50, 7)) & set(random_shapes(50, 8))


@pytest.mark.parametrize("seed", range(4))
def test_shapes_stay_within_their_limits(seed: int) -> None:
    shapes = random_shapes(500, seed)
    assert len({shape.name for shape in shapes}) == 500
    for shape in shapes:
        assert 1 <= shape.num_seqs <= MAX_SEQS
        assert (shape.query_len == 1) == (shape.kind == "decode")
        assert 1 <= shape.query_len <= MAX_QUERY_LEN
        assert all(0 <= context - shape.query_len <= MAX_LENGTH for context in shape.contexts)
        assert shape.kv_bytes <= MAX_KV_BYTES
        assert shape.flop <= MAX_FLOP


def test_everything_is_drawn() -> None:
    shapes = random_shapes(2000, 0)
    assert {(shape.num_heads, shape.num_kv_heads) for shape in shapes} == set(HEADS)
    assert {shape.head_size for shape in shapes} == set(HEAD_SIZES)
    assert {(shape.kind, shape.dtype) for shape in shapes} == {
        (kind, dtype) for kind in ("decode", "extend") for dtype in ("bfloat16", "float8_e4m3fn")
    }
    assert any(shape.num_seqs == 1 for shape in shapes)
    assert any(shape.num_seqs > MAX_SEQS // 2 for shape in shapes)
    assert any(shape.kind == "extend" and set(shape.contexts) == {shape.query_len} for shape in shapes), "no prefix"
    assert any(len(set(shape.contexts)) > 1 for shape in shapes)
