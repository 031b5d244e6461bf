"""A real vLLM with models that have recurrent layers: the same tokens as without a connector."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_pool import SMALL_POOL
from store_memory import damage_values, zero_values
from tiny_hybrids import save_tiny_hybrid
from tiny_llama import VOCABULARY
from vllm_processes import Engine, connector, source_of

from kvservice.launch import Daemon

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.slow,
    pytest.mark.third,
    pytest.mark.skipif(
        "KVConnectorTransferResults" not in source_of("distributed/kv_transfer/kv_connector/v1/base.py"),
        reason="this vLLM makes one group of all layers for a connector",
    ),
]

OPTIONS: dict[str, Any] = {"mamba_cache_mode": "align", "enable_prefix_caching": True, "max_model_len": 4096}


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(**SMALL_POOL | {"store_gib": 0.25}) as running:
        yield running


def compare(
    name: str, daemon: Daemon, directory: Path, options: dict[str, Any], prompts: list[list[int]], cached: list[int]
) -> Iterator[Engine]:
    """Generate without a connector, and then in two engines with it, one prompt at a time. The second one finds these
    numbers of tokens, also when all come at once. `options` are those of vLLM and of the connector, under `extra`.
    Yields the second engine."""
    model = directory / "model"
    save_tiny_hybrid(name, model)
    options = OPTIONS | options
    transfer = connector(daemon.address, max_held_percent=49, **options.pop("extra", {}))
    with Engine(model, directory / "alone", **options) as engine:
        expected = [engine.generate([tokens])["tokens"][0] for tokens in prompts]
    # What nobody has computed before comes last.
    with Engine(model, directory / "first", kv_transfer_config=transfer, **options) as engine:
        found = [engine.generate([tokens]) for tokens in prompts[:-1]]
        assert [answer["tokens"][0] for answer in found] == expected[:-1]
        assert not any(answer["cached"][0] for answer in found)
    with Engine(model, directory / "second", kv_transfer_config=transfer, **options) as engine:
        found = [engine.generate([tokens]) for tokens in reversed(prompts)]
        assert [answer["cached"][0] for answer in reversed(found)] == cached
        assert [answer["tokens"][0] for answer in reversed(found)] == expected
        engine.reset()
        answer = engine.generate(prompts)
        assert answer["tokens"] == expected
        engine.reset()
        yield engine
        answer = engine.generate(prompts)
        assert (answer["tokens"] == expected) == transfer["kv_connector_extra_config"].get("verify", False)


def test_mamba_and_attention(daemon: Daemon, tmp_path: Path) -> None:
    """A step computes a block of 128 tokens, at whose end vLLM keeps the state: its kernel for CPUs cannot keep another
    one. The third prompt ends with a full block, whose last token is computed, and with it all of the block; a prefix
    of the last one ends in the middle of the first."""
    options = {"block_size": 128, "max_num_batched_tokens": 128, "prefix_cache_retention_interval": 128}
    prompts = [prompt(0, 700), prompt(1, 100), prompt(2, 640), prompt(0, 400) + prompt(3, 50)]
    for _ in compare("granite", daemon, tmp_path, options, prompts, [640, 0, 512, 384]):
        assert zero_values(daemon.process.pid) > 0


def test_gated_delta_networks_and_attention(daemon: Daemon, tmp_path: Path) -> None:
    """vLLM chooses blocks of 544 tokens, and has the states at the ends of steps: of the last prompt, 1,632 tokens of
    the attention are there, and the state after 1,088. Damaged blocks are computed again."""
    options: dict[str, Any] = {"max_num_batched_tokens": 1280, "prefix_cache_retention_interval": 544}
    # On processors with AVX-512 for bfloat16, the states would be float32 otherwise, and the blocks twice as large.
    options |= {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "bfloat16"}
    prompts = [prompt(0, 1500), prompt(1, 1088), prompt(2, 3000), prompt(2, 2000) + prompt(3, 50)]
    for _ in compare(
        "qwen3_next", daemon, tmp_path, options | {"extra": {"verify": True}}, prompts, [1088, 544, 2720, 1088]
    ):
        damage_values(daemon.process.pid)
