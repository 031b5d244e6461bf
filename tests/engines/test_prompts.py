"""Prompts are checked before anything is queued for them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from each_row import each_row
from known_logits import small_config
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    Phi3Config,
    PreTrainedConfig,
    RobertaConfig,
)

from kvservice.engines import LLM, SamplingParams
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon

ONE = SamplingParams(temperature=0, max_tokens=1)
# The most tokens of a sequence in the daemon.
LONGEST = 48


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    options = pool_options(small_config(40), torch.float32)
    with Daemon(**options, num_blocks=64, block_size=16, max_sequence_tokens=LONGEST) as running:
        yield running


def test_a_text_that_the_model_cannot_take_is_refused(daemon) -> None:
    """The tokenizer may have more tokens than the model."""
    words: Any = SimpleNamespace(
        encode=lambda text, **_: [int(word[1:]) for word in text.split()],
        decode=lambda ids, **_: " ".join(f"w{token}" for token in ids),
    )
    model = LlamaForCausalLM(small_config(40)).eval()
    with LLM(model, words, address=daemon.address) as llm:
        for text, said in (("w39 w60", "60 is not in the vocabulary of 40"), ("", "no tokens")):
            with pytest.raises(InvalidArgumentError, match=said) as refused:
                llm.generate(["w3", text], ONE)
            assert refused.value.field == "prompts[1]"
        (output,) = llm.generate("w3 w39", ONE)
        assert output.prompt_token_ids == (3, 39)


DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
}


def accepts(llm: LLM, length: int) -> bool:
    """Return whether an engine takes a prompt of this length. It generates one token then."""
    try:
        llm.generate([[5] * length], ONE)
    except InvalidArgumentError as refused:
        if "prompt and output have at most" in str(refused):
            return False
        raise
    return True


def test_the_longest_sequence_is_what_the_model_can_compute(daemon) -> None:
    tiny: dict[str, Any] = {
        "vocab_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 16,
    }
    rows: list[tuple[PreTrainedConfig, int]] = [
        (LlamaConfig(**tiny, max_position_embeddings=32), 32),
        (GPT2Config(vocab_size=40, n_embd=64, n_layer=1, n_head=2, n_positions=32), 32),
        (MptConfig(vocab_size=40, d_model=64, n_layers=1, n_heads=2, max_seq_len=32), 32),
        (BertConfig(**tiny, max_position_embeddings=32, is_decoder=True), 32),
        (RobertaConfig(**tiny, max_position_embeddings=34, pad_token_id=1, is_decoder=True), 32),
        (small_config(40), LONGEST),
        # With these, a longer sequence would change the K/V of others.
        (LlamaConfig(**tiny, max_position_embeddings=32, rope_parameters=DYNAMIC), 31),
        (Phi3Config(**tiny, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=LONG), 16),
    ]
    with each_row() as row:
        for config, longest in rows:
            with row(config.model_type):
                model = AutoModelForCausalLM.from_config(config).eval()
                with LLM(model, address=daemon.address) as llm:
                    assert accepts(llm, longest - 1)
                    assert not accepts(llm, longest)
                model(torch.full((1, longest), 5))
