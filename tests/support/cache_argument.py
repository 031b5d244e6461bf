"""The cache among the arguments of the library's models, in any version of the library."""

from __future__ import annotations

from typing import Any

from kvservice.integrations.transformers.arguments import CACHE

__all__ = ["CACHE", "cache_of", "cached"]


def cached(cache: object) -> dict[str, Any]:
    """Return a model's arguments for a cache."""
    return {CACHE: cache}


def cache_of(output: Any) -> Any:
    """Return the cache in a model's output."""
    return output[CACHE]
