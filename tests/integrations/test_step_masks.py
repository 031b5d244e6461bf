"""Translation of the library's masks: causal, optionally with a sliding window; all others are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_argument import CACHE
from transformers import masking_utils

from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache
from kvservice.integrations.transformers.attention import kvservice_attention_forward
from kvservice.integrations.transformers.masks import StepMask, kvservice_mask

INPUTS: dict[str, Any] = {"inputs_embeds": torch.zeros(2, 7, 8), "attention_mask": None, CACHE: None}


@pytest.fixture
def config() -> Any:
    import transformers

    text_config: Any = transformers.Llama4TextConfig
    config = text_config(attn_implementation="kvservice", attention_chunk_size=4)
    config.sliding_window = 4
    return config


def test_a_causal_mask_has_no_window(config) -> None:
    assert masking_utils.create_causal_mask(config, **INPUTS) == StepMask(0)


@pytest.mark.parametrize("window", [1, 2, 4, 7, 4096])
def test_a_sliding_mask_has_its_window(config, window: int) -> None:
    config.sliding_window = window
    assert masking_utils.create_sliding_window_causal_mask(config, **INPUTS) == StepMask(window)


def some(*indices: torch.Tensor) -> torch.Tensor:
    return indices[2] >= 0


@pytest.mark.parametrize(
    ("create", "more"),
    [
        ("create_chunked_causal_mask", {}),
        ("create_bidirectional_mask", {}),
        ("create_bidirectional_sliding_window_mask", {}),
        ("create_causal_mask", {"or_mask_function": some}),
        ("create_causal_mask", {"and_mask_function": some}),
        ("create_sliding_window_causal_mask", {"and_mask_function": some}),
        ("create_causal_mask", {"block_sequence_ids": torch.zeros(2, 7)}),
        ("create_sliding_window_causal_mask", {"block_sequence_ids": torch.zeros(2, 7)}),
        ("create_causal_mask", {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}),
    ],
)
def test_other_masks_are_refused(config, create: str, more: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match="masks otherwise") as refused:
        getattr(masking_utils, create)(config, **INPUTS | more)
    assert refused.value.field == "attention_mask"


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 8])
@pytest.mark.parametrize("padding", range(4))
def test_chunks_are_no_window_wherever_they_begin(chunk_size: int, padding: int) -> None:
    chunked = masking_utils.chunked_causal_mask_function(chunk_size, torch.tensor([padding]))
    if chunk_size == 1:
        assert kvservice_mask(mask_function=chunked, local_size=1) == StepMask(1), "the same thing"
        return
    with pytest.raises(InvalidArgumentError):
        kvservice_mask(mask_function=chunked, local_size=chunk_size)


@pytest.mark.parametrize("mask", [StepMask(0), StepMask(5)])
def test_no_computation_takes_the_mask_for_a_tensor(mask: Any) -> None:
    states = torch.zeros(1, 4, 2, 32)
    for compute in (
        lambda: states + mask,
        lambda: states.masked_fill(mask, 0),
        lambda: torch.nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask),
    ):
        with pytest.raises(FailedPreconditionError, match="computes its attention itself"):
            compute()


@pytest.mark.parametrize(("mask", "field"), [(StepMask(5), "sliding_window"), (torch.ones(1), "attention_mask")])
def test_masks_that_contradict_attention_are_refused(llama, mask: Any, field: str) -> None:
    layer = llama.model.model.layers[0].self_attn
    states = torch.zeros(1, 4, 2, 32)
    cache = KVServiceCache(llama.new_session())
    inputs = {"input_ids": torch.tensor([[3, 4]])}
    with (
        pytest.raises(InvalidArgumentError) as refused,
        cache.forward_pass(llama.model, inputs, every_output=True, takes_position_ids=True),
    ):
        kvservice_attention_forward(layer, states, states[:, :2], states[:, :2], mask, sliding_window=6)
    assert refused.value.field == field
