"""A real vLLM on a GPU with models of all kinds of attention: the same tokens as without a connector.

It needs vLLM beside kvservice in one environment.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from gpu_models import MODELS, save_gpu_model

from kvservice.bench.vllm import VLLMBenchOptions, failures, run

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_a_connector(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single prompts, computed and from the store; and, where vLLM is batch-invariant, many at once whose prefixes are
    in the store."""
    model = save_gpu_model(name, tmp_path / "model")
    if model.recurrent:
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    results = run(
        VLLMBenchOptions(
            device="cuda",
            model=str(tmp_path / "model"),
            connectors=("kvservice",),
            workloads=("found",) if model.recurrent or model.one_by_one else ("found", "cycle"),
            store_gib=4,
            # vLLM itself never has the last block of a prompt in its cache, and these prompts do not end with a block.
            lengths=(2050, 8190),
            quick=True,
            check=True,
            engine={"enforce_eager": True} | model.engine,
            logs=str(tmp_path / "logs"),
        )
    )
    assert not results["missing"]
    assert not failures(results), results["equal"]
    stored = [row["engines"] for row in results["rows"] if row["row"].endswith("in the store")]
    # An engine of recurrent layers keeps states at the ends of blocks of some hundred tokens.
    assert all(engines["kvservice"]["found"] > 0.7 and not engines["none"]["found"] for engines in stored), stored
