"""The cache among the arguments of the library's models, in any version of the library."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin

_TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE = "cache" if "cache" in _TAKEN else "past_key_values"


def cached(cache: object) -> dict[str, Any]:
    """Return a model's arguments for a cache."""
    return {CACHE: cache}


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output."""
    return output[CACHE]
