"""The models of `bench serve`: Llamas with random weights, without an end token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvservice.bench.serve_trace import MAX_POSITIONS

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
# 1.3 billion parameters.
LARGE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
}


def shape_of(device: str) -> dict[str, Any]:
    return LARGE if device == "cuda" else SMALL


def build_model(dtype: str, device: str = "cpu", shape: dict[str, Any] | None = None) -> LlamaForCausalLM:
    """Build the model of a device, on it. The weights are 4 times an initialization for training, so that greedy
    choices are not near ties."""
    config = LlamaConfig(
        **(shape or shape_of(device)),
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(), torch.device(device), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    torch.nn.Module.to(model, getattr(torch, dtype))
    model.train(False)
    return model
