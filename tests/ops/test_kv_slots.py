"""Writes of keys and values to slots, reads, and block copies: their content, and that nothing else changes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from attention_reference import DTYPES, POOL_DTYPES, put, put_sequence
from each_row import each_row

from kvservice import ops
from kvservice.errors import InvalidArgumentError

LAYERS, KV_HEADS = 3, 2


def random_pool(dtype: str, head_size: int, block_size: int, num_blocks: int = 9) -> np.ndarray:
    rng = np.random.default_rng(block_size)
    shape = (num_blocks, LAYERS, 2, KV_HEADS, head_size * block_size)
    return rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])


def random_tokens(dtype: str, count: int, head_size: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(count)
    key, value = rng.standard_normal((2, count, KV_HEADS, head_size), np.float32).astype(DTYPES[dtype])
    return key, value


def test_a_sequence_put_at_once_lies_as_one_put_by_token() -> None:
    for dtype in POOL_DTYPES.values():
        rng = np.random.default_rng(0)
        key, value = rng.standard_normal((2, 21, KV_HEADS, 48), np.float32).astype(dtype)
        shape = (9, LAYERS, 2, KV_HEADS, 48 * 8)
        by_token, at_once = np.full(shape, np.nan, key.dtype), np.full(shape, np.nan, key.dtype)
        blocks = np.array([7, 0, 4])
        for pos in range(21):
            put(by_token, 1, blocks[pos // 8], pos % 8, 8, key[pos], value[pos])
        put_sequence(at_once, 1, blocks, 8, key, value)
        assert at_once.tobytes() == by_token.tobytes(), dtype


def assert_written_where_the_layout_says(dtype: str, head_size: int, block_size: int, slots: np.ndarray) -> None:
    """Fail unless a write puts each element in its place and nothing anywhere else, and a read gives them back."""
    pool = random_pool(dtype, head_size, block_size)
    expected = pool.copy()
    key, value = random_tokens(dtype, len(slots), head_size)
    for index, slot in enumerate(slots):
        put(expected, 1, slot // block_size, slot % block_size, block_size, key[index], value[index])
    ops.write_kv(pool, 1, slots, key, value)
    assert pool.tobytes() == expected.tobytes()
    read_key, read_value = ops.read_kv(pool, 1, slots, head_size=head_size)
    assert read_key.dtype == key.dtype
    assert read_key.tobytes() == key.tobytes()
    assert read_value.tobytes() == value.tobytes()


def test_write_puts_each_element_where_the_layout_says() -> None:
    with each_row() as row:
        for dtype, head_size, block_size in product(DTYPES, (32, 40, 128), (1, 2, 8, 16, 256)):
            rng = np.random.default_rng(7)
            num_slots = 9 * block_size
            # Scattered slots, and a range that crosses the end of a block.
            slots = rng.permutation(num_slots)[: min(num_slots, 20)]
            slots = np.unique(np.concatenate([slots, np.arange(num_slots)[block_size - 1 :][: block_size + 2]]))
            with row((dtype, head_size, block_size)):
                assert_written_where_the_layout_says(dtype, head_size, block_size, rng.permutation(slots))


def test_neighbouring_slots_are_written_and_read_as_single_ones() -> None:
    """Several tokens of a block are moved together, from any slot of it on."""
    with each_row() as row:
        for dtype, head_size, block_size in product(DTYPES, (32, 40), (8, 16, 256)):
            slots = np.arange(3, min(3 * block_size, block_size + 50))
            with row((dtype, head_size, block_size)):
                assert_written_where_the_layout_says(dtype, head_size, block_size, slots)


def test_large_writes_go_over_all_threads() -> None:
    pool = random_pool("bfloat16", 128, 16, num_blocks=64)
    slots = np.random.default_rng(0).permutation(64 * 16)[:1000]
    key, value = random_tokens("bfloat16", 1000, 128)
    ops.write_kv(pool, 2, slots, key, value)
    read_key, read_value = ops.read_kv(pool, 2, slots, head_size=128)
    assert read_key.tobytes() == key.tobytes()
    assert read_value.tobytes() == value.tobytes()


def test_of_two_tokens_in_one_slot_the_later_stays() -> None:
    pool = random_pool("float32", 64, 16)
    key, value = random_tokens("float32", 40, 64)
    ops.write_kv(pool, 0, np.full(40, 17), key, value)
    read_key, read_value = ops.read_kv(pool, 0, np.array([17]), head_size=64)
    assert read_key.tobytes() == key[-1:].tobytes()
    assert read_value.tobytes() == value[-1:].tobytes()


def test_strided_keys_and_values() -> None:
    pool = random_pool("float32", 64, 16)
    key, value = random_tokens("float32", 6, 64)
    both = np.concatenate([key, value], axis=1)
    ops.write_kv(pool, 0, np.arange(12)[::2], both[:, :KV_HEADS], both[:, KV_HEADS:])
    read_key, read_value = ops.read_kv(pool, 0, np.arange(0, 12, 2), head_size=64)
    assert read_key.tobytes() == key.tobytes()
    assert read_value.tobytes() == value.tobytes()


def test_copy_blocks_between_and_within_pools() -> None:
    for num_copies, head_size in product((0, 1, 4), (64, 256)):
        source, target = random_pool("float32", head_size, 128), random_pool("float32", head_size, 128) + 1
        src_ids = np.array([8, 0, 3, 3], np.int32)[:num_copies]
        dst_ids = np.array([1, 2, 5, 6], np.int32)[:num_copies]
        for src, dst in ((source, target), (source, source)):
            expected = dst.copy()
            expected[dst_ids] = src[src_ids]
            ops.copy_blocks(src, dst, src_ids, dst_ids)
            assert dst.tobytes() == expected.tobytes(), (num_copies, head_size)


def test_copy_blocks_refuses() -> None:
    rows: list[tuple[list[int], list[int], bool, str]] = [
        ([9], [0], False, "src_ids"),
        ([-1], [0], False, "src_ids"),
        ([0], [9], False, "dst_ids"),
        ([0], [-1], False, "dst_ids"),
        ([0, 1], [2, 2], False, "dst_ids"),
        ([0, 1], [1, 2], True, "src_ids"),
        ([4], [4], True, "src_ids"),
        ([0, 1], [2], False, "dst_ids"),
    ]
    with each_row() as row:
        for src_ids, dst_ids, same_pool, field in rows:
            source = random_pool("float32", 64, 16)
            target = source if same_pool else random_pool("float32", 64, 16)
            before = target.tobytes()
            with row((src_ids, dst_ids, same_pool)):
                with pytest.raises(InvalidArgumentError) as raised:
                    ops.copy_blocks(source, target, np.array(src_ids, np.int32), np.array(dst_ids, np.int32))
                assert raised.value.field == field
                assert target.tobytes() == before
