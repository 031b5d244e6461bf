"""BLOOM: the one supported family whose attention does not go through the library's registry."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention

from kvservice.integrations.transformers.attention import kvservice_attention_forward


def alibi_slopes(num_heads: int) -> list[float]:
    """Slope of each head: powers of `2 ** (-8 / n)` for the largest power of two n up to `num_heads`, then every other
    power for 2n (Press et al., "Train Short, Test Long", 2022)."""
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / n) for head in range(n)]
    between = [2 ** (-8 * (head + 1) / (2 * n)) for head in range(0, 2 * (num_heads - n), 2)]
    return slopes + between


def _attention_forward(
    self: BloomAttention,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """BloomAttention.forward, with what lies between the projections done by the daemon.

    Of the arguments left out, `layer_past` is the cache, which has no part in it, and `alibi` the bias over padded key
    positions, which the daemon makes from the slopes and the true ones.
    """
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    output, weights = kvservice_attention_forward(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.inv_norm_factor,
        dropout=self.attention_dropout.p if self.training else 0.0,
        alibi_slopes=alibi_slopes(self.num_heads),
    )
    return residual + self.dense(output.flatten(2)), weights


def adapt(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, BloomAttention):
            module.forward = MethodType(_attention_forward, module)  # type: ignore[method-assign]


def restore(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, BloomAttention):
            del module.forward
