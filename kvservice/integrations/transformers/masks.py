"""The mask function of the library's registry. It replaces the mask tensor by the sliding window of a layer.

The daemon's attention is causal within each sequence of the step, so the only remaining information in a mask is the
sliding window. The library builds one mask per kind of layer and passes it to the attention function of these layers.
Eager attention uses only the mask, so it has the window even in families that do not pass it as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from kvservice.errors import FailedPreconditionError, InvalidArgumentError

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
