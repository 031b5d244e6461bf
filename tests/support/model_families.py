"""Small random models of several families."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# Weights are far larger than a trained model's, so that logits are spread out (standard deviation about 4) and the
# attention is not close to uniform, and an error in attention changes a token.
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ROTARY = COMMON | {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT = COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128}
WINDOW = 5

# The configuration of each family. KV heads and head size fit one pool, so that one daemon serves most families.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", ROTARY | {"num_key_value_heads": 2}),
    "llama_mqa": ("Llama", ROTARY | {"num_key_value_heads": 1}),
    "qwen2": (
        "Qwen2",
        ROTARY
        | {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "mistral": ("Mistral", ROTARY | {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "gpt2": ("GPT2", GPT | {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gemma2": (
        "Gemma2",
        ROTARY
        | {
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 8,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
        },
    ),
    "bloom": ("Bloom", COMMON | {"hidden_size": 64, "n_layer": 2, "n_head": 2}),
}
HEAD_MODELS = {"GPT2": "GPT2LMHeadModel"}


def build(family: str, **changed: Any) -> PreTrainedModel:
    """Return a model of the family, with some options of its configuration changed."""
    name, options = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**options | changed)
    torch.manual_seed(2)
    model = getattr(transformers, HEAD_MODELS.get(name, f"{name}ForCausalLM"))(config)
    # Families initialize biases and norms to constants, which would exclude them from the comparison.
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    return model.eval()
