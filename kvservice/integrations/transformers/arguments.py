"""What the library's models are called with: the arguments' names, the columns of a batch, and passes without padding.

The cache's name is `cache` from version 5.24 on. Models still take `past_key_values`, the name before, with a warning.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin, PreTrainedModel

from kvservice.errors import InvalidArgumentError

CACHE: Final = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)
# Inputs of a pass may have either, as their caller wrote them.
CACHE_NAMES: Final = ("cache", "past_key_values")
# `generate` gives a model these for text. A pass with other inputs is computed in the general way.
GENERATE_INPUTS: Final = frozenset(
    ("attention_mask", "input_ids", "logits_to_keep", *CACHE_NAMES, "position_ids", "return_dict", "use_cache")
)


def given_cache(inputs: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the value of the cache in a model's inputs. The value is None if there is none."""
    given = ((name, inputs[name]) for name in CACHE_NAMES if inputs.get(name) is not None)
    return next(given, (CACHE, None))


def library_model(model: torch.nn.Module) -> PreTrainedModel:
    """Return a model of the library itself, or the one in a PeftModel, whose layers hold the adapters.

    Raises InvalidArgumentError for other objects, and for methods of PEFT that put learned K/V before the tokens.
    """
    if isinstance(model, PreTrainedModel):
        return model
    get_base_model: Any = getattr(model, "get_base_model", None)
    inside = get_base_model() if callable(get_base_model) else None
    if not isinstance(inside, PreTrainedModel):
        raise InvalidArgumentError(f"must be a model of the library, not {type(model).__name__}", field="model")
    if inside is model.base_model:
        raise InvalidArgumentError(
            "learned prompts come before the tokens, and the daemon's sequences hold tokens alone", field="model"
        )
    return inside


# ---- columns of a pass: which are tokens, which must be computed, and for which the caller needs outputs
#
# A batch is `[rows, columns]`. A row is one sequence with padding anywhere. Past columns are those of earlier passes.


Mask = NDArray[np.bool_]

# Inputs with one entry per new column in the last dimension. The attention mask also covers past columns.
_BY_COLUMN = ("input_ids", "position_ids", "token_type_ids")


@dataclass(frozen=True)
class Batch:
    """The new columns of a call of the model, and the mask of past and new columns.

    input_ids: int64 `[rows, columns]`. mask: bool `[rows, past and new columns]`, true for tokens. They are NumPy
    arrays because each decode step makes a dozen operations on them, which take several times as long in torch.
    """

    input_ids: NDArray[np.int64]
    mask: Mask

    @property
    def num_rows(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def num_columns(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def num_past(self) -> int:
        return int(self.mask.shape[1]) - self.num_columns

    @property
    def tokens(self) -> Mask:
        """bool `[rows, columns]`: the part of the mask for the new columns."""
        return self.mask[:, self.num_past :]

    def token_ids(self) -> list[list[int]]:
        """Return the new tokens of each row."""
        return [row[is_token].tolist() for row, is_token in zip(self.input_ids, self.tokens, strict=True)]


def read_batch(inputs: dict[str, Any], past_mask: Mask | None) -> Batch:
    """Return the batch of a call of the model with the keyword arguments `inputs`.

    past_mask: bool `[rows, past columns]` of the stored columns, None if there are none.

    Raises InvalidArgumentError for inputs without token ids, for masks that are not `[rows, past and new columns]`, and
    for masks that differ from `past_mask` in the stored columns.
    """
    input_ids = _input_ids(inputs)
    if past_mask is None:
        past_mask = np.ones((len(input_ids), 0), np.bool_)
    if len(input_ids) != len(past_mask):
        raise InvalidArgumentError(f"has {len(input_ids)} rows, the cache {len(past_mask)}", field="input_ids")
    mask = _full_mask(inputs.get("attention_mask"), input_ids, past_mask)
    if not np.array_equal(mask[:, : past_mask.shape[1]], past_mask):
        raise InvalidArgumentError(
            "differs from the previous mask in columns that the cache holds, whose K/V were computed with that mask: "
            "reset() the cache, or give a mask that continues the previous one",
            field="attention_mask",
        )
    if not mask[:, past_mask.shape[1] :].any():
        raise InvalidArgumentError("the new columns are all padding", field="attention_mask")
    return Batch(input_ids, mask)


def _input_ids(inputs: dict[str, Any]) -> NDArray[np.int64]:
    input_ids = inputs.get("input_ids")
    if input_ids is None:
        raise InvalidArgumentError("the daemon needs token ids, embeddings alone are not enough", field="input_ids")
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or 0 in input_ids.shape:
        raise InvalidArgumentError("must be a tensor [rows, columns] of token ids, not empty", field="input_ids")
    return input_ids.cpu().numpy()


def _full_mask(mask: object, input_ids: NDArray[np.int64], past_mask: Mask) -> Mask:
    """Return the mask, bool `[rows, past and new columns]`. Without a mask every column is a token. Raises
    InvalidArgumentError."""
    rows, columns = len(input_ids), past_mask.shape[1] + input_ids.shape[1]
    if mask is None:
        return np.ones((rows, columns), np.bool_)
    if not isinstance(mask, torch.Tensor):
        raise InvalidArgumentError(
            f"must be a tensor [rows, past and new columns], not {type(mask).__name__}", field="attention_mask"
        )
    if mask.ndim != 2 or len(mask) != rows or mask.shape[1] < columns:
        raise InvalidArgumentError(
            f"must be [{rows}, {columns}], past and new columns, not {list(mask.shape)}", field="attention_mask"
        )
    # The library also ignores the rest of a longer mask.
    return mask[:, :columns].detach().to(torch.bool, copy=True).cpu().numpy()


def num_wanted_columns(inputs: dict[str, Any], every_output: bool) -> int:
    """Return how many of the last columns the caller needs: those of its logits, or all if it needs other outputs."""
    columns = int(inputs["input_ids"].shape[1])
    logits_to_keep = inputs.get("logits_to_keep", 0)
    if every_output or not isinstance(logits_to_keep, int) or logits_to_keep == 0:
        return columns
    return min(logits_to_keep, columns)


def refuse_padded_ends(inputs: dict[str, Any], batch: Batch) -> None:
    """Raise InvalidArgumentError if only the last logits are wanted, and a row has none there: it ends with padding."""
    num_wanted = inputs.get("logits_to_keep")
    if not isinstance(num_wanted, int) or num_wanted <= 0:
        return
    padded = batch.mask.any(1) & ~batch.tokens[:, -num_wanted:].any(1)
    if padded.any():
        raise InvalidArgumentError(
            f"row {int(padded.argmax())} ends with padding, whose logits would be taken for those of its last token: "
            "pad on the left, or ask for the logits of all columns",
            field="attention_mask",
        )


def has_plain_positions(inputs: dict[str, Any], batch: Batch, takes_position_ids: bool) -> bool:
    """Return whether the position of every new token is its index among the tokens of its row.

    A model that accepts position ids but gets none counts columns. A model that does not accept them uses distances or
    the mask; for such a model no row may have holes.

    Raises InvalidArgumentError unless position ids have one entry per new column.
    """
    if not takes_position_ids:
        return holed_span(batch.mask) == 0
    expected = np.count_nonzero(batch.mask[:, : batch.num_past], 1)[:, None] + batch.tokens.cumsum(1) - 1
    given = inputs.get("position_ids")
    if given is None:
        position_ids = np.arange(batch.num_past, batch.mask.shape[1])[None]
    elif not isinstance(given, torch.Tensor) or given.shape[-1] != batch.num_columns:
        raise InvalidArgumentError(f"must be a tensor of {batch.num_columns} columns", field="position_ids")
    elif given.ndim > 2 or given.shape[0] not in (1, batch.num_rows):
        return False
    else:
        position_ids = given.detach().cpu().numpy()
    return bool(((position_ids == expected) | ~batch.tokens).all())


def holed_span(mask: Mask) -> int:
    """Return the largest number of columns from first to last token over all rows with padding between tokens, or 0 if
    there is no such row.

    mask: bool `[rows, columns]`.
    """
    if mask.all():
        return 0
    columns = np.arange(mask.shape[1])
    last = np.where(mask, columns, -1).max(1)
    first = np.where(mask, columns, mask.shape[1]).min(1)
    span = last - first + 1
    return int(np.where(span > mask.sum(1), span, 0).max())


def pending_mask(tokens: Mask, num_computed: list[int]) -> Mask:
    """Return `tokens` without the first `num_computed[row]` tokens of each row, whose K/V are already in the pool."""
    return tokens & (tokens.cumsum(1) > np.array(num_computed)[:, None])


def num_unneeded_columns(pending: Mask, num_wanted: int) -> int:
    """Return the number of leading columns without a pending token in any row, not counting the last `num_wanted`."""
    first_pending = int(pending.any(0).argmax())
    return min(first_pending, int(pending.shape[1]) - num_wanted)


def without_first(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the inputs without their first `count` columns."""
    return {
        name: value[..., count:] if name in _BY_COLUMN and value is not None else value
        for name, value in inputs.items()
    }


# ---- passes over prompts of different lengths without their padding
#
# A batch `[rows, columns]` is computed as one row of the tokens that are pending, in the order of the step's sequences,
# as `forward` does. The model then spends no time on padding and on tokens that the prefix cache has. This is for
# callers that need only the logits of the last column, as `generate` does for a prompt.


def has_padding_to_skip(model: PreTrainedModel, inputs: dict[str, Any], pending: Mask) -> bool:
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


def without_padding(inputs: dict[str, Any], pending: Mask, num_past: int) -> dict[str, Any]:
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


def with_rows(output: Any) -> Any:
    """Return the output of a pass over `packed` inputs as that of the batch: logits `[rows, 1, vocabulary]`."""
    output["logits"] = output["logits"].transpose(0, 1)
    return output
