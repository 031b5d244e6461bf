"""A model on one ragged step: the tokens of all sequences in one row, one sequence after the other, no padding."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvservice.client import Step
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers.attention import ForwardPass, running
from kvservice.integrations.transformers.models import check_installed


def forward(
    model: PreTrainedModel, step: Step, token_ids: Sequence[int] | torch.Tensor, *, last_only: bool = False
) -> torch.Tensor:
    """Runs an `install`ed causal language model over the tokens of a step; its K/V are in the daemon afterwards.

    token_ids: the step's `num_tokens` tokens, in the order of its sequences. Returns logits
    `[num_tokens, vocabulary]`, or with `last_only` `[sequences, vocabulary]`, those of the last token of each.

    Raises InvalidArgumentError if the number of tokens is not the step's, FailedPreconditionError if the model is not
    installed or left out layers, and whatever the daemon answers.
    """
    check_installed(model)
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device).reshape(1, -1)
    if ids.shape[1] != step.num_tokens:
        raise InvalidArgumentError(f"{ids.shape[1]} tokens for a step of {step.num_tokens}", field="token_ids")
    inputs = {"input_ids": ids}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = torch.from_numpy(_positions(step)).to(model.device)[None]
    if last_only:
        inputs["logits_to_keep"] = torch.from_numpy(np.cumsum(step.query_lens) - 1).to(model.device)
    with running(ForwardPass(step)) as forward_pass:
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    forward_pass.check_complete(model.config.num_hidden_layers)
    return logits


def _positions(step: Step) -> NDArray[np.int64]:
    """Token position of each token of the step, int64 `[num_tokens]`."""
    starts = np.cumsum(step.query_lens) - step.query_lens
    first_positions = step.context_lens - step.query_lens
    offsets: NDArray[np.int64] = np.repeat(first_positions - starts, step.query_lens)
    return offsets + np.arange(step.num_tokens)
