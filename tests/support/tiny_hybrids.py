"""Tiny random models whose layers differ in their attention, made without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_llama import HIDDEN_SIZE, VOCABULARY, save_tokenizer

# Tokens of the sliding windows: several blocks, and not a multiple of them.
WINDOW = 150
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    # Far from the default of 0.02: attention then depends on single tokens, so wrong K/V change the output.
    "initializer_range": 0.2,
    "sliding_window": WINDOW,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def _gemma3() -> Any:
    """Two layers with a sliding window, then one with full attention, and so on: three groups of four layers."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    types = ["sliding_attention", "sliding_attention", "full_attention"] * 4
    config = Gemma3TextConfig(**_COMMON, num_hidden_layers=len(types), layer_types=types, query_pre_attn_scalar=32)
    model = Gemma3ForCausalLM(config)
    # The embeddings are the head, too: smaller ones let other tokens than the last one be the next.
    model.model.embed_tokens.weight.data *= 0.1
    return model


def _gpt_oss() -> Any:
    """Layers with and without a sliding window, in turns; experts, and attention sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(GptOssConfig(**_COMMON, num_hidden_layers=8, num_local_experts=4, num_experts_per_tok=2))


def _granite() -> Any:
    """Granite 4: Mamba 2 and full attention in turns, and experts."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    mamba: dict[str, Any] = {
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    }
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 256}
    types = ["mamba", "attention"] * 2
    return GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(**_COMMON, **mamba, **experts, num_hidden_layers=len(types), layer_types=types)
    )


def _qwen3_next() -> Any:
    """Gated delta networks and full attention in turns, and experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear: dict[str, Any] = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    linear |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # vLLM's kernel for CPUs has no others
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"shared_expert_intermediate_size": 64}
    types = ["linear_attention", "full_attention"] * 2
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(**_COMMON, **linear, **experts, num_hidden_layers=len(types), layer_types=types)
    )


MODELS = {"gemma3": _gemma3, "gpt_oss": _gpt_oss, "granite": _granite, "qwen3_next": _qwen3_next}


def save_tiny_hybrid(name: str, directory: Path) -> None:
    """Write config, float32 weights and tokenizer of one of MODELS."""
    import torch

    torch.manual_seed(0)
    MODELS[name]().save_pretrained(directory)
    save_tokenizer(directory)
