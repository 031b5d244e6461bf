"""Sizes of the block store."""

from __future__ import annotations

import pytest
from store_rig import Store

from kvservice.config import ServeConfig
from kvservice.errors import ResourceExhaustedError
from kvservice.server.server_store import open_store, store_config

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("store_gib", [1 / 64, 1 / 16, 1 / 4, 1.0, 3.0, 64.0, 1000.0])
def test_blocks_of_usual_sizes_fill_the_store(store_gib: float) -> None:
    """Smaller blocks use 99 % of it at least: their records take more."""
    sizes = store_config(ServeConfig(store_gib=store_gib))
    assert sizes.quota_bytes == sizes.capacity_bytes == store_gib * GIB
    assert sizes.num_bytes <= sizes.capacity_bytes * 1.001
    num_slabs = sizes.num_bytes // sizes.slab_bytes
    rig = Store(num_slabs=1, slab_bytes=sizes.slab_bytes)
    for block_bytes in (64 << 10, 256 << 10, MIB, 2 * MIB, 4 * MIB):
        _, _, blocks_per_slab = rig.index.geometry(rig.index.open(block_bytes, sizes.slab_bytes))
        assert num_slabs * blocks_per_slab * block_bytes == sizes.capacity_bytes
    _, _, blocks_per_slab = rig.index.geometry(rig.index.open(16 << 10, sizes.slab_bytes))
    assert num_slabs * blocks_per_slab * (16 << 10) > sizes.capacity_bytes * 0.99


def test_a_store_of_no_round_size_has_whole_slabs() -> None:
    sizes = store_config(ServeConfig(store_gib=0.3, store_quota_gib=0.1))
    assert sizes.capacity_bytes == 76 * 4 * MIB
    assert sizes.num_bytes == 76 * (4 * MIB + 4096)
    assert sizes.quota_bytes == int(0.1 * GIB)


def test_a_store_that_does_not_fit_says_what_there_is() -> None:
    with pytest.raises(ResourceExhaustedError, match=r"takes 65600\.00 GiB, \d+\.\d\d GiB are available") as refused:
        open_store(ServeConfig(store_gib=1 << 16), None)
    assert refused.value.field == "store_gib"
