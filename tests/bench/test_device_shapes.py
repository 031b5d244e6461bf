"""The shapes of `bench attention --device cuda`: which are selected and drawn, and their arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvservice.bench.attention_cuda import DeviceBenchOptions
from kvservice.errors import InvalidArgumentError

# Several times the largest L2.
ROTATION_BYTES = 320 << 20
# Limits of shapes that are drawn.
MAX_SEQS, MAX_LENGTH, MAX_QUERY_LEN, MAX_KV_BYTES, MAX_FLOP = 512, 65536, 16384, 2 << 30, 1 << 44
SHAPES = DeviceBenchOptions().selected()


def names(options: DeviceBenchOptions) -> list[str]:
    return [shape.name for shape in options.selected()]


def test_every_shape_has_a_name_of_its_own() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    quick = {"extend bf16 32/8x128 64x8 on 4088", "decode bf16 32/8x128 16x1024", "decode e4m3 32/8x128 16x1024"}
    assert set(names(DeviceBenchOptions(quick=True))) == quick


def test_names_are_selected_by_any_of_the_words() -> None:
    chosen = names(DeviceBenchOptions(shapes="bf16 32/8x128 64x4096, bf16 32/8x128 8x512 on"))
    assert chosen == ["extend bf16 32/8x128 8x512 on 7680", "decode bf16 32/8x128 64x4096"]
    with pytest.raises(InvalidArgumentError, match=r"'no such' is in no shape's name, and no family: .*head-64"):
        DeviceBenchOptions(shapes="no such").selected()


def test_a_family_is_selected_by_its_name() -> None:
    chosen = DeviceBenchOptions(shapes="head-64, no-groups").selected()
    assert {shape.family for shape in chosen} == {"head-64", "no-groups"}
    assert {shape.family for shape in SHAPES} > {"head-64", "no-groups", "grid"}
    with pytest.raises(InvalidArgumentError):
        DeviceBenchOptions(shapes="head").selected()


def test_unequal_lengths() -> None:
    lengths = {shape.contexts for shape in SHAPES if "64x1.." in shape.name}
    (unequal,) = lengths
    assert (len(unequal), min(unequal), max(unequal)) == (64, 1, 16384)


def test_bytes_of_a_decode() -> None:
    for dtype, item_bytes in (("bfloat16", 2), ("float8_e4m3fn", 1)):
        shape = replace(SHAPES[0], dtype=dtype, contexts=(17, 1), num_kv_heads=8, head_size=128)
        assert shape.kv_bytes == 18 * 2 * 8 * 128 * item_bytes
        assert shape.blocks == (2, 1)


def test_flop_of_an_extend_are_of_the_keys_that_are_seen() -> None:
    shape = replace(SHAPES[0], contexts=(10, 10), num_heads=4, num_kv_heads=2, head_size=64, query_len=3)
    seen = 8 + 9 + 10
    assert shape.flop == 2 * seen * 4 * 64 * 2 * 2


def test_a_graph_goes_through_more_than_a_cache_holds() -> None:
    wrong = [
        shape.name
        for shape in SHAPES
        if shape.num_layers * shape.kv_bytes < ROTATION_BYTES
        or shape.num_calls < shape.num_layers
        or shape.num_calls % shape.num_layers
    ]
    assert wrong == []


def test_a_seed_draws_the_same_shapes_and_others_draw_others() -> None:
    drawn = DeviceBenchOptions(random=50, seed=7).selected()
    assert drawn == DeviceBenchOptions(random=100, seed=7).selected()[:50]
    assert not set(drawn) & set(DeviceBenchOptions(random=50, seed=8).selected())


def test_shapes_stay_within_their_limits() -> None:
    for seed in range(4):
        shapes = DeviceBenchOptions(random=500, seed=seed).selected()
        assert len({shape.name for shape in shapes}) == 500
        for shape in shapes:
            assert 1 <= shape.num_seqs <= MAX_SEQS
            assert (shape.query_len == 1) == (shape.kind == "decode")
            assert 1 <= shape.query_len <= MAX_QUERY_LEN
            assert all(0 <= context - shape.query_len <= MAX_LENGTH for context in shape.contexts)
            assert shape.kv_bytes <= MAX_KV_BYTES
            assert shape.flop <= MAX_FLOP


def test_everything_is_drawn() -> None:
    shapes = DeviceBenchOptions(random=2000).selected()
    heads = {(shape.num_heads, shape.num_kv_heads) for shape in shapes}
    assert len(heads) == 12
    assert heads > {(8, 1), (28, 4), (32, 8), (128, 8), (32, 32)}
    assert {shape.head_size for shape in shapes} == {64, 128, 256}
    assert {(shape.kind, shape.dtype) for shape in shapes} == {
        (kind, dtype) for kind in ("decode", "extend") for dtype in ("bfloat16", "float8_e4m3fn")
    }
    assert any(shape.num_seqs == 1 for shape in shapes)
    assert any(shape.num_seqs > MAX_SEQS // 2 for shape in shapes)
    assert any(shape.kind == "extend" and set(shape.contexts) == {shape.query_len} for shape in shapes), "no prefix"
    assert any(len(set(shape.contexts)) > 1 for shape in shapes)
