"""Writing K/V to slots, reading them and copying blocks. Results are bitwise equal, and nothing else is written."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention_reference import DTYPES, POOL_DTYPES, Array, put
from gpu_memory import GpuMemory

from kvservice.errors import InvalidArgumentError
from kvservice.ops import cuda

LAYERS, KV_HEADS = 3, 2
PAIRS = [(pool, tensor) for pool in POOL_DTYPES for tensor in DTYPES if pool == tensor or pool.startswith("float8")]


def random_pool(dtype: str, head_size: int, block_size: int, num_blocks: int = 9) -> Array:
    rng = np.random.default_rng(block_size)
    shape = (num_blocks, LAYERS, 2, KV_HEADS, head_size * block_size)
    return rng.standard_normal(shape, np.float32).astype(POOL_DTYPES[dtype])


def random_tokens(dtype: str, count: int, head_size: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(count)
    key, value = rng.standard_normal((2, count, KV_HEADS, head_size), np.float32).astype(DTYPES[dtype])
    return key, value


def stored(tokens: Array, scale: Array | None, dtype: str) -> Array:
    """Return the expected pool values: value divided by scale, saturated to the largest finite value."""
    if not dtype.startswith("float8"):
        return tokens
    largest = float(ml_dtypes.finfo(dtype).max)
    scaled = tokens.astype(np.float32) / (1 if scale is None else scale[:, None])
    return np.clip(scaled, -largest, largest).astype(POOL_DTYPES[dtype])


def assert_same(got: Array, expected: Array) -> None:
    """Compare bitwise. All NaN values are equal."""
    both_nan = np.isnan(got.astype(np.float32)) & np.isnan(expected.astype(np.float32))
    integer = f"u{got.itemsize}"
    differ = (got.view(integer) != expected.view(integer)) & ~both_nan
    where = np.argwhere(differ)
    assert not differ.any(), f"{len(where)} of {differ.size} differ, the first at {where[0]}"


def write(
    memory: GpuMemory, pool: Array, slots: Array, key: Array, value: Array, scales: Array | None = None, layer: int = 1
) -> Array:
    there = memory.upload(pool)
    k_scale, v_scale = (None, None) if scales is None else (memory.upload(scales[0]), memory.upload(scales[1]))
    tokens = memory.upload(slots), memory.upload(key), memory.upload(value)
    cuda.write_kv(there, layer, *tokens, k_scale=k_scale, v_scale=v_scale, stream=memory.stream)
    return memory.download(there)


def slot_patterns(num_slots: int, block_size: int) -> dict[str, Array]:
    rng = np.random.default_rng(7)
    scattered = rng.permutation(num_slots)[: min(num_slots, 33)]
    middle = np.arange(num_slots)[block_size // 2 :][: 3 * block_size + 1]
    blocks = rng.permutation(num_slots // block_size)[:5]
    prompt = (blocks[:, None] * block_size + np.arange(block_size)).ravel()
    padded = np.where(rng.random(len(scattered)) < 0.4, -1, scattered)
    outside = np.concatenate([[num_slots, num_slots + 5, -(2**40), 2**40], scattered])
    return {
        "scattered": scattered,
        "a run from the middle of a block": middle,
        "whole blocks": prompt,
        "a prompt that ends within a block": prompt[: -(block_size // 2) or None],
        "padding": padded,
        "outside the pool": outside,
        "backwards": middle[::-1].copy(),
        "one": scattered[:1],
        "none": scattered[:0],
    }


@pytest.mark.parametrize(("pool_dtype", "dtype"), PAIRS)
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16, 64, 256])
def test_write_puts_each_element_where_the_layout_says(pool_dtype: str, dtype: str, block_size: int) -> None:
    scales = np.array([[0.5, 2.0], [1.7, 0.3]], np.float32) if pool_dtype.startswith("float8") else None
    for head_size in (32, 80, 128) if block_size == 16 else (48,):
        pool = random_pool(pool_dtype, head_size, block_size)
        for name, slots in slot_patterns(len(pool) * block_size, block_size).items():
            key, value = random_tokens(dtype, len(slots), head_size)
            expected = pool.copy()
            for index, slot in enumerate(slots):
                if 0 <= slot < len(pool) * block_size:
                    one_key = stored(key[index], None if scales is None else scales[0], pool_dtype)
                    one_value = stored(value[index], None if scales is None else scales[1], pool_dtype)
                    put(expected, 1, slot // block_size, slot % block_size, block_size, one_key, one_value)
            with GpuMemory() as memory:
                got = write(memory, pool, slots, key, value, scales)
            try:
                assert_same(got, expected)
            except AssertionError as error:
                raise AssertionError(f"{name}, head size {head_size}: {error}") from None


def random_slots(rng: np.random.Generator, num_blocks: int, block_size: int) -> Array:
    """Return the slots of blocks in random order, from a random token on, with a disturbance: none, padding, slots
    outside the pool, exchanged slots, a part backwards, or everything in random order."""
    num_slots = num_blocks * block_size
    slots = (rng.permutation(num_blocks)[:, None] * block_size + np.arange(block_size)).ravel()
    slots = slots[rng.integers(0, min(num_slots, 20)) * rng.integers(0, 2) :][: rng.integers(1, num_slots + 1)]
    some = rng.random(len(slots)) < rng.choice([0.01, 0.3])
    match rng.integers(0, 6):
        case 1:
            slots[some] = -1
        case 2:
            slots[some] = rng.choice([-(2**40), num_slots, num_slots + 3, 2**40], int(some.sum()))
        case 3:
            slots[some] = rng.permutation(slots[some])
        case 4:
            begin, end = np.sort(rng.integers(0, len(slots) + 1, 2))
            slots[begin:end] = slots[begin:end][::-1].copy()
        case 5:
            slots = rng.permutation(slots)
    return slots


@pytest.mark.parametrize("seed", range(60))
def test_random_shapes(memory: GpuMemory, seed: int) -> None:
    """Write, then read. From a few tokens to more patches than fit on the device at once."""
    rng = np.random.default_rng(seed)
    pool_dtype, dtype = PAIRS[seed % len(PAIRS)]
    scaled = pool_dtype.startswith("float8")
    step = 16 if scaled else 8
    head_size = int(rng.choice([64, 128, step * int(rng.integers(32 // step, 256 // step + 1))]))
    num_kv_heads, block_size = int(rng.integers(1, 10)), int(2 ** rng.integers(0, 9))
    num_blocks = max(2, int(rng.choice([100, 1000, 4000])) // block_size)
    pool_shape = (num_blocks, 2, 2, num_kv_heads, head_size * block_size)
    pool = rng.standard_normal(pool_shape, np.float32).astype(POOL_DTYPES[pool_dtype])
    slots = random_slots(rng, num_blocks, block_size)
    shape = (len(slots), num_kv_heads, head_size)
    tokens = rng.standard_normal((2, *shape), np.float32).astype(DTYPES[dtype])
    scales = rng.uniform(0.2, 3.0, (2, num_kv_heads)).astype(np.float32) if scaled and seed % 3 else None

    inside = (slots >= 0) & (slots < num_blocks * block_size)
    block, offset = slots[inside] // block_size, slots[inside] % block_size
    x = 16 // pool.itemsize
    written = [stored(tokens[side], None if scales is None else scales[side], pool_dtype)[inside] for side in (0, 1)]
    expected = pool.copy()
    keys = expected[:, 1, 0].reshape(num_blocks, num_kv_heads, head_size // x, block_size, x)
    keys[block, :, :, offset] = written[0].reshape(-1, num_kv_heads, head_size // x, x)
    expected[:, 1, 0] = keys.reshape(num_blocks, num_kv_heads, -1)
    values = expected[:, 1, 1].reshape(num_blocks, num_kv_heads, head_size, block_size)
    values[block, :, :, offset] = written[1]
    expected[:, 1, 1] = values.reshape(num_blocks, num_kv_heads, -1)

    there, slots_there = memory.upload(pool), memory.upload(slots)
    k_scale, v_scale = (None, None) if scales is None else (memory.upload(scale) for scale in scales)
    options: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "stream": memory.stream}
    cuda.write_kv(there, 1, slots_there, memory.upload(tokens[0]), memory.upload(tokens[1]), **options)
    assert_same(memory.download(there), expected)
    back = memory.poisoned(shape, dtype), memory.poisoned(shape, dtype)
    cuda.read_kv(there, 1, slots_there, key=back[0], value=back[1], **options)
    for side in (0, 1):
        want = np.full(shape, np.nan, DTYPES[dtype])
        if scaled:
            factor = 1 if scales is None else scales[side][:, None]
            want[inside] = (written[side].astype(np.float32) * np.float32(factor)).astype(DTYPES[dtype])
        else:
            want[inside] = written[side]
        assert_same(memory.download(back[side]), want)
    memory.check_guards()


@pytest.mark.parametrize(("pool_dtype", "dtype"), PAIRS)
def test_read_is_the_way_back(memory: GpuMemory, pool_dtype: str, dtype: str) -> None:
    scaled = pool_dtype.startswith("float8")
    scales = np.array([[0.5, 2.0], [1.7, 0.3]], np.float32)
    for head_size, block_size in ((32, 1), (128, 16), (80, 8), (48, 256), (256, 32)):
        pool = random_pool(pool_dtype, head_size, block_size, num_blocks=11)
        slots = np.random.default_rng(3).permutation(11 * block_size)[:50]
        slots[1:2] = -1
        expected = [
            DTYPES[dtype].type(np.nan) * np.ones((len(slots), KV_HEADS, head_size), DTYPES[dtype]) for _ in "kv"
        ]
        for index, slot in enumerate(slots):
            if slot < 0:
                continue
            block, offset = divmod(int(slot), block_size)
            x = 16 // pool.itemsize
            key = pool[block, 2, 0].reshape(KV_HEADS, -1, block_size, x)[:, :, offset].reshape(KV_HEADS, head_size)
            value = pool[block, 2, 1].reshape(KV_HEADS, head_size, block_size)[:, :, offset]
            for side, row in enumerate((key, value)):
                real = (row.astype(np.float32) * scales[side][:, None]).astype(DTYPES[dtype]) if scaled else row
                expected[side][index] = real
        shape = (len(slots), KV_HEADS, head_size)
        there = memory.poisoned(shape, dtype), memory.poisoned(shape, dtype)
        k_scale, v_scale = (memory.upload(scale) if scaled else None for scale in scales)
        arrays = {"key": there[0], "value": there[1], "k_scale": k_scale, "v_scale": v_scale}
        cuda.read_kv(memory.upload(pool), 2, memory.upload(slots), **arrays, stream=memory.stream)
        for got, want in zip(there, expected, strict=True):
            assert_same(memory.download(got), want)
    memory.check_guards()


@pytest.mark.parametrize("pool_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_conversion_to_8_bits(memory: GpuMemory, pool_dtype: str, dtype: str) -> None:
    """Convert every 16-bit number to FP8, and the same numbers with their neighbours as float32: rounding to nearest
    even, saturation, NaN."""
    bits = np.arange(2**16, dtype=np.uint16)
    source = bits.view(DTYPES["float16"] if dtype == "float16" else DTYPES["bfloat16"])
    numbers = source.astype(DTYPES[dtype])
    if dtype == "float32":
        with np.errstate(invalid="ignore"):
            ties = (source.astype(np.float32) + np.spacing(source.astype(np.float32)))[: 2**15]
        numbers = np.concatenate([numbers[: 2**15], ties])
    key = numbers.reshape(-1, KV_HEADS, 128)
    pool = np.zeros((16, LAYERS, 2, KV_HEADS, 128 * 16), POOL_DTYPES[pool_dtype])
    slots = np.random.default_rng(1).permutation(len(key))
    for scales in (None, np.full((2, KV_HEADS), 0.25, np.float32), np.full((2, KV_HEADS), 3.3, np.float32)):
        with np.errstate(invalid="ignore", over="ignore"):
            expected = stored(key, None if scales is None else scales[0], pool_dtype)
        got = write(memory, pool, slots, key, key, scales)
        for side in (0, 1):
            block, offset = slots // 16, slots % 16
            if side == 0:
                rows = got[:, 1, 0].reshape(16, KV_HEADS, 8, 16, 16)[block, :, :, offset].reshape(-1, KV_HEADS, 128)
            else:
                rows = got[:, 1, 1].reshape(16, KV_HEADS, 128, 16)[block, :, :, offset]
            assert_same(np.ascontiguousarray(rows), expected)


@pytest.mark.parametrize("pool_dtype", POOL_DTYPES)
def test_large_writes(memory: GpuMemory, pool_dtype: str) -> None:
    dtype = "bfloat16" if pool_dtype.startswith("float8") else pool_dtype
    pool = random_pool(pool_dtype, 128, 16, num_blocks=600)
    blocks = np.random.default_rng(0).permutation(600)
    slots = (blocks[:, None] * 16 + np.arange(16)).ravel()[5:8200]
    key, value = random_tokens(dtype, len(slots), 128)
    there = memory.upload(pool)
    back = memory.poisoned(key.shape, dtype), memory.poisoned(key.shape, dtype)
    slots_there = memory.upload(slots)
    cuda.write_kv(there, 2, slots_there, memory.upload(key), memory.upload(value), stream=memory.stream)
    cuda.read_kv(there, 2, slots_there, key=back[0], value=back[1], stream=memory.stream)
    for got, tokens in zip(back, (key, value), strict=True):
        assert_same(memory.download(got), stored(tokens, None, pool_dtype).astype(DTYPES[dtype]))
    assert_same(memory.download(there)[:, :2], pool[:, :2])


def copies(num_copies: int, num_blocks: int, pattern: str) -> tuple[Array, Array]:
    rng = np.random.default_rng(num_copies)
    ids = rng.permutation(num_blocks).astype(np.int32)
    src, dst = ids[:num_copies], ids[num_copies : 2 * num_copies]
    if pattern == "runs":
        half = num_blocks // 2
        return np.arange(num_copies, dtype=np.int32), np.arange(half, half + num_copies, dtype=np.int32)
    return src, dst


@pytest.mark.parametrize("pattern", ["random", "runs"])
@pytest.mark.parametrize("num_copies", [0, 1, 5, 700])
@pytest.mark.parametrize("where", ["within", "device to device", "to host", "from host"])
def test_copy_blocks(memory: GpuMemory, where: str, num_copies: int, pattern: str) -> None:
    source = random_pool("float16", 40, 8, num_blocks=1500)
    target = random_pool("float16", 40, 8, num_blocks=1600) + np.float16(1)
    src_ids, dst_ids = copies(num_copies, 1500, pattern)
    if where == "within":
        target = source
    expected = target.copy()
    expected[dst_ids] = source[src_ids]
    src = memory.page_locked(source) if where == "from host" else memory.upload(source)
    dst = memory.page_locked(target) if where == "to host" else src if where == "within" else memory.upload(target)
    cuda.copy_blocks(src, dst, src_ids, dst_ids, stream=memory.stream)
    memory.synchronize()
    got = target if where == "to host" else memory.download(dst)
    assert got.tobytes() == expected.tobytes()


def test_copies_of_large_blocks(memory: GpuMemory) -> None:
    pool = np.random.default_rng(0).integers(0, 2**16, (12, 32, 2, 8, 128 * 16), np.uint16).view(np.float16)
    ids = np.array([3, 4, 5, 9], np.int32), np.array([0, 1, 2, 11], np.int32)
    expected = pool.copy()
    expected[ids[1]] = pool[ids[0]]
    there = memory.upload(pool)
    cuda.copy_blocks(there, there, *ids, stream=memory.stream)
    assert memory.download(there).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "same_pool", "field"),
    [
        ([9], [0], False, "src_ids"),
        ([-1], [0], False, "src_ids"),
        ([0], [9], False, "dst_ids"),
        ([0], [-1], False, "dst_ids"),
        ([0, 1], [2, 2], False, "dst_ids"),
        ([0, 1], [1, 2], True, "src_ids"),
        ([0, 1], [2], False, "dst_ids"),
    ],
)
def test_copy_blocks_refuses(
    memory: GpuMemory, src_ids: list[int], dst_ids: list[int], same_pool: bool, field: str
) -> None:
    pool = random_pool("float32", 64, 16)
    source, target = memory.upload(pool), memory.upload(pool)
    ids = np.array(src_ids, np.int32), np.array(dst_ids, np.int32)
    with pytest.raises(InvalidArgumentError) as raised:
        cuda.copy_blocks(source, source if same_pool else target, *ids, stream=memory.stream)
    assert raised.value.field == field
    assert memory.download(target).tobytes() == pool.tobytes()
