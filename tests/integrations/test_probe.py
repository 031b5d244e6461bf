"""Results of the one-token probe of install(), and of forward()'s check of positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from each_row import each_row
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForCausalLM

from kvservice.client import Session
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import forward, install, model_keys, pool_options

GPT2 = GPT2Config(vocab_size=23, n_embd=64, n_layer=2, n_head=2, n_positions=64, initializer_range=0.5)


class BeginsAtFive(GPT2LMHeadModel):
    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **arguments: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(5, 5 + input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, position_ids=position_ids, **arguments)


class CountsColumns(GPT2LMHeadModel):
    def forward(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        return super().forward(input_ids=input_ids, **arguments)


class Fails(GPT2LMHeadModel):
    def forward(self, **_: Any) -> Any:
        raise ValueError("no image")


class NamesNoLayers(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        for block in cast(Any, self.transformer.h):
            block.attn.layer_idx = None


class AttendsInOneLayer(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        del self.transformer.h[1]


class AttendsInReverse(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        for index, block in enumerate(cast(Any, self.transformer.h)):
            block.attn.layer_idx = config.n_layer - 1 - index


class RepeatsHeads(GPT2LMHeadModel):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        for block in cast(Any, self.transformer.h):
            block.attn.num_heads, block.attn.head_dim = 1, 64


@pytest.fixture
def kv(clients) -> Iterator[Session]:
    with clients(pool_options(GPT2)).session() as session:
        session.reset_prefix_cache()
        yield session


def test_install_refuses() -> None:
    rows: list[tuple[type[GPT2LMHeadModel], str]] = [
        (Fails, "fails on one token: no image"),
        (NamesNoLayers, "does not say which layer it is"),
        (AttendsInOneLayer, "layers .0. attend, of 2"),
        (AttendsInReverse, "layers .1, 0. attend, of 2 in order"),
        (RepeatsHeads, "another shape"),
    ]
    with each_row() as row:
        for model, reason in rows:
            with row(model.__name__), pytest.raises(InvalidArgumentError, match=reason):
                install(model(GPT2).eval())


def test_positions_begin_after_padding_in_models_like_roberta(kv) -> None:
    config = RobertaConfig(
        vocab_size=23,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        is_decoder=True,
        pad_token_id=3,
        initializer_range=0.5,
    )
    model = RobertaForCausalLM(config).eval()
    with torch.no_grad():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0]
        step = kv.open_step([kv.allocate([5, 6, 7], extra_keys=model_keys(install(model)))])
        torch.testing.assert_close(forward(model, step, [5, 6, 7]), expected, atol=1e-3, rtol=0)


def test_forward_refuses_models_whose_positions_it_cannot_give(kv) -> None:
    for model, reason in ((BeginsAtFive, "is not one of .0."), (CountsColumns, "takes no position_ids")):
        installed = install(model(GPT2).eval())
        step = kv.open_step([kv.allocate([5, 6], extra_keys=model_keys(installed))])
        with pytest.raises(InvalidArgumentError, match=reason):
            forward(installed, step, [5, 6])


def test_forward_refuses_padding_where_it_has_no_position(kv) -> None:
    config = RobertaConfig(vocab_size=23, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, is_decoder=True)
    model = install(RobertaForCausalLM(config).eval())
    assert config.pad_token_id is not None
    step = kv.open_step([kv.allocate([5, config.pad_token_id], extra_keys=model_keys(model))])
    with pytest.raises(InvalidArgumentError) as refused:
        forward(model, step, [5, config.pad_token_id])
    assert refused.value.field == "token_ids"
