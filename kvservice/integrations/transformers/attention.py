"""The attention function that the library's models call, once per layer, for the step of the current forward pass.

The library passes tensors to an attention function, but neither the cache nor the sequences. The code that starts a
forward pass therefore stores it in a context variable (`running`), where the function finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Protocol, TypeVar, cast

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from kvservice.client import Step
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import arguments
from kvservice.integrations.transformers.arguments import CACHE

# ---- the mask function of the library's registry. It replaces the mask tensor by the sliding window of a layer.
#
# The daemon's attention is causal within each sequence of the step, so the only remaining information in a mask is the
# sliding window. The library builds one mask per kind of layer and passes it to the attention function of these layers.
# Eager attention uses only the mask, so it has the window even in families that do not pass it as an argument.


ATTENTION_NAME = "kvservice"
"""The name of the daemon's attention in the library's registries."""
LAYER_CHANGED = (
    "a layer computes its attention itself: install() the model again after changing its layers or their attention"
)

MaskFunction = Callable[..., torch.Tensor]
_CAUSAL: Callable[..., Any] = causal_mask_function


@dataclass(frozen=True)
class StepMask:
    """A causal mask over the sequences of a step.

    sliding_window: number of tokens to which a token attends, including itself; 0 means all tokens up to itself.
    is_empty: a token attends to nothing. A model whose windows are turned off may build such a mask for layers that it
    does not have; a layer that gets it is refused.
    """

    sliding_window: int
    is_empty: bool = False
    ndim: ClassVar[int] = 0

    def to(self, *_: Any, **__: Any) -> StepMask:
        """Return self. Some models convert their masks."""
        return self

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """Raise FailedPreconditionError. torch calls this if a computation uses the mask as a tensor."""
        raise FailedPreconditionError(LAYER_CHANGED)


def kvservice_mask(
    *,
    mask_function: MaskFunction,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **_: Any,
) -> StepMask:
    """Return the mask of a layer as a StepMask instead of a tensor.

    mask_function: `(batch, head, query, key)`, int64 tensors of indices that broadcast -> bool, true if the query may
    attend to the key. local_size: the window, or the size of chunks. allow_is_causal_skip is false, or use_vmap true,
    if the model adds something to the mask.

    Raises InvalidArgumentError unless the mask is causal, optionally with a sliding window.
    """
    if mask_function is _CAUSAL:
        return StepMask(0)
    if local_size == 0:
        return StepMask(0, is_empty=True)
    if local_size and allow_is_causal_skip and not use_vmap and _slides(mask_function, local_size, device):
        return StepMask(local_size)
    raise InvalidArgumentError(
        "attention has to be causal, in sliding windows at most: the model masks otherwise", field="attention_mask"
    )


def _slides(mask_function: MaskFunction, window: int, device: torch.device | None) -> bool:
    """Return whether a query attends to exactly the last `window` keys.

    In a graph capture nothing can be read back from a GPU, so it computes on the host then.

    It tests two consecutive queries. With chunked attention of that size, one of them is not the last of its chunk.
    """
    if device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        device = torch.device("cpu")
    first = torch.zeros((), dtype=torch.long, device=device)
    for query in (first + 2 * window, first + 2 * window + 1):
        keys = query + torch.tensor([-window, 1 - window, 0, 1], device=device)
        if mask_function(first, first, query, keys).tolist() != [False, True, True, False]:
            return False
    return True


AttentionMaskInterface.register(ATTENTION_NAME, kvservice_mask)


FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

# Arguments by which some model families request attention features that the daemon does not have.
_UNSUPPORTED_ARGUMENTS = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "learned position biases",
    "indices": "sparse attention",
    "block_indices": "sparse attention",
}


def not_compiled(function: FunctionT) -> FunctionT:
    """Exclude a function from torch.compile."""
    return cast(FunctionT, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


class Pass(Protocol):
    """A forward pass, as seen by the attention function."""

    @property
    def num_attended_layers(self) -> int:
        """The number of layers that have attended in this pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        """Compute the attention of one layer.

        query: `[batch, num_heads, columns, head_size]`; key, value: `[batch, num_kv_heads, columns, head_size]`;
        options: those of `Step.attend`. Returns `[batch, columns, num_heads, head_size]`.
        """


@dataclass
class ForwardPass:
    """A forward pass of a model over one step.

    `tokens` is bool `[batch, columns]` and says which columns of the input are tokens of the step, in row-major order.
    None means all columns. `mask` is the same for past and new columns together, in NumPy.
    """

    step: Step
    tokens: torch.Tensor | None = None
    mask: arguments.Mask | None = None
    num_attended_layers: int = 0
    num_updated_layers: int = 0

    @cached_property
    def holed_span(self) -> int:
        """See `columns.holed_span`."""
        return 0 if self.mask is None else arguments.holed_span(self.mask)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        refuse_gradients(query, key, value)
        if options["sliding_window"]:
            self.refuse_holes(options["sliding_window"])
        if _is_default(options["scale"], query.shape[3]):
            options["scale"] = None  # transports have a fast path for calls without options
        output = self.step.attend(layer, self.pack(query), self.pack(key), self.pack(value), **options)
        self.num_attended_layers += 1
        return self.unpack(output, query)

    def pack(self, states: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, columns, head_size]` -> `[num_tokens, heads, head_size]`, in the memory of a CUDA device or
        of the host. The transport copies to the host if the pool is not on that device."""
        by_column = states.detach().transpose(1, 2)
        packed = by_column.flatten(0, 1) if self.tokens is None else by_column[self.tokens.to(states.device)]
        return (packed if packed.is_cuda else packed.cpu()).contiguous()

    def unpack(self, output: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, heads, head_size]` -> `[batch, columns, heads, head_size]`, zeros where there is no token."""
        batch, num_heads, columns, head_size = like.shape
        output = output.to(like.device)
        if self.tokens is None:
            return output.view(batch, columns, num_heads, head_size)
        padded = like.new_zeros((batch, columns, num_heads, head_size))
        padded[self.tokens.to(like.device)] = output
        return padded

    def refuse_holes(self, num_columns: int) -> None:
        """Raise InvalidArgumentError if a row has padding between tokens and spans more than `num_columns` columns."""
        if self.holed_span > num_columns:
            raise InvalidArgumentError(
                f"has padding between tokens of a row, over {self.holed_span} columns: in sliding windows and some "
                "ALiBi biases the library counts padding, the daemon does not. Pad on one side only",
                field="attention_mask",
            )

    def expect_attention(self) -> None:
        """Record a cache update of a layer. Raises FailedPreconditionError if an earlier layer that updated its cache
        did not attend in the daemon."""
        if self.num_updated_layers > self.num_attended_layers:
            raise FailedPreconditionError(LAYER_CHANGED)
        self.num_updated_layers += 1

    def check_complete(self, num_layers: int) -> None:
        """Raise FailedPreconditionError unless each of the pool's `num_layers` layers was sent to the daemon."""
        if self.num_attended_layers != num_layers:
            raise FailedPreconditionError(
                f"the model sent {self.num_attended_layers} layers to the daemon, whose pool has {num_layers}"
            )


_running: ContextVar[Pass | None] = ContextVar("kvservice_forward_pass", default=None)


def is_running() -> bool:
    """Return whether a forward pass is running in this thread."""
    return _running.get() is not None


@contextmanager
def running(forward_pass: Pass) -> Iterator[None]:
    if is_running():
        raise FailedPreconditionError("a forward pass is running already in this thread")
    _running.set(forward_pass)
    try:
        yield
    finally:
        _running.set(None)


def refuse_holes() -> None:
    """Raise InvalidArgumentError if the current pass has rows with padding between tokens. Attention with biases by the
    distance of columns calls this."""
    forward_pass = _running.get()
    if isinstance(forward_pass, ForwardPass):
        forward_pass.refuse_holes(0)


def kvservice_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: StepMask | None = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    alibi_slopes: Sequence[float] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write a layer's K/V of the current pass into the pool, and attend there (vLLM's paged attention).

    query: `[batch, num_heads, columns, head_size]`; key, value: `[batch, num_kv_heads, columns, head_size]`, in the
    pool's dtype. Returns `[batch, columns, num_heads, head_size]`, with zeros in columns that are not tokens of the
    step, and no attention weights. No mask tensor is needed: attention is causal within each sequence of the step.

    Raises FailedPreconditionError outside of a pass, InvalidArgumentError for features that the daemon's attention does
    not have, and the daemon's errors.
    """
    _refuse_unsupported(module, dropout, is_causal, kwargs)
    window = _window(attention_mask, sliding_window or 0)
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        slopes = None if alibi_slopes is None else list(alibi_slopes)
        return _attend_next_layer(query, key, value, scaling, window, softcap or 0.0, slopes), None
    return _attend(module, query, key, value, scaling, window, softcap or 0.0, alibi_slopes), None


@not_compiled
def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int,
    soft_cap: float,
    alibi_slopes: Sequence[float] | None,
) -> torch.Tensor:
    forward_pass = _current_pass()
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise InvalidArgumentError(f"{type(module).__name__} does not say which layer it is", field="layer_idx")
    options = {"scale": scale, "sliding_window": window, "logits_soft_cap": soft_cap, "alibi_slopes": alibi_slopes}
    return forward_pass.attend(layer, query, key, value, **options)


@torch.library.custom_op("kvservice::attend_next_layer", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _attend_next_layer(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    sliding_window: int,
    logits_soft_cap: float,
    alibi_slopes: Sequence[float] | None,
) -> torch.Tensor:
    """Attention as one operation of a compiled graph. The layers of a model share their compiled code, so it does not
    contain the number of the layer. It is the next one of the pass: `install` checks that layers attend in order."""
    forward_pass = _current_pass()
    options = {
        "scale": scale,
        "sliding_window": sliding_window,
        "logits_soft_cap": logits_soft_cap,
        "alibi_slopes": alibi_slopes,
    }
    return forward_pass.attend(forward_pass.num_attended_layers, query, key, value, **options)


@_attend_next_layer.register_fake
def _(query: torch.Tensor, *_: object) -> torch.Tensor:
    batch, num_heads, num_columns, head_size = query.shape
    return query.new_empty((batch, num_columns, num_heads, head_size))


def _current_pass() -> Pass:
    forward_pass = _running.get()
    if forward_pass is None:
        raise FailedPreconditionError(
            f"no step is running: call the whole model with {CACHE}=KVServiceCache(...), or through forward(), or "
            "uninstall() it"
        )
    return forward_pass


@cache
def _is_default(scale: float | None, head_size: int) -> bool:
    """Return whether a scale is, as a float32, the scale of attention without one."""
    return scale is not None and np.float32(scale) == np.float32(1) / np.sqrt(np.float32(head_size))


def refuse_gradients(*states: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states):
        raise FailedPreconditionError(
            "the daemon computes no gradients: call the model under torch.no_grad(), or freeze its parameters"
        )


def _refuse_unsupported(
    module: torch.nn.Module,
    dropout: float,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> None:
    for name, feature in _UNSUPPORTED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise InvalidArgumentError(f"the daemon's attention has no {feature}", field=name)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal or getattr(module, "is_cross_attention", False):
        raise InvalidArgumentError("only causal self-attention runs in the daemon", field="is_causal")
    if dropout:
        raise InvalidArgumentError("inference only: call model.eval()", field="dropout")


def _window(mask: StepMask | None, window: int) -> int:
    """Return the sliding window of a layer, from its mask or its arguments. Raises InvalidArgumentError if they
    differ, and for a window without tokens."""
    if mask is None:
        return window
    if not isinstance(mask, StepMask):
        raise InvalidArgumentError("the model builds its own attention masks", field="attention_mask")
    if mask.is_empty:
        raise InvalidArgumentError("a layer has a window of 0 tokens", field="sliding_window")
    if window and window != mask.sliding_window:
        raise InvalidArgumentError(
            f"attention has a window of {window}, but its mask has one of {mask.sliding_window}",
            field="sliding_window",
        )
    return mask.sliding_window


AttentionInterface.register(ATTENTION_NAME, kvservice_attention_forward)
