"""Passes over prompts of different lengths without their padding.

A batch `[rows, columns]` is computed as one row of the tokens that are pending, in the order of the step's sequences,
as `packed.forward` does. The model then spends no time on padding and on tokens that the prefix cache has. This is for
callers that need only the logits of the last column, as `generate` does for a prompt.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from kvservice.integrations.transformers.arguments import GENERATE_INPUTS
from kvservice.integrations.transformers.columns import Mask


def is_possible(model: PreTrainedModel, inputs: dict[str, Any], pending: Mask) -> bool:
    """Return whether a pass with these inputs can be computed without padding, and has some.

    pending: bool `[rows, columns]`, the new tokens that must be computed. The logits of all rows are in the last
    column, so none of them may end with padding. Models from outside the library may read `logits_to_keep` in their own
    way.
    """
    given = {name for name, value in inputs.items() if value is not None and value is not False}
    position_ids = inputs.get("position_ids")
    return (
        not pending.all()
        and bool(pending[:, -1].all())
        and given <= GENERATE_INPUTS
        and inputs.get("logits_to_keep") == 1
        and inputs.get("return_dict") is True
        and isinstance(position_ids, torch.Tensor)
        and tuple(position_ids.shape) == pending.shape
        and type(model).__module__.startswith("transformers.")
    )


def packed(inputs: dict[str, Any], pending: Mask, num_past: int) -> dict[str, Any]:
    """Return the inputs for one row with the pending tokens. num_past: the columns that the cache has."""
    device = inputs["input_ids"].device
    chosen = torch.from_numpy(pending).to(device)
    ids = inputs["input_ids"][chosen][None]
    return inputs | {
        "input_ids": ids,
        "position_ids": inputs["position_ids"][chosen.to(inputs["position_ids"].device)][None],
        # With a mask of ones the library does not derive sequences from the positions.
        "attention_mask": torch.ones((1, num_past + ids.shape[1]), dtype=torch.long, device=device),
        "logits_to_keep": chosen.sum(1).cumsum(0) - 1,
    }


def restored(output: Any) -> Any:
    """Return the output of a pass over `packed` inputs as that of the batch: logits `[rows, 1, vocabulary]`."""
    output["logits"] = output["logits"].transpose(0, 1)
    return output
