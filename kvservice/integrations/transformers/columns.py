"""The padded side of a pass: which columns of a batch are tokens, which need computing, and what the caller wants back.

A batch is `[rows, columns]`; a row is one sequence with padding anywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from kvservice.errors import InvalidArgumentError

# Inputs that have one entry per column, in their last dimension. The attention mask is none: it covers the past too.
_BY_COLUMN = ("input_ids", "position_ids", "token_type_ids")


def token_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """bool `[rows, columns]` of a call of the model: true where there is a token, false where there is padding.

    Raises InvalidArgumentError for inputs without token ids, which the prefix cache goes by, and for masks that are
    not `[rows, past and new columns]`.
    """
    input_ids = inputs.get("input_ids")
    if input_ids is None:
        raise InvalidArgumentError("the daemon needs token ids, embeddings alone do not do", field="input_ids")
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones(input_ids.shape, dtype=torch.bool)
    rows, columns = input_ids.shape
    if mask.ndim != 2 or mask.shape[0] != rows or mask.shape[1] < columns:
        raise InvalidArgumentError(
            f"is to be [{rows}, at least {columns}], not {list(mask.shape)}", field="attention_mask"
        )
    latest: torch.Tensor = mask[:, -columns:].bool().cpu()
    if not latest.any():
        raise InvalidArgumentError("the new columns are all padding", field="attention_mask")
    return latest


def num_wanted_columns(inputs: dict[str, Any], every_output: bool) -> int:
    """How many of the last columns the caller wants computed: those of its logits, or all if it asks for more."""
    columns = int(inputs["input_ids"].shape[1])
    logits_to_keep = inputs.get("logits_to_keep", 0)
    if every_output or not isinstance(logits_to_keep, int) or logits_to_keep == 0:
        return columns
    return min(logits_to_keep, columns)


def pending_mask(tokens: torch.Tensor, num_computed: list[int]) -> torch.Tensor:
    """`tokens` without the first `num_computed[row]` tokens of each row, whose K/V are in the pool already."""
    return tokens & (tokens.cumsum(1) > torch.tensor(num_computed)[:, None])


def num_unneeded_columns(pending: torch.Tensor, num_wanted: int) -> int:
    """Leading columns that hold no pending token in any row, short of the last `num_wanted`."""
    first_pending = int(pending.any(0).nonzero()[0])
    return min(first_pending, pending.shape[1] - num_wanted)


def num_full_columns(tokens: torch.Tensor) -> int:
    """Last columns that hold a token in every row."""
    padded = (~tokens.all(0)).nonzero()
    return tokens.shape[1] - 1 - int(padded[-1]) if len(padded) else tokens.shape[1]


def without_first(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """The inputs without their first `count` columns."""
    return {
        name: value[..., count:] if name in _BY_COLUMN and value is not None else value
        for name, value in inputs.items()
    }
