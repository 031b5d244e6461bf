"""Arithmetic of the shapes, which figures are divided by."""

from __future__ import annotations

import pytest

from kvservice.bench.cuda_shapes import QUICK, ROTATION_BYTES, SHAPES, Shape, select, unequal


def test_every_shape_has_a_name_of_its_own() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert {shape.name for shape in select(",".join(QUICK))} == set(QUICK)
    assert select("") == SHAPES


def test_names_are_selected_by_any_of_the_words() -> None:
    chosen = select("bf16 32/8x128 64x4096, bf16 32/8x128 8x512 on")
    assert [shape.name for shape in chosen] == ["extend bf16 32/8x128 8x512 on 7680", "decode bf16 32/8x128 64x4096"]
    assert select("no such") == ()


def test_a_family_is_selected_by_its_name() -> None:
    chosen = select("head-64, no-groups")
    assert {shape.family for shape in chosen} == {"head-64", "no-groups"}
    assert {shape.family for shape in SHAPES} > {"head-64", "no-groups", "grid"}
    assert select("head") == ()


def test_unequal_lengths_are_the_same_every_time() -> None:
    lengths = unequal()
    assert lengths == unequal()
    assert (len(lengths), min(lengths), max(lengths)) == (64, 1, 16384)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_bytes_of_a_decode(dtype: str) -> None:
    shape = Shape("decode", dtype, (17, 1), "", num_heads=32, num_kv_heads=8, head_size=128)
    assert shape.kv_bytes == 18 * 2 * 8 * 128 * (2 if dtype == "bfloat16" else 1)
    assert shape.blocks == (2, 1)


def test_flop_of_an_extend_are_of_the_keys_that_are_seen() -> None:
    shape = Shape("extend", "bfloat16", (10, 10), "", num_heads=4, num_kv_heads=2, head_size=64, query_len=3)
    seen = 8 + 9 + 10
    assert shape.flop == 2 * seen * 4 * 64 * 2 * 2


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_graph_goes_through_more_than_a_cache_holds(shape: Shape) -> None:
    assert shape.num_layers * shape.kv_bytes >= ROTATION_BYTES
    assert shape.num_calls >= shape.num_layers
    assert shape.num_calls % shape.num_layers == 0
