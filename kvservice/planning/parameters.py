"""How many parameters a model has, and how many of them a token meets, from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.errors import InvalidArgumentError
from kvservice.model_shape import FILE_NAME, MAX_FILE_BYTES, PoolOptions

Config = Mapping[str, Any]

# No model has more of anything.
_MAX_VALUE = 1 << 40
_HIDDEN = ("hidden_size", "n_embd", "d_model", "emb_dim")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads")
_INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "d_inner", "dff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k")
# Model types whose feed-forward layers have two matrices. The others have three: gate, up and down.
_TWO_MATRICES = frozenset(
    {
        "bloom", "codegen", "ctrl", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "openai-gpt",
        "opt", "phi", "starcoder2", "trocr", "xglm", "xlm", "xlnet",
    }
)  # fmt: skip
# Without a width of their own, the feed-forward layers of these are four times as wide as the model.
_FOUR_TIMES = frozenset({"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt"})


@dataclass(frozen=True)
class Parameters:
    """`in_layers` are multiplied for each token (of a mixture of experts, those of its experts); `total` are all.
    `attention_width` is query heads times head size, for the products with K and V."""

    in_layers: float
    total: float
    attention_width: int

    def prefill_flops(self, num_layers: int, mean_context: float) -> float:
        """Return the floating-point operations of one token of a prompt: two for each parameter that it meets, and
        the products with K and V of `mean_context` tokens."""
        return 2 * self.in_layers + 4 * num_layers * self.attention_width * mean_context


def read_config(model: Path) -> dict[str, Any]:
    """Return the text model's configuration. The file has been read before: `read_pool_options` reports its faults."""
    path = model / FILE_NAME if model.is_dir() else model
    with path.open("rb") as file:
        config: dict[str, Any] = json.loads(file.read(MAX_FILE_BYTES))
    while isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    return config


def count_parameters(config: Config, shape: PoolOptions, given: float | None) -> Parameters:
    """Estimate the parameters of a model: matrices of attention, of feed-forward layers, and embeddings. `given` is
    the number of parameters that a token meets, from elsewhere. Raises InvalidArgumentError naming parameters_b."""
    heads = _find(config, _QUERY_HEADS) or shape.num_kv_heads
    width, kv_width = heads * shape.head_size, shape.num_kv_heads * shape.head_size
    if given is not None:
        return Parameters(given, given, width)
    hidden = _find(config, _HIDDEN)
    kind = str(config.get("model_type", ""))
    inner = _find(config, _INNER) or (4 * hidden if hidden and kind in _FOUR_TIMES else None)
    if hidden is None or inner is None:
        missing = "hidden_size" if hidden is None else "intermediate_size"
        raise InvalidArgumentError(f"the model has no {missing}: say how many a token meets", field="parameters_b")
    attention = 2 * hidden * (width + kv_width)
    matrices = 2 if kind in _TWO_MATRICES else 3
    num_experts, used = _find(config, _EXPERTS) or 1, _find(config, _EXPERTS_OF_A_TOKEN) or 1
    if num_experts > 1:
        inner = _find(config, ("moe_intermediate_size", "expert_ffn_hidden_size")) or inner
    expert = matrices * hidden * inner
    vocabulary = (_find(config, ("vocab_size", "n_words")) or 0) * hidden
    embeddings = vocabulary if config.get("tie_word_embeddings") else 2 * vocabulary
    return Parameters(
        shape.num_layers * (attention + min(used, num_experts) * expert),
        shape.num_layers * (attention + num_experts * expert) + embeddings,
        width,
    )


def weight_bytes(model: Path) -> int | None:
    """Return the size of the model's safetensors files; None: there are none."""
    files = list(model.glob("*.safetensors")) if model.is_dir() else []
    return sum(file.stat().st_size for file in files) or None


def _find(config: Config, names: tuple[str, ...]) -> int | None:
    """Return the value of the first of these names that has a whole number of a model."""
    for name in names:
        value = config.get(name)
        if type(value) is int and 0 < value <= _MAX_VALUE:
            return value
    return None
