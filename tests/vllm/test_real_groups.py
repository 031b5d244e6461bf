"""A real vLLM with models of several groups of K/V caches: the same tokens as without a connector."""

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

BLOCK_SIZE = 32


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


# The second one ends with a full block, the third one is shorter than a window, the last two share a prefix.
PROMPTS = [
    prompt(0, 700),
    prompt(1, 640),
    prompt(2, 100),
    prompt(3, 500) + prompt(4, 200),
    prompt(3, 500) + prompt(5, 90),
]


# A prefix of it ends in the middle of the first.
MIDDLE = PROMPTS[0][:400] + prompt(6, 50)


def full_blocks(tokens: list[int]) -> int:
    """Return the number of tokens of a prompt that are not computed if all its blocks are loaded."""
    return min(len(tokens) // BLOCK_SIZE * BLOCK_SIZE, len(tokens) - 1)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save_tiny_hybrid(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def daemon(model: Path) -> Iterator[Daemon]:  # noqa: ARG001
    with Daemon(**SMALL_POOL | {"store_gib": 0.25}) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with Engine(model, tmp_path_factory.mktemp("alone") / "log") as engine:
        tokens: Any = engine.generate([*PROMPTS, MIDDLE])["tokens"]
        return list(tokens)


def cached(engine: Engine, prompts: list[list[int]], expected: list[list[int]]) -> list[int]:
    """Return how many tokens of prompts were found."""
    answer = engine.generate(prompts)
    assert answer["tokens"] == expected
    return list(answer["cached"])


@pytest.mark.parametrize("model", ["gemma3"], indirect=True)
def test_loads_of_a_step(model: Path, daemon: Daemon, expected: list[list[int]], tmp_path: Path) -> None:
    """Of windows, vLLM keeps those before the last token of a prompt, and so does the store."""
    transfer = connector(daemon.address, max_held_percent=49, tenant="step")
    with Engine(model, tmp_path / "first", kv_transfer_config=transfer) as engine:
        assert [cached(engine, [tokens], [said]) for tokens, said in zip(PROMPTS, expected, strict=False)][:4] == [
            [0]
        ] * 4
    with Engine(model, tmp_path / "second", kv_transfer_config=transfer) as engine:
        for some in (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 5)):
            longest = [(len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE for tokens in PROMPTS[some]]
            assert cached(engine, PROMPTS[some], expected[some]) == longest
        engine.reset()
        assert zero_values(daemon.process.pid) > 0
        answer = engine.generate(PROMPTS[:1])
        assert answer["cached"] == [len(PROMPTS[0]) // BLOCK_SIZE * BLOCK_SIZE]
        assert answer["tokens"] != expected[:1], "the other tests would fail if blocks were wrong"


@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True)
def test_asynchronous_loads_of_all_windows(
    model: Path, daemon: Daemon, expected: list[list[int]], tmp_path: Path
) -> None:
    """They are verified. Blocks that are damaged are computed again."""
    options = {
        "kv_transfer_config": connector(daemon.address, max_held_percent=49, tenant="asynchronous", verify=True),
        "prefix_cache_retention_interval": BLOCK_SIZE,
    }
    with Engine(model, tmp_path / "first", **options) as engine:
        for tokens, said in zip(PROMPTS, expected, strict=False):
            cached(engine, [tokens], [said])
    with Engine(model, tmp_path / "second", **options) as engine:
        assert cached(engine, PROMPTS, expected[:-1]) == list(map(full_blocks, PROMPTS))
        assert cached(engine, [MIDDLE], expected[-1:]) == [400 // BLOCK_SIZE * BLOCK_SIZE]
        engine.reset()
        damage_values(daemon.process.pid)
        cached(engine, PROMPTS, expected[:-1])
        engine.reset()
        assert cached(engine, PROMPTS[:1], expected[:1]) == [full_blocks(PROMPTS[0])], "they are stored anew"
