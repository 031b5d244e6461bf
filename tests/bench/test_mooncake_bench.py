"""The benchmark of the Mooncake tier: the tier and the library move the same bytes."""

from __future__ import annotations

import asyncio
import io

import numpy as np
import pytest
from mooncake_rig import programs
from rich.console import Console

from kvservice.bench import mooncake_tier as bench

BLOCK_BYTES = 32 << 10


def test_both_ways_put_and_get() -> None:
    """The tier compares all checksums itself."""
    programs()
    with asyncio.Runner() as runner, bench.ways(runner, BLOCK_BYTES, 4 * BLOCK_BYTES) as opened:
        assert list(opened) == list(bench.LABELS)
        for way in opened.values():
            for _ in range(2):
                way.empty()
                way.put()
                way.get()
        batch = opened["library"].batch
        np.testing.assert_array_equal(batch.out, batch.values)


@pytest.mark.parametrize("call", ["put", "get"])
def test_figures_are_in_units_of_the_library(call: str) -> None:
    results = {f"{way}_{call}_{size}_s": 1.0 for way in bench.LABELS for call in ("put", "get") for size in bench.SIZES}
    results |= {"batch_bytes": 2_000_000_000, f"tier_{call}_32k_s": 4.0}
    text = io.StringIO()
    bench.render(results, Console(file=text, width=120))
    assert text.getvalue().count("2.00 (1.00)") == 4 * len(bench.SIZES) - 1
    assert text.getvalue().count("0.50 (0.25)") == 1
