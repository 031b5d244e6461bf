"""The arguments of the library's models. The cache's name is `cache` from version 5.24 on. Models still take
`past_key_values`, the name before, with a warning."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from transformers import GenerationMixin

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
