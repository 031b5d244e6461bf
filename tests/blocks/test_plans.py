"""Values that the block manager returns."""

from __future__ import annotations

import tracemalloc

import numpy as np

from kvservice.blocks.plans import PADDING_BLOCK, gather_block_tables


def test_gathered_tables_end_with_padding() -> None:
    tables = np.arange(1, 25, dtype=np.int32).reshape(4, 6)
    found = gather_block_tables(tables, np.array([3, 0, 3]), np.array([5, 1, 8], np.int32), 2)
    expected = [[19, 20, 21, PADDING_BLOCK], [1, *[PADDING_BLOCK] * 3], [19, 20, 21, 22]]
    assert found.tolist() == expected
    assert found.flags.c_contiguous
    assert found.dtype == np.int32


def test_gathering_some_tables_copies_no_others() -> None:
    """Block tables may have thousands of rows, each as wide as the longest sequence."""
    tables = np.zeros((4096, 1025), np.int32)
    rows = np.array([7, 4000])
    context_lens = np.array([1024, 3], np.int32)
    tracemalloc.start()
    try:
        gather_block_tables(tables, rows, context_lens, 1)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 100_000
