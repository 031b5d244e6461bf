"""A probe runs one token through a model, without a daemon, to check its attention before it is installed."""

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
    """The attention call of a layer."""

    layer: int
    kv_shape: tuple[int, int]
    """K/V heads and their size."""
    value_size: int
    sliding_window: int
    has_alibi: bool


@dataclass
class _Probe:
    """A pass that records the attention calls of layers and returns zeros."""

    attended: list[_Attended] = field(default_factory=list)

    @property
    def num_attended_layers(self) -> int:
        return len(self.attended)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        kv_shape = (key.shape[1], key.shape[3])
        self.attended.append(
            _Attended(layer, kv_shape, value.shape[3], options["sliding_window"], bool(options["alibi_slopes"]))
        )
        return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


def attention_problems(model: PreTrainedModel, pool: dict[str, Any]) -> Iterator[str]:
    """Yield the reasons why the attention of a model does not fit a pool of the shape `pool`, from `pool_options`.

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
    if list(calls) != list(range(pool["num_layers"])):
        yield f"layers {list(calls)} attend, of {pool['num_layers']} in order"
    shape = (pool["num_kv_heads"], pool["head_size"])
    layer_types = get_layer_types_and_kwargs(model.config)[0]
    for attended in probe.attended:
        if attended.kv_shape != shape or attended.value_size != shape[1]:
            yield f"layer {attended.layer} has K/V of another shape than {shape}: {attended.kv_shape}"
        # The library's cache drops K/V before the window even if attention does not use the window.
        slides = layer_types[attended.layer] == "sliding_attention"
        window = model.config.per_layer_config[attended.layer].sliding_window if slides else None
        if slides and window != attended.sliding_window:
            yield f"layer {attended.layer} keeps K/V for a window of {window} and attends in {attended.sliding_window}"


def first_position(model: PreTrainedModel) -> int | None:
    """Return the position of the first token of a sequence in a model. Models like RoBERTa start after their padding
    id. None means that the model has ALiBi biases and accepts no positions.

    Raises InvalidArgumentError if the position is neither 0 nor the padding id plus 1, and if the model accepts no
    positions but needs them.
    """
    if model not in _first_positions:
        _first_positions[model] = _find_first_position(model)
    return _first_positions[model]


_first_positions: WeakKeyDictionary[PreTrainedModel, int | None] = WeakKeyDictionary()


def _find_first_position(model: PreTrainedModel) -> int | None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        probe = _Probe()
        _run(model, probe)
        if not all(attended.has_alibi for attended in probe.attended):
            raise InvalidArgumentError(f"{type(model).__name__} takes no position_ids", field="model")
        return None
    expected = _run(model)
    padding_id = _padding_id(model)
    candidates = [0] if padding_id is None else [0, padding_id + 1]
    found = [first for first in candidates if torch.equal(_run(model, first_position=first), expected)]
    if not found:
        raise InvalidArgumentError(f"the first token's position is not one of {candidates}", field="model")
    return found[0]


def _padding_id(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "pad_token_id", None)


def _run(model: PreTrainedModel, probe: _Probe | None = None, first_position: int | None = None) -> torch.Tensor:
    """Return the logits `[vocabulary]` of one token whose attention output is zero.

    Raises InvalidArgumentError if the model fails on it.
    """
    token = 1 if _padding_id(model) == 0 else 0
    inputs = {"input_ids": torch.tensor([[token]], device=model.device)}
    if first_position is not None:
        inputs["position_ids"] = torch.full_like(inputs["input_ids"], first_position)
    try:
        # Compiled layers are called as they are: one token is a size of its own, and not one of an engine's steps.
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), running(probe or _Probe()):
            logits: torch.Tensor = model(**inputs, use_cache=False)[0][0, 0]
    except InvalidArgumentError:
        raise
    except Exception as error:  # any error of the model's own code
        raise InvalidArgumentError(f"{type(model).__name__} fails on one token: {error}", field="model") from error
    return logits
