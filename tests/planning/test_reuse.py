"""What tiers find of a trace, against a cache that is simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvservice.planning import Gpu, PlanOptions, Trace, TracedRequest, make_plan

# A block of 512 tokens of 128 KiB is 1/16 GiB.
MODEL = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "torch_dtype": "bfloat16",
}  # fmt: skip
BLOCK_TOKENS, BLOCKS_PER_GIB = 512, 16
GPU = Gpu("own", 24.0, 1000.0, 50.0)
Prompts = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(MODEL))
    return directory


def share_found(model: Path, prompts: Prompts, capacity: int) -> float:
    """Return the share of the prompts' tokens that a store of this many blocks finds."""
    requests = (TracedRequest(n, len(one) * BLOCK_TOKENS, 1, tuple(one), n) for n, one in enumerate(prompts))
    options = PlanOptions(model, GPU, weights_gib=1.0, store_gib=capacity / BLOCKS_PER_GIB)
    share = make_plan(options, Trace("t", BLOCK_TOKENS, tuple(requests))).tiers[1].hit_share
    assert share is not None
    return share


def simulated(prompts: Prompts, capacity: int) -> float:
    """Return the same for a list of blocks from the latest used to the least recently used. Prompts use their blocks
    from the last to the first."""
    latest: list[int] = []
    found = 0
    for block in (block for prompt in prompts for block in reversed(prompt)):
        if block in latest:
            found += latest.index(block) < capacity
            latest.remove(block)
        latest.insert(0, block)
    return found / max(1, sum(map(len, prompts)))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=7, unique=True), min_size=1, max_size=20), st.integers(1, 11))
def test_a_store_finds_what_its_latest_used_blocks_are(model: Path, prompts: Prompts, capacity: int) -> None:
    assert share_found(model, prompts, capacity) == pytest.approx(simulated(prompts, capacity))


def test_the_hit_share_grows_with_the_capacity(model: Path) -> None:
    prompts = [[0, 1, 2], [0, 5, 6], [0, 1, 2]]
    # The third prompt needs all five blocks for its last two; the root comes last in each prompt.
    assert [share_found(model, prompts, blocks) for blocks in (1, 2, 3, 4, 5)] == [0, 0, 2 / 9, 2 / 9, 4 / 9]
