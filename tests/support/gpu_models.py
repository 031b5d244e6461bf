"""Random models of the kinds of attention that engines meet, for kernels of a GPU, made without a download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY, HIDDEN, HEAD = 32_000, 1024, 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": HEAD,
    "max_position_embeddings": 65_536,
    # Three times the default: attention then depends on single tokens, so wrong K/V change the output.
    "initializer_range": 0.0625,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA_2: dict[str, Any] = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
GATED_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
}
RECURRENT: dict[str, Any] = {"mamba_cache_mode": "align", "enable_prefix_caching": True}


@dataclass(frozen=True)
class GPUModel:
    """A class of transformers, the fields of its configuration, and options of vLLM that it needs. vLLM has no
    batch-invariant kernels for recurrent layers. `one_by_one`: answers to many prompts at once are not compared."""

    model: str
    config: str
    fields: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    recurrent: bool = False
    one_by_one: bool = False


def layers(*kinds: str, times: int) -> dict[str, Any]:
    types = list(kinds) * times
    return {"layer_types": types, "num_hidden_layers": len(types)}


SLIDING = ("sliding_attention", "full_attention")
MODELS = {
    "gemma3": GPUModel(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        layers("sliding_attention", *SLIDING, times=4)
        | {"sliding_window": 512, "query_pre_attn_scalar": HEAD, "tie_word_embeddings": True},
    ),
    "gpt_oss": GPUModel(
        "GptOssForCausalLM",
        "GptOssConfig",
        layers(*SLIDING, times=4) | EXPERTS | {"sliding_window": 128},
        # vLLM alone gives 51 of 96 other answers when it computes the prompts in other batches.
        one_by_one=True,
    ),
    "llama4": GPUModel(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        layers(*["chunked_attention"] * 3, "full_attention", times=2)
        | EXPERTS
        | {
            "attention_chunk_size": 1024,
            "no_rope_layers": [1, 1, 1, 0] * 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 2048,
            "num_experts_per_tok": 1,
        },
    ),
    "granite": GPUModel(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        layers("mamba", "mamba", "attention", times=3) | EXPERTS | MAMBA_2 | {"shared_intermediate_size": 1024},
        RECURRENT,
        recurrent=True,
    ),
    "qwen3_next": GPUModel(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        layers("linear_attention", "linear_attention", "full_attention", times=3) | GATED_DELTA,
        RECURRENT | {"additional_config": {"gdn_prefill_backend": "triton"}},
        recurrent=True,
    ),
    "falcon_h1": GPUModel(
        "FalconH1ForCausalLM",
        "FalconH1Config",
        MAMBA_2 | {"num_hidden_layers": 6, "mamba_d_ssm": 2048, "projectors_bias": False},
        RECURRENT,
        recurrent=True,
    ),
    "jamba": GPUModel(
        "JambaForCausalLM",
        "JambaConfig",
        {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4}
        | {"expert_layer_period": 2, "expert_layer_offset": 1, "num_experts_per_tok": 2},
        RECURRENT,
        recurrent=True,
    ),
    "lfm2": GPUModel(
        "Lfm2ForCausalLM",
        "Lfm2Config",
        layers("conv", "conv", "full_attention", times=3)
        # vLLM reads these, which configurations of trained models have.
        | {"conv_dim": HIDDEN, "block_dim": HIDDEN, "block_ff_dim": 2048},
        RECURRENT,
        recurrent=True,
    ),
    "deepseek_v2": GPUModel(
        "DeepseekV2ForCausalLM",
        "DeepseekV2Config",
        {"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None}
        | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 64}
        | {"first_k_dense_replace": 2, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 512, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    ),
}


def save_gpu_model(name: str, directory: Path) -> GPUModel:
    """Write config and bfloat16 weights of one of MODELS, and return it."""
    import torch
    import transformers

    chosen = MODELS[name]
    torch.manual_seed(0)
    make: Callable[[Any], Any] = getattr(transformers, chosen.model)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = make(getattr(transformers, chosen.config)(**COMMON | chosen.fields))
    if model.config.tie_word_embeddings:
        # The embeddings are the head, too: smaller ones let other tokens than the last one be the next.
        model.get_input_embeddings().weight.data *= 0.1
    model.to(torch.bfloat16).save_pretrained(directory)
    return chosen
