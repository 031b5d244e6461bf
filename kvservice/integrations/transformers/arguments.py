"""The library's models as arguments, and their own arguments. The cache's name is `cache` from version 5.24 on. Models
still take `past_key_values`, the name before, with a warning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import GenerationMixin, PreTrainedModel

from kvservice.errors import InvalidArgumentError

CACHE: Final = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# Inputs of a pass may have either, as their caller wrote them.
CACHE_NAMES: Final = ("cache", "past_key_values")
# `generate` gives a model these for text. A pass with other inputs is computed in the general way.
GENERATE_INPUTS: Final = frozenset(
    ("attention_mask", "input_ids", "logits_to_keep", *CACHE_NAMES, "position_ids", "return_dict", "use_cache")
)


def given_cache(inputs: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the cache in a model's inputs. The value is None if there is none."""
    given = ((name, inputs[name]) for name in CACHE_NAMES if inputs.get(name) is not None)
    return next(given, (CACHE, None))


def library_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return a model of the library itself, or the one in a PeftModel, whose layers hold the adapters.

    Raises InvalidArgumentError for other objects, and for methods of PEFT that put learned K/V before the tokens.
    """
    if isinstance(model, PreTrainedModel):
        return model
    get_base_model: Any = getattr(model, "get_base_model", None)
    inside = get_base_model() if callable(get_base_model) else None
    if not isinstance(inside, PreTrainedModel):
        raise InvalidArgumentError(f"must be a model of the library, not {type(model).__name__}", field="model")
    if inside is model.base_model:
        raise InvalidArgumentError(
            "learned prompts come before the tokens, and the daemon's sequences hold tokens alone", field="model"
        )
    return inside
