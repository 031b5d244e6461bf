"""Compilation of a model's layers.

All layers share the code that torch compiles for one of them, so the time that it takes does not depend on their
number. The number of tokens is symbolic: steps of any size run the same code. Attention in the daemon is one operation
of the graph (`kvservice::attend_next_layer`), and so is each linear layer in float32 on the CPU (`blocked_linear`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from transformers import PreTrainedModel

from kvservice.engines.blocked_linear import use_blocked_linear
from kvservice.errors import InvalidArgumentError

Backend = Callable[..., Callable[..., Any]]


def compile_layers(model: PreTrainedModel, backend: str | Backend) -> None:
    """Compile the layers of a model in place, at their next call. Weights stay arguments of the code, so they may
    change. Layers that torch cannot compile as a whole are compiled in parts.

    Raises InvalidArgumentError if the model has no list of its layers.
    """
    inner: Backend = lookup_backend(backend) if isinstance(backend, str) else backend

    def compile_graph(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        if use_blocked_linear(module.graph):
            module.recompile()
        return inner(module, inputs, **options)

    for layer in _layers(model):
        layer.compile(backend=compile_graph, dynamic=True)


def _layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the outermost list with as many modules as the model has layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise InvalidArgumentError(f"{type(model).__name__} has no list of layers to compile", field="compiled")
