"""Compilation of a model's layers.

All layers share the code that torch compiles for one of them, so the time that it takes does not depend on their
number. The number of tokens is symbolic: steps of any size run the same code. Attention in the daemon is one operation
of the graph (`kvservice::attend_next_layer`).
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvservice.errors import InvalidArgumentError


def compile_layers(model: PreTrainedModel, backend: str) -> None:
    """Compile the layers of a model in place, at their next call. Weights stay arguments of the code, so they may
    change. Layers that torch cannot compile as a whole are compiled in parts.

    Raises InvalidArgumentError if the model has no list of its layers.
    """
    for layer in _layers(model):
        layer.compile(backend=backend, dynamic=True)


def _layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the outermost list with as many modules as the model has layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers:
            return module
    raise InvalidArgumentError(f"{type(model).__name__} has no list of layers to compile", field="compiled")
