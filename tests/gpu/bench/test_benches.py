"""The GPU benchmarks run, and their results are plausible."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from kvservice.bench.cuda_store import LAYOUTS


def kvservice(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvservice", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert isinstance(results, dict)
    return results


@pytest.mark.alone
def test_attention() -> None:
    results = kvservice("bench", "attention", "--device", "cuda", "--quick", "--batch-invariant")
    assert len(results["shapes"]) == 3
    for shape in results["shapes"]:
        assert 0 < shape["relative_error"] < 0.02
        assert shape["batch_invariant_us"] > 0
        assert shape["speedup"] is None
    decode = next(shape for shape in results["shapes"] if shape["kind"] == "decode")
    # A rate above twice that of a device copy cannot come from memory: the caches would not have been cold.
    assert decode["gb_per_s"] < 2 * results["ceilings"]["device_copy_gb_per_s"]


def test_slots() -> None:
    results = kvservice("bench", "slots", "--quick")
    assert len(results["shapes"]) == 11
    for shape in results["shapes"]:
        assert shape["write_us"] > 0
        # A write much faster than a copy of as many bytes would not have reached memory.
        assert 0 < shape["share_of_copy"] < 1.5 or not shape["is_prompt"]


def test_swap() -> None:
    results = kvservice("bench", "swap", "--quick")
    for rate in (*results["gb_per_s"].values(), *results["ceilings"].values(), results["decode"]["out_gb_per_s"]):
        assert rate > 1
    assert results["decode"]["beside_us"] > 0


def test_lane() -> None:
    results = kvservice("bench", "lane", "--quick")
    ways = ("kernels", "graph", "mapped", "lane", "lane_copied", "lane_host", "region_host")
    for name in (f"{shape}_{way}" for shape in ("64x4096", "1x1024") for way in ways):
        assert 0 < results[f"{name}_p50_s"] <= results[f"{name}_p99_s"]


def test_rpc() -> None:
    results = kvservice("bench", "rpc", "--device", "cuda", "--quick")["transports"]
    assert set(results["refused"]) == {"mapped"}
    for way in ("native", "unary", "inline", "region", "lane"):
        for size in ("16k", "256k", "2m"):
            assert 0 < results[f"{way}_{size}_p50_s"] <= results[f"{way}_{size}_p99_s"]


def test_store() -> None:
    results = kvservice("bench", "store", "--device", "cuda", "--quick")
    assert len(results["gb_per_s"]) == 3 * len(LAYOUTS) + 3
    for rates in results["gb_per_s"]:
        for way in ("save", "load"):
            assert 0.1 < rates[way] < 1.5 * rates[f"{way}_link"]
