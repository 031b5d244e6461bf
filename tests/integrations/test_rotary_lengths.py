"""Rotary embeddings that depend on the length of the longest sequence of a pass: their K/V are never shared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from cache_argument import CACHE, cached
from each_row import each_row
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


@dataclass
class Rotary:
    """A model that is installed, the same weights with the library's own cache, and a session for it."""

    model: PreTrainedModel
    reference: PreTrainedModel
    kv: Session


@pytest.fixture
def open_model(clients) -> Iterator[Callable[[str], Rotary]]:
    with ExitStack() as stack:

        def make(name: str) -> Rotary:
            config = getattr(transformers, f"{name}Config")(**MODELS[name])
            torch.manual_seed(5)
            reference = getattr(transformers, f"{name}ForCausalLM")(config).eval()
            model = install(copy.deepcopy(reference))
            stack.callback(uninstall, model)
            kv = stack.enter_context(clients(pool_options(config)).session())
            return Rotary(model, reference, kv)

        yield make


def assert_generates_across_the_original_length(rotary: Rotary, batch: dict[str, torch.Tensor]) -> None:
    """A prompt that grows beyond the original length, a longer prompt in the same cache, and the first prompt again."""
    arguments: dict[str, Any] = {**batch, "max_new_tokens": 8, "do_sample": False}
    outputs = []
    library: dict[str, Any] = {CACHE: DynamicCache(config=rotary.reference.config)}
    if "phi" in rotary.reference.config.model_type:
        # The library computes everything again when frequencies change. Older versions then pass only the last column.
        library = {"use_cache": False}
    models: list[tuple[Any, dict[str, Any]]] = [
        (rotary.model, {CACHE: KVServiceCache(rotary.kv)}),
        (rotary.reference, library),
    ]
    short = {name: value[:, 6:] for name, value in batch.items()}
    for each, caching in models:
        first = each.generate(**arguments | short, **caching)
        mask = torch.cat([short["attention_mask"], torch.ones(3, 8, dtype=torch.long)], 1)
        second = each.generate(**arguments | {"input_ids": first, "attention_mask": mask}, **caching)
        outputs.append((first, second))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    with KVServiceCache(rotary.kv) as cache:
        again = models[0][0].generate(**arguments | short, **cached(cache))
        assert "rotary" in cache.private_because
        assert {sequence.num_cached_tokens for sequence in cache.sequences if sequence is not None} == {0}
    assert torch.equal(again, outputs[1][0])


def test_generates_across_the_original_length(open_model, batch) -> None:
    with each_row() as row:
        for name in MODELS:
            with row(name):
                assert_generates_across_the_original_length(open_model(name), batch)


def test_steps_of_several_lengths_are_refused(open_model) -> None:
    with each_row() as row:
        for name in MODELS:
            with row(name):
                rotary = open_model(name)
                step = rotary.kv.open_step([rotary.kv.allocate([1, 2, 3], extra_keys=model_keys(rotary.model))])
                with pytest.raises(InvalidArgumentError, match="rotary") as refused:
                    forward(rotary.model, step, [1, 2, 3])
                assert refused.value.field == "model"
