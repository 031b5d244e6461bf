"""One token through a model, without a daemon, to see how the model attends before anything is kept for it."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers.attention import running


@dataclass(frozen=True)
class _Attended:
    """How a layer called attention."""

    layer: int
    kv_shape: tuple[int, int]
    """K/V heads and their size."""
    value_size: int
    sliding_window: int
    has_alibi: bool


@dataclass
class _Probe:
    """A pass that notes how layers attend. What they get is zeros."""

    attended: list[_Attended] = field(default_factory=list)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        kv_shape = (key.shape[1], key.shape[3])
        self.attended.append(
            _Attended(layer, kv_shape, value.shape[3], options["sliding_window"], bool(options["alibi_slopes"]))
        )
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


def attention_problems(model: PreTrainedModel, pool: dict[str, Any]) -> Iterator[str]:
    """Why the attention of a model that calls the daemon's does not go with a pool of the shape `pool_options`.

    Raises InvalidArgumentError for calls that the daemon's attention refuses, and if the model fails.
    """
    probe = _Probe()
    _run(model, probe)
    calls = Counter(attended.layer for attended in probe.attended)
    if not calls:
        yield f"{type(model).__name__} has attention code of its own, outside the library's registry"
    for layer, count in calls.items():
        if count > 1:
            yield f"layer {layer} attends {count} times in a pass, the daemon once for each layer's K/V"
    if sorted(calls) != list(range(pool["num_layers"])):
        yield f"layers {sorted(calls)} attend, of {pool['num_layers']}"
    shape = (pool["num_kv_heads"], pool["head_size"])
    layer_types = get_layer_types_and_kwargs(model.config)[0]
    for attended in probe.attended:
        if attended.kv_shape != shape or attended.value_size != shape[1]:
            yield f"layer {attended.layer} has K/V of another shape than {shape}: {attended.kv_shape}"
        # The library's cache drops what lies before the window, whether or not attention keeps to it.
        slides = layer_types[attended.layer] == "sliding_attention"
        window = model.config.per_layer_config[attended.layer].sliding_window if slides else None
        if slides and window != attended.sliding_window:
            yield f"layer {attended.layer} keeps K/V for a window of {window} and attends in {attended.sliding_window}"


def first_position(model: PreTrainedModel) -> int | None:
    """The position that a model gives to the first token of a sequence. Models like RoBERTa begin after their padding.
    None: the model takes no positions, for its attention has ALiBi biases.

    Raises InvalidArgumentError if it is neither 0 nor that, and if the model takes no positions but needs them.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        probe = _Probe()
        _run(model, probe)
        if not all(attended.has_alibi for attended in probe.attended):
            raise InvalidArgumentError(f"{type(model).__name__} takes no position_ids", field="model")
        return None
    if model not in _first_positions:
        expected = _run(model)
        padding_id = _padding_id(model)
        candidates = [0] if padding_id is None else [0, padding_id + 1]
        found = [first for first in candidates if torch.equal(_run(model, first_position=first), expected)]
        if not found:
            raise InvalidArgumentError(f"the first token's position is none of {candidates}", field="model")
        _first_positions[model] = found[0]
    return _first_positions[model]


_first_positions: WeakKeyDictionary[PreTrainedModel, int] = WeakKeyDictionary()


def _padding_id(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "pad_token_id", None)


def _run(model: PreTrainedModel, probe: _Probe | None = None, first_position: int | None = None) -> torch.Tensor:
    """Logits `[vocabulary]` of one token that attends to nothing.

    Raises InvalidArgumentError if the model fails on it.
    """
    token = 1 if _padding_id(model) == 0 else 0
    inputs = {"input_ids": torch.tensor([[token]], device=model.device)}
    if first_position is not None:
        inputs["position_ids"] = torch.full_like(inputs["input_ids"], first_position)
    try:
        with torch.no_grad(), running(probe or _Probe()):
            logits: torch.Tensor = model(**inputs, use_cache=False)[0][0, 0]
    except InvalidArgumentError:
        raise
    except Exception as error:
        raise InvalidArgumentError(f"{type(model).__name__} fails on one token: {error}", field="model") from error
    return logits
