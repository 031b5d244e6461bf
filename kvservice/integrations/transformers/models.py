"""Which models can keep their K/V in the daemon, the pool's shape that they need, and switching them over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.models.bloom.modeling_bloom import BloomPreTrainedModel

from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import bloom
from kvservice.integrations.transformers.attention import ATTENTION_NAME
from kvservice.integrations.transformers.cache import track_passes
from kvservice.pool.layout import TENSOR_DTYPES

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class _Installation:
    previous_attention: str
    hooks: tuple[torch.utils.hooks.RemovableHandle, ...]


_installations: WeakKeyDictionary[PreTrainedModel, _Installation] = WeakKeyDictionary()


def pool_options(config: PreTrainedConfig, dtype: torch.dtype | str | None = None) -> dict[str, Any]:
    """The pool's shape for a model: `num_layers`, `num_kv_heads`, `head_size` and `dtype`, named as in the daemon's
    configuration. `dtype` defaults to the configuration's, and that to float32.

    Raises InvalidArgumentError for models that cannot keep their K/V in a pool (see `install`).
    """
    for problem in _config_problems(config):
        raise InvalidArgumentError(problem, field="config")
    shapes = {_kv_shape(layer_config) for layer_config in config.per_layer_config}
    if len(shapes) > 1:
        raise InvalidArgumentError(f"K/V heads differ between layers: {sorted(shapes)}", field="config")
    (num_kv_heads, head_size), *_ = shapes
    return {
        "num_layers": int(config.num_hidden_layers),
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "dtype": _dtype_name(dtype or config.dtype or torch.float32),
    }


def install(model: PreTrainedModel) -> PreTrainedModel:
    """Switches a causal language model, in place, to attention in the daemon. Returns the model.

    From here on it runs with `past_key_values=KVServiceCache(...)`, or through `forward`; `uninstall` switches it back.

    Raises InvalidArgumentError, saying why, for what the daemon cannot do: encoders and cross-attention, latent or
    linear or chunked attention, attention sinks, layers that share K/V or differ in their heads, models with attention
    code of their own.
    """
    if model in _installations:
        return model
    pool_options(model.config)
    for problem in _model_problems(model):
        raise InvalidArgumentError(problem, field="model")
    installation = _Installation(model.config._attn_implementation, track_passes(model))
    if isinstance(model, BloomPreTrainedModel):
        bloom.adapt(model)
        model.config._attn_implementation = ATTENTION_NAME
    else:
        model.set_attn_implementation(ATTENTION_NAME)
    _installations[model] = installation
    return model


def uninstall(model: PreTrainedModel) -> PreTrainedModel:
    """Gives a model its own attention back. Returns the model."""
    installation = _installations.pop(model, None)
    if installation is None:
        return model
    for hook in installation.hooks:
        hook.remove()
    if isinstance(model, BloomPreTrainedModel):
        bloom.restore(model)
    model.config._attn_implementation = installation.previous_attention
    return model


def check_installed(model: PreTrainedModel) -> None:
    if model not in _installations:
        raise FailedPreconditionError("the model computes its attention itself: install() it first")


def _config_problems(config: PreTrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "models with cross-attention are not supported"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "attention has to be causal"
    if config.get_text_config(decoder=True) is not config:
        yield "only plain text models are supported"
    if getattr(config, "num_attention_heads", None) is None:
        yield "the model has no attention heads"
    if getattr(config, "kv_lora_rank", None) is not None:
        yield "multi-head latent attention is not supported"
    unsupported = set(get_layer_types_and_kwargs(config)[0]) - _LAYER_TYPES
    if unsupported:
        yield f"layers of type {', '.join(sorted(unsupported))} are not supported"


def _model_problems(model: PreTrainedModel) -> Iterator[str]:
    if not model._can_set_attn_implementation() and not isinstance(model, BloomPreTrainedModel):
        yield f"{type(model).__name__} has attention code of its own, outside the library's registry"
    if not all(getattr(module, "is_causal", True) for module in model.modules()):
        yield "attention has to be causal"
    if any(hasattr(module, "sinks") for module in model.modules()):
        yield "attention sinks are not supported"


def _kv_shape(config: PreTrainedConfig) -> tuple[int, int]:
    """K/V heads of a layer and their size."""
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return int(num_kv_heads), int(head_size)


def _dtype_name(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in TENSOR_DTYPES:
        raise InvalidArgumentError(f"{name} is none of {', '.join(TENSOR_DTYPES)}", field="dtype")
    return name
