"""Supported models, the shape of the pool that they need, and their installation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvservice import model_shape
from kvservice.config_sources import checked_config
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import keys, own_attention, passes, probe
from kvservice.integrations.transformers.arguments import library_model
from kvservice.integrations.transformers.masks import ATTENTION_NAME

ModelT = TypeVar("ModelT", bound=torch.nn.Module)

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# An attribute of installed models, and of their copies: the previous attention implementation.
_PREVIOUS_ATTENTION = "_kvservice_previous_attention"


def pool_options(config: PreTrainedConfig, dtype: torch.dtype | str | None = None) -> dict[str, Any]:
    """Return the pool's shape for a model: `num_layers`, `num_kv_heads`, `head_size` and `dtype`, named as in the
    daemon's configuration. `dtype` defaults to the model configuration's, and that to float32.

    Raises InvalidArgumentError for models that cannot keep their K/V in a pool (see `install`), and for shapes that the
    daemon does not support: the head size must be a multiple of 8 from 32 to 256.
    """
    for problem in _config_problems(config):
        raise InvalidArgumentError(problem, field="config")
    shape = model_shape.pool_options(config.to_dict())
    options = asdict(shape) | ({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")})
    checked_config(options)
    return options


def install(model: ModelT) -> ModelT:
    """Switch a causal language model, in place, to attention in the daemon. Returns the model. Of a PeftModel it is the
    model inside.

    From then on it runs with `cache=KVServiceCache(...)` (`past_key_values=` before version 5.24 of the library), or
    through `forward`; `uninstall` switches it back. The installation runs one token through the model to check its
    attention.

    Raises InvalidArgumentError, with the reason, for models that the daemon does not support: encoders and
    cross-attention, latent, linear or chunked attention, attention sinks, layers that share K/V or differ in their
    heads, models with their own attention code or masks. The model is unchanged then.
    """
    inside = library_model(model)
    if not _is_switched_on(inside):
        _install(inside)
    return model


def _install(model: PreTrainedModel) -> None:
    uninstall(model)
    pool = pool_options(model.config)
    if not model._can_set_attn_implementation() and not own_attention.is_adaptable(model):
        raise InvalidArgumentError(
            f"{type(model).__name__} has attention code of its own, outside the library's registry", field="model"
        )
    previous_attention = model.config._attn_implementation
    _switch_on(model)
    try:
        for problem in probe.attention_problems(model, pool):
            raise InvalidArgumentError(problem, field="model")
    except InvalidArgumentError:
        _switch_off(model, previous_attention)
        raise
    vars(model)[_PREVIOUS_ATTENTION] = previous_attention
    passes.track(model)


def uninstall(model: ModelT) -> ModelT:
    """Restore a model's previous attention. Returns the model."""
    inside = library_model(model)
    if is_installed(inside):
        passes.untrack(inside)
        keys.forget(inside)
        _switch_off(inside, vars(inside).pop(_PREVIOUS_ATTENTION))
    return model


def is_installed(model: PreTrainedModel) -> bool:
    """Return whether a model was installed, even if its attention has changed since."""
    return _PREVIOUS_ATTENTION in vars(model)


def _is_switched_on(model: PreTrainedModel) -> bool:
    """Return whether a model is installed and its attention and layers have not changed since."""
    configs = [vars(module)["config"] for module in model.modules() if "config" in vars(module)]
    attends = all(getattr(config, "_attn_implementation", ATTENTION_NAME) == ATTENTION_NAME for config in configs)
    return is_installed(model) and attends and own_attention.is_adapted(model)


def _switch_on(model: PreTrainedModel) -> None:
    if own_attention.is_adaptable(model):
        own_attention.adapt(model)
        model.config._attn_implementation = ATTENTION_NAME
    else:
        model.set_attn_implementation(ATTENTION_NAME)


def _switch_off(model: PreTrainedModel, previous_attention: str) -> None:
    own_attention.restore(model)
    if model.config._attn_implementation == ATTENTION_NAME:
        model.config._attn_implementation = previous_attention


def check_installed(model: PreTrainedModel) -> None:
    if not is_installed(model):
        raise FailedPreconditionError("the model computes its attention itself: install() it first")


def _config_problems(config: PreTrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "models with cross-attention are not supported"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        yield "attention has to be causal"
    if config.get_text_config(decoder=True) is not config:
        yield "only plain text models are supported"
    layers = config.per_layer_config if hasattr(config, "num_hidden_layers") else []
    if not layers or any(getattr(layer, "num_attention_heads", None) is None for layer in layers):
        yield "the model has no attention heads"
    if any(getattr(layer, "kv_lora_rank", None) is not None for layer in layers):
        yield "multi-head latent attention is not supported"
    if config.model_type == "falcon" and config.alibi:
        # The rounding changes logits from 256 tokens on.
        yield "ALiBi biases that the library rounds to bfloat16 are not supported"
    layer_types = get_layer_types_and_kwargs(config)[0]
    if unsupported := set(layer_types) - _LAYER_TYPES:
        yield f"layers of type {', '.join(sorted(unsupported))} are not supported"
    if len(layer_types) < len(layers) or getattr(config, "num_kv_shared_layers", None):
        yield "layers that share K/V are not supported"
