"""The forward pass of an engine: one ragged step of a model, with its K/V in the daemon, and compiled layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch._dynamo.backends.registry import lookup_backend
from transformers import PreTrainedModel

from kvservice.client import Session, Step
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import forward, install, keys, pool_options
from kvservice.integrations.transformers.arguments import library_model
from kvservice.integrations.transformers.models import refuse_training


class ModelRunner:
    """Runs the steps of a session on a causal language model of the library, which it installs.

    The step's tokens are concatenated in one row without padding, and the head computes only the logits that are asked
    for. Tensors stay on the model's device if the session's transport takes them there.

    Raises InvalidArgumentError for models that the integration does not support, and if the session's pool has another
    shape or dtype than the model; FailedPreconditionError for models in training mode.

    compiled: use compiled layers. To compile them takes about half a minute at the first step; `backend` is torch's. In
    float32 on the CPU, compiled layers use copies of the weights (see `blocked_linear`).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        kv: Session,
        *,
        compiled: bool = False,
        backend: str | Backend = "inductor",
    ) -> None:
        model = library_model(model)
        refuse_training(model, prompts=True)
        wanted = pool_options(model.config, model.dtype)
        found = {name: getattr(kv.info, name) for name in wanted}
        if found != wanted:
            raise InvalidArgumentError(f"needs a pool of {wanted}, but the daemon's is {found}", field="model")
        self.model = install(model)
        self.kv = kv
        self._compiled = CompiledLayers(model, backend) if compiled else None

    @torch.inference_mode()
    def run(self, step: Step, token_ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute a step. Its K/V are in the daemon afterwards, and the step is committed.

        token_ids: int64 `[num_tokens]`, in the order of the step's sequences. rows: int64 `[m]`, indices into these
        tokens; m may be 0. Returns the logits of these tokens, `[m, vocabulary]`, in the model's dtype.

        Raises the errors of `kvservice.integrations.transformers.forward`.
        """
        with self._compiled.in_use() if self._compiled else nullcontext():
            return forward(self.model, step, token_ids, rows=rows)


# ---- compilation of a model's layers
#
# All layers share the code that torch compiles for one of them, so the time that it takes does not depend on their
# number. The number of tokens is symbolic: steps of any size run the same code. Attention in the daemon is one
# operation of the graph (`kvservice::attend_next_layer`), and so is each linear layer in float32 on the CPU
# (`blocked_linear`).


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


# ---- linear layers on the CPU with weights in the blocked layout of oneDNN
#
# In float32 a product with such a copy takes a fifth less time than with the weight as it is. The copies need as much
# memory as the weights.


# Number of rows for which oneDNN chooses the layout. Products of any size can use it.
_TYPICAL_ROWS = 256


class BlockedWeights:
    """Copies of a model's weights in the blocked layout, made when they are first used. They are dropped when the
    model's key of the prefix cache changes, so they are as current as the K/V that sequences share. A model without
    such a key gets no copies."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._key = b""
        # Shapes of the model's parameters, and the copies, by the address of the parameter.
        self._shapes: dict[int, torch.Size] = {}
        self._copies: dict[int, torch.Tensor] = {}

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the copies for the linear layers of graphs that run inside."""
        identity = keys.identify(self._model, thorough=False)
        shapes = {parameter.data_ptr(): parameter.shape for parameter in self._model.parameters()}
        if (identity.key, shapes) != (self._key, self._shapes):
            self._copies.clear()
            self._key, self._shapes = identity.key, shapes
        token = _current.set(None if identity.private_because else self)
        try:
            yield
        finally:
            _current.reset(token)

    def copy_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of a parameter, None for other tensors."""
        address = weight.data_ptr()
        if self._shapes.get(address) != weight.shape or not weight.is_contiguous():
            return None
        if address not in self._copies:
            self._copies[address] = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        return self._copies[address]


_current: ContextVar[BlockedWeights | None] = ContextVar("kvservice_blocked_weights", default=None)


@torch.library.custom_op("kvservice::blocked_linear", mutates_args=(), device_types="cpu")
def blocked_linear(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute torch's linear with the copies in use. inputs: `[..., in_features]`."""
    weights = _current.get()
    copy = weights.copy_of(weight) if weights and inputs.numel() else None
    if copy is None:
        return torch.nn.functional.linear(inputs, weight, bias)
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, copy, bias, "none", [], "")
    return output


@blocked_linear.register_fake
def _(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:  # noqa: ARG001
    return inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))


def use_blocked_linear(graph: torch.fx.Graph) -> int:
    """Replace the linear layers of a graph whose weights are float32 inputs of the graph on the CPU. Returns their
    number."""
    replaced = 0
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return replaced
    for node in graph.find_nodes(op="call_function", target=torch._C._nn.linear):
        inputs, weight, bias = (*node.args, None)[:3]
        value = weight.meta.get("example_value") if weight.op == "placeholder" else None
        if value is not None and value.dtype is torch.float32 and value.device.type == "cpu" and not node.kwargs:
            node.target, node.args = torch.ops.kvservice.blocked_linear.default, (inputs, weight, bias)
            replaced += 1
    return replaced
