"""The library's logits processors, some of which samples can share."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import transformers
from transformers import LogitsProcessor

# Processors that look at the scores only: one call serves all rows that share one.
_OF_SCORES_ONLY: Final = tuple(
    getattr(transformers, name)
    for name in (
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    )
    if hasattr(transformers, name)
)


def is_shared(processor: LogitsProcessor) -> bool:
    """Return whether samples can share a processor, because it has no state and does not look at the tokens."""
    return type(processor) in _OF_SCORES_ONLY


def own_processors(processors: Sequence[LogitsProcessor]) -> tuple[LogitsProcessor, ...]:
    """Return the processors of one sample. Processors that may have state are copied."""
    return tuple(one if is_shared(one) else copy.deepcopy(one) for one in processors)
