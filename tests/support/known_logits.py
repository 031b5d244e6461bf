"""Models whose logits are known, for tests of the choice of tokens through an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

HIDDEN_SIZE = 64


def small_config(vocabulary: int, **options: Any) -> LlamaConfig:
    """Return the configuration of one layer. All these models have one pool."""
    defaults: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    return LlamaConfig(**defaults | options)


def table_model(table: torch.Tensor, **options: Any) -> LlamaForCausalLM:
    """Return a model whose logits after token t are `table[t]`, float32 `[vocabulary, vocabulary]`, up to 64 tokens.

    Attention and MLP add zeros to the embeddings, which are rows of the unit matrix. The norm multiplies them by 8.
    """
    model = LlamaForCausalLM(small_config(len(table), rms_norm_eps=0.0, **options)).eval()
    with torch.no_grad():
        layer: Any = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(table), HIDDEN_SIZE))
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : len(table)] = table.T / HIDDEN_SIZE**0.5
    return model


class Scripted(LogitsProcessor):
    """Lets a sequence have these tokens after its prompt, whatever the logits are."""

    def __init__(self, prompt_length: int, token_ids: Sequence[int]) -> None:
        self.prompt_length, self.token_ids = prompt_length, list(token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf)
        only[:, self.token_ids[input_ids.shape[1] - self.prompt_length]] = 0.0
        return only


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 tokens, one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: at for at, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
