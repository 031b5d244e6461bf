"""Checks of prompts, before anything is queued for them."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.nn import Embedding
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvservice.engines.params import SamplingParams
from kvservice.engines.requests import Prompt
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers.keys import steady_length

# A text, or token ids.
PromptLike = str | Iterable[int]


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model's prompts. `max_length` is the most tokens of a sequence, prompt and output together."""

    vocabulary: int
    max_length: int
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, model: PreTrainedModel, max_sequence_tokens: int) -> ModelLimits:
        """Take the limits from the model's configuration and from the daemon's longest sequence. With longrope or
        dynamic rope it ends where one sequence would change the K/V of others."""
        config = model.config
        longest = min(_num_positions(model) or max_sequence_tokens, steady_length(model) or max_sequence_tokens)
        generation = getattr(model, "generation_config", None)
        eos = getattr(generation, "eos_token_id", None)
        if eos is None:
            eos = config.eos_token_id
        ids: Collection[int] = () if eos is None else [eos] if isinstance(eos, int) else eos
        return cls(int(config.vocab_size), min(int(longest), max_sequence_tokens), frozenset(map(int, ids)))


def _num_positions(model: PreTrainedModel) -> int | None:
    """Return the most tokens for which a model has positions, or None without a limit."""
    for name in ("max_position_embeddings", "max_seq_len"):
        longest = getattr(model.config, name, None)
        if longest:
            break
    else:
        return None
    # RoBERTa and its relatives count positions from padding_idx + 1.
    embeddings = [getattr(module, "position_embeddings", None) for module in model.modules()]
    unused = [one.padding_idx + 1 for one in embeddings if isinstance(one, Embedding) and one.padding_idx is not None]
    return int(longest) - max(unused, default=0)


def check_prompt(
    prompt: PromptLike,
    params: SamplingParams,
    limits: ModelLimits,
    tokenizer: PreTrainedTokenizerBase | None,
    field: str = "prompt",
) -> Prompt:
    """Check a prompt and its parameters against the model. The result has no id yet.

    Raises InvalidArgumentError naming `field` or the parameter.
    """
    text = prompt if isinstance(prompt, str) else None
    if text is not None and tokenizer is None:
        raise InvalidArgumentError("is a text, and there is no tokenizer: pass token ids", field=field)
    if params.stop and tokenizer is None:
        raise InvalidArgumentError("has strings, and there is no tokenizer", field="stop")
    token_ids = _token_ids(_encode(prompt, tokenizer, field) if isinstance(prompt, str) else prompt, limits, field)
    if not token_ids:
        raise InvalidArgumentError("has no tokens", field=field)
    room = limits.max_length - len(token_ids)
    if room < 1:
        raise InvalidArgumentError(
            f"has {len(token_ids)} tokens, and prompt and output have at most {limits.max_length}", field=field
        )
    for name in ("stop_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= limits.vocabulary:
                raise InvalidArgumentError(f"{token} is not in the vocabulary of {limits.vocabulary}", field=name)
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return Prompt(0, text, token_ids, params, max_tokens, seed)


def prompts_of(prompts: PromptLike | Iterable[PromptLike]) -> list[PromptLike]:
    """Return the prompts of a call, which has one or several. Raises InvalidArgumentError naming prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise InvalidArgumentError("must be a text, token ids, or several of these", field="prompts")
    listed: list[Any] = list(prompts)
    return [listed] if listed and _is_token(listed[0]) else listed


def _is_token(value: object) -> bool:
    """Return whether this is a whole number, also one of NumPy or torch."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt: one for all, or one for each."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    of_class = isinstance(params, Sequence) and all(isinstance(one, SamplingParams) for one in params)
    if not of_class:
        raise InvalidArgumentError(
            "must be SamplingParams, one for all prompts or one for each", field="sampling_params"
        )
    if len(params) != num_prompts:
        raise InvalidArgumentError(f"has {len(params)} parameters for {num_prompts} prompts", field="sampling_params")
    return params


def _encode(text: str, tokenizer: PreTrainedTokenizerBase | None, field: str) -> list[int]:
    assert tokenizer is not None, "texts without a tokenizer are refused before"
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError("has a surrogate, which no tokenizer can encode", field=field) from None
    return list(tokenizer.encode(text))


def _token_ids(prompt: Iterable[int], limits: ModelLimits, field: str) -> tuple[int, ...]:
    if isinstance(prompt, Mapping | bytes):
        raise InvalidArgumentError("must be a text or token ids", field=field)
    try:
        ids = np.asarray(list(prompt))
    except (TypeError, ValueError):
        raise InvalidArgumentError("must be a text or token ids", field=field) from None
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InvalidArgumentError("must be a text or token ids", field=field)
    outside = ids[(ids < 0) | (ids >= limits.vocabulary)] if len(ids) else ids
    if len(outside):
        raise InvalidArgumentError(f"{outside[0]} is not in the vocabulary of {limits.vocabulary}", field=field)
    return tuple(ids.tolist())
