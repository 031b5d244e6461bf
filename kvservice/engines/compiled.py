"""Compilation of a model's layers.

All layers share the code that torch compiles for one of them, so the time that it takes does not depend on their
number. The number of tokens is symbolic: steps of any size run the same code. Attention in the daemon is one operation
of the graph (`kvservice::attend_next_layer`), and so is each linear layer in float32 on the CPU (`blocked_linear`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from transformers import PreTrainedModel

from kvservice.engines.blocked_linear import BlockedWeights, use_blocked_linear
from kvservice.errors import InvalidArgumentError

Backend = Callable[..., Callable[..., Any]]
# The attribute in which torch.nn.Module.compile stores the function that a call runs.
_COMPILED = "_compiled_call_impl"


class CompiledLayers:
    """The layers of a model, compiled at their first call. The model itself stays as it is, and the code takes its
    weights as arguments, so they may change. Layers that torch cannot compile as a whole are compiled in parts.

    Raises InvalidArgumentError if the model has no list of its layers.
    """

    def __init__(self, model: PreTrainedModel, backend: str | Backend) -> None:
        self._weights = BlockedWeights(model)
        self._calls = {
            layer: torch.compile(layer._call_impl, backend=_with_blocked_linear(backend), dynamic=True)
            for layer in _layers(model)
        }

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run the compiled code wherever the layers are called inside."""
        before = {layer: vars(layer).get(_COMPILED) for layer in self._calls}
        _set_calls(self._calls)
        try:
            with self._weights.in_use():
                yield
        finally:
            _set_calls(before)


def _set_calls(calls: Mapping[torch.nn.Module, Callable[..., Any] | None]) -> None:
    for layer, call in calls.items():
        vars(layer)[_COMPILED] = call


@functools.cache
def _with_blocked_linear(backend: str | Backend) -> Backend:
    """Return a backend of torch.compile that replaces linear layers first. It is one object for each backend: compiled
    code is found again only for the same object."""
    inner: Backend = lookup_backend(backend) if isinstance(backend, str) else backend

    def compile_graph(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        if use_blocked_linear(module.graph):
            module.recompile()
        return inner(module, inputs, **options)

    return compile_graph


def _layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the outermost list with as many modules as the model has layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise InvalidArgumentError(f"{type(model).__name__} has no list of layers to compile", field="compiled")
