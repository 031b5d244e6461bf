"""What a model asks of its attention mask: the library calls this module instead of building the mask.

The daemon's attention is causal within each sequence of the step, so a mask has one thing left to say: how far back a
token sees. The library has a mask made for each kind of layer and hands it to those layers' attention function. It is
what eager attention goes by, also in families that do not hand over their window by itself.
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

    sliding_window: tokens that a token sees, itself included. 0: all before it.
    """

    sliding_window: int
    ndim: ClassVar[int] = 0

    def to(self, *_: Any, **__: Any) -> StepMask:
        """Some models convert their masks."""
        return self

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        """torch calls this when a mask gets into a computation."""
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
    """The mask function of the library's registry: says what is masked, in place of a tensor.

    mask_function: `(batch, head, query, key)`, int64 tensors of indices that broadcast -> bool, true where the query
    may see the key. local_size: the window, or the size of chunks. allow_is_causal_skip is false or use_vmap true where
    the model adds something to the mask.

    Raises InvalidArgumentError unless the mask is causal, with a sliding window at most.
    """
    if mask_function is _CAUSAL:
        return StepMask(0)
    if local_size and allow_is_causal_skip and not use_vmap and _slides(mask_function, local_size, device):
        return StepMask(local_size)
    raise InvalidArgumentError(
        "attention has to be causal, in sliding windows at most: the model masks otherwise", field="attention_mask"
    )


def _slides(mask_function: MaskFunction, window: int, device: torch.device | None) -> bool:
    """Whether a query sees the last `window` keys and no others.

    It looks at two queries in a row: in chunks of that size, one of them is not the last of its chunk.
    """
    first = torch.zeros((), dtype=torch.long, device=device)
    for query in (first + 2 * window, first + 2 * window + 1):
        keys = query + torch.tensor([-window, 1 - window, 0, 1], device=device)
        if mask_function(first, first, query, keys).tolist() != [False, True, True, False]:
            return False
    return True


AttentionMaskInterface.register(ATTENTION_NAME, kvservice_mask)
