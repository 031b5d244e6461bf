"""Shape of the pool for a model, from its `config.json` as Hugging Face transformers writes it.

This module needs neither torch nor transformers. It rejects a model whose K/V do not fit into one pool, and a model
whose file omits a value for which the library has a default per model type.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.errors import InvalidArgumentError, reason_of

Config = Mapping[str, Any]

FILE_NAME = "config.json"
# A larger file is not a model's config.json.
MAX_FILE_BYTES = 16 << 20

# Names of the layers, query heads and hidden size for model types where at least one of them is not called
# num_hidden_layers, num_attention_heads or hidden_size.
_GPT2_NAMES = ("n_layer", "n_head", "n_embd")
_MPT_NAMES = ("n_layers", "n_heads", "d_model")
_NAMES: dict[str, tuple[str, str, str]] = {
    "bloom": ("n_layer", "n_head", "hidden_size"),
    "codegen": _GPT2_NAMES,
    "ctrl": _GPT2_NAMES,
    "dbrx": _MPT_NAMES,
    "gpt2": _GPT2_NAMES,
    "gpt_bigcode": _GPT2_NAMES,
    "gpt_neo": ("num_layers", "num_heads", "hidden_size"),
    "gptj": _GPT2_NAMES,
    "mpt": _MPT_NAMES,
    "openai-gpt": _GPT2_NAMES,
    "trocr": ("decoder_layers", "decoder_attention_heads", "d_model"),
    "xglm": ("num_layers", "attention_heads", "d_model"),
    "xlm": ("n_layers", "n_heads", "emb_dim"),
    "xlnet": ("n_layer", "n_head", "d_model"),
}
_HEAD_SIZE_NAMES = {"jetmoe": "kv_channels", "xlnet": "d_head"}

# Without num_key_value_heads a model has as many KV heads as query heads; without head_dim the head size is hidden_size
# / heads. For the following model types the library has other defaults.
_NEED_KV_HEADS = frozenset(
    {
        "beam", "bitnet", "cwm", "ernie4_5", "ernie4_5_moe", "exaone", "flint", "gemma2", "gemma3_text", "glm", "glm4",
        "gpt_oss", "granite_swa", "hy_v3", "internlm3", "iquestcoder", "jetmoe", "kolibri1", "laguna", "lfm2",
        "lfm2_moe", "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3",
        "mistral", "mixtral", "phi4_multimodal", "phimoe", "qwen3_moe", "sarvam_moe", "seed_oss", "smollm3",
        "solar_open", "starcoder2", "vaultgemma",
    }
)  # fmt: skip
_NEED_HEAD_SIZE = frozenset(
    {
        "beam", "ernie4_5", "flint", "gemma", "gemma2", "gemma3_text", "gpt_oss", "hy_v3", "kolibri1", "laguna",
        "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "seed_oss", "solar_open", "vaultgemma",
    }
)  # fmt: skip

_LAYER_TYPES = {"attention", "full_attention", "sliding_attention"}
# Keys of models without a list of layer types in which some layers keep something other than K/V.
_OTHER_LAYERS = {
    "attention_chunk_size": "chunked attention",
    "attn_layer_period": "layers without attention",
    "block_types": "layers without attention",
    "conv_L_cache": "convolution layers",
    "full_attention_interval": "linear attention",
    "linear_num_key_heads": "linear attention",
    "lru_width": "recurrent layers",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
}
# Keys that give layers their own shapes. Their values are not examined.
_DIFFERING = ("block_configs", "num_key_value_heads_per_layer")
_SHAPE_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class PoolOptions:
    """Fields of the daemon's configuration that a model determines. `dtype` is the name of a dtype."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str


def read_pool_options(model: Path) -> PoolOptions:
    """Return the pool options for a model's directory or `config.json`. Raises InvalidArgumentError naming `model`."""
    path = model / FILE_NAME if model.is_dir() else model
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_FILE_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"{path}: {reason_of(error)}", field="model") from None
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"{path}: is not a JSON object", field="model")
    try:
        return pool_options(config)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{path}: {error.message}", field="model") from None


def pool_options(config: Config) -> PoolOptions:
    """Return the pool options for a model's configuration. For a multimodal model it uses the text configuration.

    Raises InvalidArgumentError naming `config`, with the reason, for models that cannot keep their K/V in one pool.
    It does not check whether the daemon supports these heads and dtypes; the daemon's configuration does.
    """
    dtype = _dtype(config)
    while isinstance(config.get("text_config"), dict):
        config = config["text_config"]
        dtype = _dtype(config) or dtype
    for problem in _problems(config):
        raise InvalidArgumentError(problem, field="config")
    shapes = sorted({_kv_shape(layer) for layer in _layers(config)})
    if len(shapes) > 1:
        raise InvalidArgumentError(f"K/V heads differ between layers: {shapes}", field="config")
    ((num_kv_heads, head_size),) = shapes
    return PoolOptions(_whole(config, *_names(config, 0)), num_kv_heads, head_size, dtype or "float32")


def _dtype(config: Config) -> str:
    """Return the dtype of the model's weights, or "" if the file does not name it."""
    found = config.get("dtype") or config.get("torch_dtype") or ""
    return str(found).removeprefix("torch.")


def _problems(config: Config) -> Iterator[str]:
    if config.get("is_encoder_decoder") or config.get("add_cross_attention") or config.get("cross_attention_layers"):
        yield "models with cross-attention are not supported"
    if not config.get("is_causal", True) or config.get("use_bidirectional_attention"):
        yield "attention has to be causal"
    if config.get("kv_lora_rank") is not None:
        yield "multi-head latent attention is not supported"
    if config.get("num_kv_shared_layers") or config.get("use_cla"):
        yield "layers that share K/V are not supported"
    for key in _DIFFERING:
        if config.get(key) is not None:
            yield f"K/V heads differ between layers ({key})"
    if config.get("model_type") == "falcon" and config.get("alibi"):
        yield "ALiBi biases that the library rounds to bfloat16 are not supported"
    yield from _layer_problems(config)
    for names in (_names(config, 0), _names(config, 1)):
        if not any(name in config for name in names):
            yield f"the model has no {' and no '.join(names)}, or leaves it to the library's default"


def _layer_problems(config: Config) -> Iterator[str]:
    layer_types = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(layer_types, list):
        if unsupported := sorted({str(one) for one in layer_types} - _LAYER_TYPES):
            yield f"layers of type {', '.join(unsupported)} are not supported"
        return
    for key, what in _OTHER_LAYERS.items():
        if config.get(key) is not None:
            yield f"{what} ({key}) {'are' if 'layers' in what else 'is'} not supported"
    attended = config.get("attn_type_list")
    if isinstance(attended, list) and not all(attended):
        yield "linear attention (attn_type_list) is not supported"


def _layers(config: Config) -> Iterator[Config]:
    """Yield the configuration, and that of each layer whose shape is configured separately."""
    own = config.get("per_layer_config") or {}
    parts = own.values() if isinstance(own, dict) else own
    changes = [part for part in parts if isinstance(part, dict) and any(key in part for key in _SHAPE_KEYS)]
    if len(changes) < _whole(config, *_names(config, 0)):
        yield config
    for change in changes:
        yield {**config, **change}


def _kv_shape(config: Config) -> tuple[int, int]:
    """Return (number of KV heads, head size) of a layer."""
    kind = config.get("model_type")
    num_heads = _whole(config, *_names(config, 1))
    head_size = _optional(config, "head_dim", *([_HEAD_SIZE_NAMES[kind]] if kind in _HEAD_SIZE_NAMES else []))
    if head_size is None and kind in _NEED_HEAD_SIZE and "head_dim" not in config:
        raise InvalidArgumentError(f"head_dim is missing, and {kind} has its own default for it", field="config")
    head_size = head_size or _whole(config, *_names(config, 2)) // num_heads
    for key in ("v_head_dim", "swa_head_dim", "global_head_dim"):
        if config.get(key) not in (None, head_size):
            raise InvalidArgumentError(f"head_dim is {head_size}, {key} {config[key]}", field="config")
    return _num_kv_heads(config, num_heads), head_size


def _num_kv_heads(config: Config, num_heads: int) -> int:
    kind = config.get("model_type")
    if kind == "falcon":
        if config.get("multi_query", True) and not config.get("new_decoder_architecture"):
            return 1
        return _optional(config, "num_kv_heads") or num_heads
    if kind == "gpt_bigcode":
        return 1 if config.get("multi_query", True) else num_heads
    if kind == "dbrx":
        attention = config.get("attn_config")
        return _whole(attention if isinstance(attention, dict) else config, "kv_n_heads", "num_key_value_heads")
    if kind in _NEED_KV_HEADS and "num_key_value_heads" not in config:
        raise InvalidArgumentError(
            f"num_key_value_heads is missing, and {kind} has its own default for it", field="config"
        )
    found = _optional(config, "num_key_value_heads") or num_heads
    for key in ("swa_num_key_value_heads", "num_global_key_value_heads"):
        if config.get(key) not in (None, found):
            raise InvalidArgumentError(f"num_key_value_heads is {found}, {key} {config[key]}", field="config")
    # In jetmoe each expert of a token has its own queries, and the library repeats K/V for them.
    return found * _whole(config, "num_experts_per_tok") if kind == "jetmoe" else found


def _names(config: Config, which: int) -> tuple[str, ...]:
    """Return the possible names of the layers (0), the query heads (1) or the hidden size (2)."""
    usual = ("num_hidden_layers", "num_attention_heads", "hidden_size")[which]
    own = _NAMES.get(str(config.get("model_type")))
    return (usual,) if own is None or own[which] == usual else (usual, own[which])


def _whole(config: Config, *names: str) -> int:
    found = _optional(config, *names)
    if found is None:
        raise InvalidArgumentError(f"the model has no {' and no '.join(names)}", field="config")
    return found


def _optional(config: Config, *names: str) -> int | None:
    """Return the value of the first of these names that is present and not null. Raises InvalidArgumentError."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InvalidArgumentError(f"{name} is {value!r:.60}, not a number above 0", field="config")
        return value
    return None


def snapshot_name(path: Path) -> str:
    """Return "NAME@REVISION" for a model in a snapshot directory of Hugging Face, models--NAME/snapshots/REVISION, and
    "" for any other path. Files of a snapshot never change."""
    directory = Path(os.path.abspath(path.parent if path.name == FILE_NAME else path))
    repository = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not repository.startswith("models--"):
        return ""
    return f"{repository.removeprefix('models--').replace('--', '/')}@{directory.name}"
