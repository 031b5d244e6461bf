"""A tiny random Llama with a tokenizer, made without a download."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512
HIDDEN_SIZE = 128
NUM_LAYERS = 4
# The projections of an adapter, with the sizes of their outputs.
PROJECTIONS = {"q_proj": 128, "k_proj": 64, "v_proj": 64}
RANK = 8


def save_tiny_llama(directory: Path) -> None:
    """Write config, float32 weights and tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=256,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        # Far from the default of 0.02: attention then depends on single tokens, so wrong K/V change the output.
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    save_tokenizer(directory)


def save_tokenizer(directory: Path) -> None:
    """Write a tokenizer for which the token of id `n` is the word `wn`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2").save_pretrained(
        directory
    )


def save_adapter(directory: Path, seed: int) -> None:
    """Write a random adapter (LoRA) of the model."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(NUM_LAYERS):
        for name, size in PROJECTIONS.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, HIDDEN_SIZE, generator=random)
            weights[f"{module}.lora_B.weight"] = torch.randn(size, RANK, generator=random)
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(PROJECTIONS), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
