"""Whole blocks between a real GPU, or its swap tier, and host memory that is not pinned."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pytest
from kv_model import POOL

from kvservice import _ext
from kvservice.config import ServeConfig
from kvservice.devices import cuda, open_device
from kvservice.kept import KeptState

pytest.importorskip("kvservice._cuda", reason="kvservice was built without CUDA")

PoolName = Literal["pool", "swap"]
# Blocks of 1 MiB, so that 40 of them pass the staging memory several times.
SHAPE = {"num_layers": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "float16", "block_size": 16}
BLOCK_BYTES = 1 << 20
NUM_BLOCKS, NUM_COPIED = 64, 40


@pytest.fixture
def device() -> Iterator[Any]:
    changes = {"device": "cuda", "num_blocks": NUM_BLOCKS, "swap_space_gib": NUM_BLOCKS * BLOCK_BYTES / 2**30}
    config = ServeConfig.model_validate(POOL | SHAPE | changes | {"max_message_mib": 1, "store_copy_threads": 4})
    assert config.layout.block_bytes == BLOCK_BYTES
    device: Any = open_device(config, KeptState.fresh())
    yield device
    device.close()


def addresses_of(rows: Any) -> Any:
    return np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.shape[1]) + np.uint64(rows.ctypes.data)


def checksums_of(rows: Any) -> Any:
    places = (np.arange(len(rows), dtype=np.uint64) * np.uint64(BLOCK_BYTES)).tobytes()
    return np.frombuffer(_ext.store_checksums(rows.ctypes.data, places, BLOCK_BYTES, 2), np.uint64)


def ids_of(rng: np.random.Generator, count: int = NUM_COPIED) -> Any:
    return rng.permutation(NUM_BLOCKS)[:count].astype(np.int32)


async def load(device: Any, rows: Any, ids: Any, checksums: Any, pool: PoolName = "pool") -> Any:
    return await device.load_blocks(addresses_of(rows), ids, checksums, pool)


async def save(device: Any, ids: Any, rows: Any, pool: PoolName = "pool") -> Any:
    return await device.save_blocks(ids, addresses_of(rows), pool)


@pytest.mark.parametrize("pool", ["pool", "swap"])
@pytest.mark.parametrize("staging", [1, 3 * BLOCK_BYTES, 8 << 20])
def test_blocks_are_loaded_and_saved_byte_by_byte(
    device: Any, monkeypatch: pytest.MonkeyPatch, staging: int, pool: PoolName
) -> None:
    """What was loaded is compared with what the swap tier has of it, and with what is saved."""
    monkeypatch.setattr(cuda, "STAGING_BYTES", staging)
    rng = np.random.default_rng(staging)
    rows = rng.integers(0, 255, (NUM_COPIED, BLOCK_BYTES), np.uint8)
    ids = ids_of(rng)
    assert asyncio.run(load(device, rows, ids, checksums_of(rows), pool)).all()
    if pool == "pool":
        device.swap_out(ids, ids)
    again = np.zeros_like(rows)
    checksums = asyncio.run(save(device, ids, again, pool))
    np.testing.assert_array_equal(again, rows)
    np.testing.assert_array_equal(checksums, checksums_of(rows))
    there = device.swap_pool.blocks.view(np.uint8).reshape(NUM_BLOCKS, BLOCK_BYTES)
    again[:] = 0
    asyncio.run(save(device, ids, again, "swap"))  # after the copies to the swap tier
    np.testing.assert_array_equal(again, rows)
    np.testing.assert_array_equal(there[ids], rows)


def test_wrong_checksums_are_reported(device: Any) -> None:
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 255, (NUM_COPIED, BLOCK_BYTES), np.uint8)
    checksums = checksums_of(rows).copy()
    rows[3, 17] ^= 1
    rows[NUM_COPIED - 1, -1] ^= 1
    right = asyncio.run(load(device, rows, ids_of(rng), checksums))
    assert np.flatnonzero(~right).tolist() == [3, NUM_COPIED - 1]


def test_copies_in_both_directions_run_beside_each_other_and_see_what_precedes_them(device: Any) -> None:
    rng = np.random.default_rng(2)

    async def scenario() -> None:
        for round_ in range(10):
            rows = rng.integers(0, 255, (NUM_COPIED // 2, BLOCK_BYTES), np.uint8)
            ids = ids_of(rng)
            first, second = ids[: NUM_COPIED // 2], ids[NUM_COPIED // 2 :]
            assert (await load(device, rows, first, checksums_of(rows))).all()
            device.copy(first, second)
            others = rng.integers(0, 255, rows.shape, np.uint8)
            copies = np.zeros_like(rows)
            _, right = await asyncio.gather(
                save(device, second, copies), load(device, others, first, checksums_of(others))
            )
            assert right.all(), round_
            np.testing.assert_array_equal(copies, rows)
            await save(device, first, copies)
            np.testing.assert_array_equal(copies, others)

    asyncio.run(scenario())
