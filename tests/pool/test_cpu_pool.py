"""A pool in host memory: its shape, its descriptor, and refused sizes."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from constants import set_constants
from each_row import each_row

from kvservice.config import ServeConfig
from kvservice.devices import open_device
from kvservice.errors import ResourceExhaustedError
from kvservice.pool import DTYPES, CpuPool, PoolLayout

LAYOUT = PoolLayout(num_layers=3, num_kv_heads=2, head_size=32, block_size=4, dtype="bfloat16")


def test_shape_and_bytes_follow_the_layout() -> None:
    with each_row() as row:
        for dtype in DTYPES:
            with row(dtype):
                layout = PoolLayout(3, 2, 32, 4, dtype)
                pool = CpuPool(layout, 5)
                assert pool.blocks.shape == (5, 3, 2, 2, 32 * 4)
                assert pool.blocks.dtype == DTYPES[dtype]
                assert pool.blocks.nbytes == pool.num_bytes == 5 * layout.block_bytes
                assert layout.block_bytes == 4 * layout.token_bytes
                assert pool.blocks[0].flags.c_contiguous


def test_the_memory_is_a_file_that_can_be_mapped_again() -> None:
    pool = CpuPool(LAYOUT, 2)
    pool.blocks[1] = 2.5
    with mmap.mmap(pool.fd, pool.num_bytes, prot=mmap.PROT_READ) as again:
        assert again[LAYOUT.block_bytes :] == pool.blocks[1].tobytes()
        assert again[: LAYOUT.block_bytes] == bytes(LAYOUT.block_bytes)


def test_a_pool_of_no_blocks_takes_nothing() -> None:
    assert CpuPool(LAYOUT, 0).blocks.shape[0] == 0


def test_more_than_the_machine_has_is_refused_with_the_numbers() -> None:
    with pytest.raises(ResourceExhaustedError, match=rf"{2**40} blocks of {LAYOUT.block_bytes} bytes") as caught:
        CpuPool(LAYOUT, 2**40)
    assert caught.value.field == "num_blocks"


@pytest.mark.parametrize("fails", ["the check", "the allocation"])
def test_the_option_of_the_tier_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """The error names the option of the pool or of the swap tier, whether a check or the allocation fails."""
    if fails == "the check":
        set_constants(monkeypatch, "kvservice.pool", available_bytes=lambda: 0)
    else:
        set_constants(monkeypatch, "kvservice.pool", populate=no_memory)
    for options, field in (
        ({"num_blocks": 4}, "num_blocks"),
        ({"pool_gib": 1.0}, "pool_gib"),
    ):
        config = ServeConfig.model_validate(options)
        with pytest.raises(ResourceExhaustedError) as caught:
            open_device(config)
        assert caught.value.field == field
    monkeypatch.undo()
    with pytest.raises(ResourceExhaustedError) as caught:
        open_device(ServeConfig.model_validate({"num_layers": 1, "num_blocks": 4, "swap_space_gib": 1 << 16}))
    assert caught.value.field == "swap_space_gib"


def no_memory(*_: object, **__: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.mark.parametrize(
    ("limit", "usage"),
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
)
def test_more_than_the_containers_limit_leaves_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, usage: str
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text(f"{1 << 20}\n")
    (tmp_path / usage).write_text(f"{(1 << 20) - 3 * LAYOUT.block_bytes}\n")
    set_constants(monkeypatch, "kvservice.pool", CGROUPS=tmp_path)
    assert np.all(CpuPool(LAYOUT, 3).blocks == 0)
    with pytest.raises(ResourceExhaustedError, match=f"{3 * LAYOUT.block_bytes} are available"):
        CpuPool(LAYOUT, 4)
    (tmp_path / limit).write_text("max\n")
    assert CpuPool(LAYOUT, 4).num_blocks == 4
