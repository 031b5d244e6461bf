"""The demo with a daemon on the GPU, also as a command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_is_well(dtype: str) -> None:
    command = [sys.executable, "-P", "-m", "kvservice", "demo", "--device", "cuda", "--dtype", dtype, "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads(finished.stdout)
    assert (result["device"], result["dtype"], result["tokens"]) == ("cuda:0", dtype, 8 * 32)
    if dtype == "float32":
        assert result["tokens_match"] is True
    else:
        assert 0 < result["logits_error"] <= 2 * result["library_logits_error"]
    assert result["cow_copies"] == 2
    assert result["swapped_blocks"] == 10
