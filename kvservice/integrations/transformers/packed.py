"""Forward pass over one ragged step: the tokens of all sequences are concatenated in one row without padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvservice.client import Step
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import keys
from kvservice.integrations.transformers.arguments import library_model
from kvservice.integrations.transformers.attention import ForwardPass, running
from kvservice.integrations.transformers.models import check_installed
from kvservice.integrations.transformers.probe import first_position
from kvservice.integrations.transformers.training import refuse_training


def forward(
    model: torch.nn.Module,
    step: Step,
    token_ids: Sequence[int] | torch.Tensor,
    *,
    last_only: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run an installed causal language model over the tokens of a step. Its K/V are in the daemon afterwards.

    token_ids: the step's `num_tokens` tokens, in the order of its sequences, which were allocated with
    `extra_keys=model_keys(model)`. Returns logits `[num_tokens, vocabulary]`, or with `last_only` those of the last
    token of each sequence, `[sequences, vocabulary]`, or with `rows`, int64 `[m]`, those of these indices into the
    step's tokens, `[m, vocabulary]`.

    Raises InvalidArgumentError if the number of tokens is not the step's or a row is not one of them, for models whose
    positions cannot be set (see `first_position`), and for sequences so long that the rotary embeddings of others would
    depend on them; FailedPreconditionError if the model is not installed or in training mode, if sequences were
    allocated for another model, or if layers were skipped; and the daemon's errors.
    """
    model = library_model(model)
    check_installed(model)
    prompts = step.num_tokens > len(step.sequences)
    refuse_training(model, prompts)
    keys.check_sequences(model, step.sequences, prompts)
    ids = torch.as_tensor(token_ids, dtype=torch.long, device=model.device).reshape(1, -1)
    if ids.shape[1] != step.num_tokens:
        raise InvalidArgumentError(f"{ids.shape[1]} tokens for a step of {step.num_tokens}", field="token_ids")
    # With a mask of ones the library does not derive sequences from the positions.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    first = first_position(model)
    if first is not None:
        inputs["position_ids"] = torch.from_numpy(first + _positions(step)).to(model.device)[None]
    if first and (ids == model.config.pad_token_id).any():
        raise InvalidArgumentError("padding has no position of its own in this model", field="token_ids")
    if last_only:
        rows = torch.from_numpy(np.cumsum(step.query_lens) - 1)
    if rows is not None:
        inputs["logits_to_keep"] = _checked_rows(rows, step).to(model.device)
    forward_pass = ForwardPass(step)
    with running(forward_pass):
        logits: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    forward_pass.check_complete(model.config.num_hidden_layers)
    return logits


def _checked_rows(rows: torch.Tensor, step: Step) -> torch.Tensor:
    if rows.ndim != 1 or rows.dtype != torch.long:
        raise InvalidArgumentError(f"must be int64 [m], not {rows.dtype} {list(rows.shape)}", field="rows")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < step.num_tokens:
        raise InvalidArgumentError(f"must be indices of the step's {step.num_tokens} tokens", field="rows")
    return rows


def _positions(step: Step) -> NDArray[np.int64]:
    """Return the position of each token of the step in its sequence, int64 `[num_tokens]`."""
    starts = np.cumsum(step.query_lens) - step.query_lens
    first_positions = step.context_lens - step.query_lens
    offsets: NDArray[np.int64] = np.repeat(first_positions - starts, step.query_lens)
    return offsets + np.arange(step.num_tokens)
