"""The training mode of a model's modules, in which dropout would enter the K/V.

Only some modules compute otherwise in training: those whose code reads `training`. They are found by a walk at the
passes that compute prompts; a decode pass looks at their flags alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvservice.errors import FailedPreconditionError

# Attributes from which a module takes the rate of its random changes: those with one of these in their name.
_RATES = ("drop", "jitter", "noise")

# Whether a class reads `training`.
_readers: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
_watched: WeakKeyDictionary[PreTrainedModel, list[dict[str, Any]]] = WeakKeyDictionary()


def refuse_training(model: PreTrainedModel, prompts: bool) -> None:
    """Raise FailedPreconditionError, with the name of a module, if the model or a module in it would compute otherwise
    than in evaluation. `prompts`: the pass computes a prompt."""
    if model.training:
        raise FailedPreconditionError("inference only, dropout would enter the cache: call model.eval()")
    watched = _watched.get(model)
    if watched is None or prompts:
        watched = _watched[model] = [vars(one) for one in model.modules() if _reads_training(one.__class__)]
    if not any(attributes["training"] for attributes in watched):
        return
    for name, module in model.named_modules():
        if module.training and _reads_training(module.__class__) and _has_effect(module):
            raise FailedPreconditionError(
                f"inference only, but {name} is in training mode, and would change the K/V at random: call model.eval()"
            )


def _has_effect(module: torch.nn.Module) -> bool:
    """Return whether the training mode of a module that reads it has an effect: unless it has rates and all are 0.
    Modules among its rates count by themselves."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return module.p > 0
    parts = {**module._modules, **vars(module)}
    rates = [value for name, value in parts.items() if any(word in name for word in _RATES)]
    return not rates or any(_is_positive(rate) for rate in rates)


def _is_positive(rate: Any) -> bool:
    if isinstance(rate, dict):
        return any(map(_is_positive, rate.values()))
    return isinstance(rate, int | float) and rate > 0


def _reads_training(kind: type[torch.nn.Module]) -> bool:
    """Return whether the code of a class reads `training`, besides what all models of torch and the library have."""
    if kind not in _readers:
        _readers[kind] = _mentions_training(kind)
    return _readers[kind]


def _mentions_training(kind: type[torch.nn.Module]) -> bool:
    bases = [base for base in kind.__mro__ if base is not torch.nn.Module]
    return any("training" in names for base in bases for value in vars(base).values() for names in _names(value))


def _names(function: Any) -> Iterator[tuple[str, ...]]:
    """Yield the names in the code of a function, and of the functions around which it is wrapped."""
    code = getattr(function, "__code__", None)
    module = getattr(function, "__globals__", {}).get("__name__", "")
    if isinstance(code, CodeType) and (not module.startswith("transformers.") or ".models." in module):
        yield code.co_names
        yield from (constant.co_names for constant in code.co_consts if isinstance(constant, CodeType))
    if hasattr(function, "__wrapped__"):
        yield from _names(function.__wrapped__)
