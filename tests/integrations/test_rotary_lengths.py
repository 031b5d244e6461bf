"""Rotary embeddings that depend on the length of the longest sequence of a pass: their K/V are never shared."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from cache_argument import CACHE, cached
from model_families import ROTARY
from transformers import DynamicCache, PreTrainedModel

from kvservice.client import Session
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import (
    KVServiceCache,
    forward,
    install,
    model_keys,
    pool_options,
    uninstall,
)

ORIGINAL_LENGTH = 16
HALF_HEAD = 16
LONG_ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "short_factor": [1.0] * HALF_HEAD,
    "long_factor": [1.0 + 3 * i for i in range(HALF_HEAD)],
}
LONG: dict[str, Any] = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "rope_parameters": LONG_ROPE,
}
DYNAMIC = {
    "num_key_value_heads": 2,
    "max_position_embeddings": ORIGINAL_LENGTH,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0},
}
EXPERTS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}
MODELS = {
    "Phi3": ROTARY | LONG,
    "Phimoe": ROTARY | LONG | EXPERTS | {"rope_parameters": LONG_ROPE | {"short_mscale": 1.0, "long_mscale": 1.2}},
    "Llama": ROTARY | DYNAMIC,
}


@pytest.fixture(params=MODELS)
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    config = getattr(transformers, f"{request.param}Config")(**MODELS[request.param])
    torch.manual_seed(5)
    return getattr(transformers, f"{request.param}ForCausalLM")(config).eval()


@pytest.fixture
def model(reference: PreTrainedModel) -> Iterator[PreTrainedModel]:
    installed = install(copy.deepcopy(reference))
    yield installed
    uninstall(installed)


@pytest.fixture
def kv(clients, reference: PreTrainedModel) -> Iterator[Session]:
    with clients(pool_options(reference.config)).session() as session:
        yield session


def test_generates_across_the_original_length(model, reference, kv, batch) -> None:
    """A prompt that grows beyond the original length, a longer prompt in the same cache, and the first prompt again."""
    arguments: dict[str, Any] = {**batch, "max_new_tokens": 8, "do_sample": False}
    outputs = []
    library: dict[str, Any] = {CACHE: DynamicCache(config=reference.config)}
    if "phi" in reference.config.model_type:
        # The library computes everything again when frequencies change. Older versions then pass only the last column.
        library = {"use_cache": False}
    for each, caching in ((model, {CACHE: KVServiceCache(kv)}), (reference, library)):
        short = {name: value[:, 6:] for name, value in batch.items()}
        first = each.generate(**arguments | short, **caching)
        mask = torch.cat([short["attention_mask"], torch.ones(3, 8, dtype=torch.long)], 1)
        second = each.generate(**arguments | {"input_ids": first, "attention_mask": mask}, **caching)
        outputs.append((first, second))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    with KVServiceCache(kv) as cache:
        again = model.generate(**arguments | short, **cached(cache))
        assert "rotary" in cache.private_because
        assert {sequence.num_cached_tokens for sequence in cache.sequences if sequence is not None} == {0}
    assert torch.equal(again, outputs[1][0])


def test_steps_of_several_lengths_are_refused(model, kv) -> None:
    step = kv.open_step([kv.allocate([1, 2, 3], extra_keys=model_keys(model))])
    with pytest.raises(InvalidArgumentError, match="rotary") as refused:
        forward(model, step, [1, 2, 3])
    assert refused.value.field == "model"
