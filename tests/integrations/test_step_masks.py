"""Translation of the library's masks: causal, optionally with a sliding window; all others are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from cache_argument import CACHE, cached
from each_row import each_row
from transformers import masking_utils

from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache

INPUTS: dict[str, Any] = {"inputs_embeds": torch.zeros(2, 7, 8), "attention_mask": None, CACHE: None}


def config(chunk_size: int = 4) -> Any:
    """Return the configuration of a model whose attention is the daemon's."""
    text_config: Any = transformers.Llama4TextConfig
    made = text_config(attn_implementation="kvservice", attention_chunk_size=chunk_size)
    made.sliding_window = 4
    return made


def some(*indices: torch.Tensor) -> torch.Tensor:
    return indices[2] >= 0


def test_other_masks_are_refused() -> None:
    """Chunks are no window, wherever they begin."""
    rows: list[tuple[str, dict[str, Any]]] = [
        ("create_bidirectional_mask", {}),
        ("create_bidirectional_sliding_window_mask", {}),
        ("create_causal_mask", {"or_mask_function": some}),
        ("create_causal_mask", {"and_mask_function": some}),
        ("create_sliding_window_causal_mask", {"and_mask_function": some}),
        ("create_causal_mask", {"block_sequence_ids": torch.zeros(2, 7)}),
        ("create_sliding_window_causal_mask", {"block_sequence_ids": torch.zeros(2, 7)}),
        ("create_causal_mask", {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}),
    ]
    with each_row() as row:
        for create, more in rows:
            with row((create, more)):
                assert_refused(functools.partial(getattr(masking_utils, create), config(), **INPUTS | more))
        for chunk_size in (2, 3, 4, 8):
            for padding in range(4):
                mask = torch.ones(2, 7, dtype=torch.long)
                mask[:, :padding] = 0
                inputs = INPUTS | {"attention_mask": mask}
                create_chunked = functools.partial(masking_utils.create_chunked_causal_mask, config(chunk_size))
                with row(("chunks", chunk_size, padding)):
                    assert_refused(functools.partial(create_chunked, **inputs))


def assert_refused(create: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="masks otherwise") as refused:
        create()
    assert refused.value.field == "attention_mask"


def test_no_computation_takes_the_mask_for_a_tensor() -> None:
    states = torch.zeros(1, 4, 2, 32)
    for create in (masking_utils.create_causal_mask, masking_utils.create_sliding_window_causal_mask):
        mask: Any = create(config(), **INPUTS)
        for compute in (
            lambda mask: states + mask,
            lambda mask: states.masked_fill(mask, 0),
            lambda mask: torch.nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask),
        ):
            with pytest.raises(FailedPreconditionError, match="computes its attention itself"):
                compute(mask)


def test_masks_that_contradict_attention_are_refused(make_pair) -> None:
    """A layer slides in another window than the model's mask, and another gets a tensor for its mask."""

    def other_window(layer: Any) -> None:
        layer.self_attn.sliding_window += 1

    def tensor(layer: Any) -> None:
        replace_mask = lambda _, args, kwargs: (args, kwargs | {"attention_mask": torch.ones(1)})  # noqa: E731
        layer.self_attn.register_forward_pre_hook(replace_mask, with_kwargs=True)

    for change, field in ((other_window, "sliding_window"), (tensor, "attention_mask")):
        pair = make_pair("gemma2")
        change(pair.model.model.layers[0])
        with pytest.raises(InvalidArgumentError) as refused:
            pair.model(torch.tensor([[3, 4]]), **cached(KVServiceCache(pair.new_session())))
        assert refused.value.field == field
