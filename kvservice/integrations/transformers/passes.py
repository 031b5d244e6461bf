"""Calls of an installed model. A call with a KVServiceCache is a pass of that cache; other calls are refused.

The model gets its own `forward` instead of hooks, because torch does not call hooks if a pass is interrupted.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import attention
from kvservice.integrations.transformers.arguments import CACHE, given_cache
from kvservice.integrations.transformers.cache import KVServiceCache
from kvservice.integrations.transformers.masks import ATTENTION_NAME
from kvservice.integrations.transformers.training import refuse_training

# The instance's previous `forward`, such as accelerate's.
_INNER = "_kvservice_inner_forward"
_WRONG_CACHE = (
    f"an installed model runs with {CACHE}=KVServiceCache(...), or through forward(), but got {{}}. Where the library "
    "calls a model without its caller's cache, for guidance_scale or as an assistant, it needs a model that is not "
    "installed: uninstall() it, or take a copy made before install()"
)


def track(model: PreTrainedModel) -> None:
    """Turn calls of the model into passes of their cache. The wrapper is excluded from torch.compile."""
    kind: Any = type(model)
    if "forward" in vars(model):
        vars(model)[_INNER] = vars(model)["forward"]

    @attention.not_compiled
    @functools.wraps(kind.forward)
    def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _run(self, _bind(kind.forward, args, kwargs))

    # These are bound methods, so that a deep copy of the model gets methods bound to the copy.
    vars(model)["forward"] = MethodType(forward, model)
    if not hasattr(kind, "prepare_inputs_for_generation"):
        return

    @functools.wraps(kind.prepare_inputs_for_generation)
    def prepare(self: PreTrainedModel, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _prepare(self, _bind(kind.prepare_inputs_for_generation, args, kwargs))

    vars(model)["prepare_inputs_for_generation"] = MethodType(prepare, model)


def untrack(model: PreTrainedModel) -> None:
    """Undo `track`."""
    for name in ("forward", "prepare_inputs_for_generation"):
        vars(model).pop(name, None)
    if _INNER in vars(model):
        vars(model)["forward"] = vars(model).pop(_INNER)


def _bind(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments except self by name. Raises TypeError for too many of them."""
    if not args:
        return kwargs
    names = list(inspect.signature(function).parameters)[1:]
    if len(args) > len(names):
        raise TypeError(f"{function.__qualname__} takes {len(names)} arguments, not {len(args)}")
    return dict(zip(names, args, strict=False)) | kwargs


def _run(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
    inner = vars(model).get(_INNER) or functools.partial(type(model).forward, model)
    _, cache = given_cache(inputs)
    if cache is None and attention.is_running():
        return inner(**inputs)  # called by packed.forward(), which runs the pass
    if not isinstance(cache, KVServiceCache):
        given = "none" if cache is None else f"a {type(cache).__name__}"
        raise FailedPreconditionError(_WRONG_CACHE.format(given))
    _check_model(model, inputs)
    _check_inputs(model, inputs)
    with cache.forward_pass(
        model,
        inputs,
        every_output=_wants_every_output(model, inputs),
        takes_position_ids=_takes_position_ids(type(model).forward),
    ) as call:
        return call(inner)


@functools.cache
def _takes_position_ids(forward: Callable[..., Any]) -> bool:
    """Return whether a model's forward accepts position ids. It is cached because to read a signature takes longer than
    the rest of a decode step's checks."""
    return "position_ids" in inspect.signature(forward).parameters


def _check_model(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    implementation = model.config._attn_implementation
    if implementation != ATTENTION_NAME:
        raise FailedPreconditionError(
            f"the model's attention was changed to {implementation} after install(): install() it again, or "
            "uninstall() it and use another cache"
        )
    input_ids = inputs.get("input_ids")
    refuse_training(model, prompts=not isinstance(input_ids, torch.Tensor) or input_ids.shape[-1] > 1)


def _check_inputs(model: PreTrainedModel, inputs: dict[str, Any]) -> None:
    if _is_asked_for(model, inputs, "output_attentions"):
        raise InvalidArgumentError("attention weights stay in the daemon", field="output_attentions")
    if inputs.get("use_cache") is False:
        raise InvalidArgumentError(
            "is False, by an argument or by the model's configuration, but the K/V go into the cache that was given: "
            "pass use_cache=True to generate",
            field="use_cache",
        )


def _wants_every_output(model: PreTrainedModel, inputs: dict[str, Any]) -> bool:
    """Return whether the caller needs outputs for every column: a loss, hidden states or router logits."""
    flags = {"output_hidden_states", "output_router_logits"} | {name for name in inputs if name.startswith("output_")}
    return inputs.get("labels") is not None or any(_is_asked_for(model, inputs, name) for name in flags)


def _is_asked_for(model: PreTrainedModel, inputs: dict[str, Any], flag: str) -> bool:
    asked = inputs.get(flag)
    return bool(getattr(model.config, flag, False) if asked is None else asked)


def _prepare(model: PreTrainedModel, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which `generate` calls the model.

    Raises InvalidArgumentError if the cache holds all columns of the inputs. The library would pass the wrong part.
    """
    name, cache = given_cache(inputs)
    num_new = inputs.get("next_sequence_length")
    if isinstance(cache, KVServiceCache) and num_new is not None and num_new <= 0:
        raise InvalidArgumentError(
            f"has no columns beyond the {cache.get_seq_length()} in the cache: pass it with everything that follows, "
            "crop() or reset() the cache, or use a new one",
            field="input_ids",
        )
    kind: Any = type(model)
    prepared: dict[str, Any] = kind.prepare_inputs_for_generation(model, **inputs)
    if isinstance(cache, KVServiceCache) and given_cache(prepared)[1] is None:
        # Longrope changed its frequencies (Phi-3), so the model requires a new cache with all K/V computed again. Older
        # versions of the library prepare only the last column in this case.
        cache.reset()
        everything = inputs | {name: None, "next_sequence_length": None}
        prepared = kind.prepare_inputs_for_generation(model, **everything) | {name: cache}
    return prepared
