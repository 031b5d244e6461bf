"""Model families whose attention does not use the library's registry. Methods of their modules are replaced."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from kvservice.integrations.transformers.attention import kvservice_attention_forward, refuse_holes


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of each head: powers of `2 ** (-8 / n)` for the largest power of two n up to `num_heads`, then
    every other power for 2n (Press et al., "Train Short, Test Long", 2022)."""
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (head + 1) / n) for head in range(n)]
    between = [2 ** (-8 * (head + 1) / (2 * n)) for head in range(0, 2 * (num_heads - n), 2)]
    return slopes + between


# The replacements project, rotate and merge as the library's methods do. They omit the cache, which is not involved,
# and biases over padded key positions, which the daemon computes from the slopes and the true positions.


def _bloom_forward(
    self: BloomAttention,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
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


def _falcon_forward(
    self: FalconAttention,
    hidden_states: torch.Tensor,
    attention_mask: Any,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = self._split_heads(self.query_key_value(hidden_states))
    if self.new_decoder_architecture:
        # The library repeats each KV head for the query heads of its group.
        assert self.num_kv_heads is not None, "the configuration fills it in"
        group = self.num_heads // self.num_kv_heads
        key, value = key[:, :, ::group], value[:, :, ::group]
    query, key, value = (states.transpose(1, 2) for states in (query, key, value))
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)  # type: ignore[no-untyped-call]
    output, weights = kvservice_attention_forward(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.inv_norm_factor,
    )
    return self.dense(output.flatten(2)), weights


def _mpt_forward(
    self: MptAttention,
    hidden_states: torch.Tensor,
    position_bias: torch.Tensor,
    attention_mask: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    refuse_holes()
    projected = self.Wqkv(hidden_states)
    if self.clip_qkv:
        projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
    query, key, value = (
        states.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for states in projected.chunk(3, dim=2)
    )
    output, weights = kvservice_attention_forward(
        self,
        query,
        key,
        value,
        attention_mask,
        scaling=self.softmax_scale,
        dropout=self.attn_dropout_p if self.training else 0.0,
        # The bias is 0 for the last key and increases by the slope from one key to the next.
        alibi_slopes=(position_bias[:, 0, -1] - position_bias[:, 0, -2]).tolist(),
    )
    return self.out_proj(output.flatten(2)), weights


def _attn(
    self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None
) -> tuple[torch.Tensor, None]:
    """`_attn` of GPT-J and related models. Inputs and output are `[batch, num_heads, columns, head_size]`."""
    scaling, window = 1 / math.sqrt(value.shape[-1]), 0
    dropout = self.attention_dropout if isinstance(self, GPTNeoXJapaneseAttention) else self.attn_dropout
    if isinstance(self, GPTNeoSelfAttention):
        # GPT-Neo does not scale its scores, and its masks do not include the window.
        self.layer_idx = self.layer_id
        scaling, attention_mask = 1.0, None
        window = self.config.window_size if self.attention_type == "local" else 0
    output, weights = kvservice_attention_forward(
        self,
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        attention_mask,
        scaling=scaling,
        dropout=dropout.p if self.training else 0.0,
        sliding_window=window,
    )
    return output.transpose(1, 2), weights


_REPLACED: dict[type[torch.nn.Module], tuple[str, Callable[..., Any]]] = {
    BloomAttention: ("forward", _bloom_forward),
    CodeGenAttention: ("_attn", _attn),
    FalconAttention: ("forward", _falcon_forward),
    GPTJAttention: ("_attn", _attn),
    GPTNeoSelfAttention: ("_attn", _attn),
    GPTNeoXJapaneseAttention: ("_attn", _attn),
    MptAttention: ("forward", _mpt_forward),
}


def is_adaptable(model: PreTrainedModel) -> bool:
    return any(type(module) in _REPLACED for module in model.modules())


def is_adapted(model: PreTrainedModel) -> bool:
    """Return whether all attention methods of the model that need a replacement are replaced."""
    replaceable = [module for module in model.modules() if type(module) in _REPLACED]
    return all(_REPLACED[type(module)][0] in vars(module) for module in replaceable)


def adapt(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module) in _REPLACED:
            name, replacement = _REPLACED[type(module)]
            setattr(module, name, MethodType(replacement, module))


def restore(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module) in _REPLACED:
            vars(module).pop(_REPLACED[type(module)][0], None)
