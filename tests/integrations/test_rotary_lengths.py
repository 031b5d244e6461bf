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
from kvservice.engines.prompts import ModelLimits
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


def test_steps_up_to_the_original_length_are_those_of_each_sequence_alone(open_model) -> None:
    """Longer ones are refused. A longer pass before, which changes the frequencies, has no effect."""
    prompts = [list(range(1, ORIGINAL_LENGTH)), [5, 6, 7]]
    token_ids = [token_id for prompt in prompts for token_id in prompt]
    with each_row() as row, torch.no_grad():
        for name in MODELS:
            with row(name):
                rotary = open_model(name)
                kv, model = rotary.kv, rotary.model
                generator: Any = model
                generator.generate(torch.arange(1, 40)[None], max_new_tokens=2, **cached(KVServiceCache(kv)))
                sequences = kv.allocate_batch(prompts, extra_keys=[model_keys(model) for _ in prompts])
                logits = forward(model, kv.open_step(sequences), token_ids)
                expected = torch.cat([rotary.reference(torch.tensor([prompt])).logits[0] for prompt in prompts])
                torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
                steady = ModelLimits.of(model, 1000).max_length
                assert steady in (ORIGINAL_LENGTH, ORIGINAL_LENGTH - 1)
                long = kv.allocate([*range(1, steady + 2)], extra_keys=model_keys(model))
                with pytest.raises(InvalidArgumentError, match=rf"rotary.* beyond {steady} tokens") as refused:
                    forward(model, kv.open_step([long]), [*range(1, steady + 2)])
                assert refused.value.field == "model"
