"""Prompts are checked before anything is queued for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MptConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from kvservice.engines import SamplingParams
from kvservice.engines.prompts import ModelLimits, check_prompt
from kvservice.errors import InvalidArgumentError

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
}
LIMITS = ModelLimits(vocabulary=40, max_length=100, eos_ids=frozenset())


@pytest.mark.parametrize(
    ("text", "said"), [("w39 w60", "60 is not in the vocabulary of 40"), ("w3 \ud800", "surrogate"), ("", "no tokens")]
)
def test_a_text_that_the_model_cannot_take_is_refused(text, said) -> None:
    """The tokenizer may have more tokens than the model."""
    words: Any = SimpleNamespace(encode=lambda text: [int(word[1:]) for word in text.split()])
    with pytest.raises(InvalidArgumentError, match=said) as refused:
        check_prompt(text, SamplingParams(), LIMITS, words, "prompts[1]")
    assert refused.value.field == "prompts[1]"
    assert check_prompt("w3 w39", SamplingParams(), LIMITS, words).token_ids == (3, 39)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (LlamaConfig(**TINY, max_position_embeddings=32), 32),
        (GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32), 32),
        (MptConfig(vocab_size=40, d_model=16, n_layers=1, n_heads=2, max_seq_len=32), 32),
        (BertConfig(**TINY, max_position_embeddings=32, is_decoder=True), 32),
        (RobertaConfig(**TINY, max_position_embeddings=34, pad_token_id=1, is_decoder=True), 32),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_the_longest_sequence_is_what_the_model_can_compute(config: PreTrainedConfig, longest: int) -> None:
    model = AutoModelForCausalLM.from_config(config).eval()
    assert ModelLimits.of(model, 1000).max_length == longest
    assert ModelLimits.of(model, 20).max_length == 20
    model(torch.full((1, longest), 5))
