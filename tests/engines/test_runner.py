"""Ragged steps of the runner against the library's own forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from causal_lms import CASES, make_config, make_model
from each_row import each_row
from random_steps import assert_random_steps_equal

from kvservice.client import Session
from kvservice.engines import ModelRunner
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import model_keys

pytestmark = pytest.mark.filterwarnings("ignore")  # Tiny random models cause many warnings of the library.

# Families with sliding windows, soft caps, parallel attention and MLP, experts; with attention code of their own: ALiBi
# biases, unscaled scores.
FAMILIES = ["llama", "mistral", "gemma2", "cohere", "mixtral", "glm", "bloom", "gpt_neo"]


@pytest.fixture
def llama() -> Any:
    return make_model(make_config(CASES["llama"]))


def test_random_steps_give_the_librarys_logits(session_for: Any) -> None:
    with each_row() as row:
        for family in FAMILIES:
            kv = session_for(CASES[family])
            for seed in range(2):
                with row((family, seed)):
                    assert_random_steps_equal(CASES[family], kv, seed)


def test_every_transport_gives_the_librarys_logits(session_for: Any) -> None:
    with each_row() as row:
        for transport in ("mapped", "region", "inline"):
            with row(transport):
                assert_random_steps_equal(CASES["gemma2"], session_for(CASES["gemma2"], transport), seed=3)


def test_the_pool_has_to_fit_the_model(kv: Session, llama: Any) -> None:
    config = make_config(CASES["llama"])
    config.num_hidden_layers = 2
    for model in (make_model(config), llama.to(torch.bfloat16)):
        with pytest.raises(InvalidArgumentError, match="needs a pool of") as refused:
            ModelRunner(model, kv)
        assert refused.value.field == "model"
        model(torch.tensor([[5, 6]]))  # a refused model is not installed


def test_refuses_rows_that_are_no_tokens_of_the_step(kv: Session, llama: Any) -> None:
    runner = ModelRunner(llama, kv)
    wrong: list[Any] = [[3], [-1], [[0]], [0.5]]
    for rows in wrong:
        sequence = kv.allocate([5, 6, 7], extra_keys=model_keys(llama))
        with pytest.raises(InvalidArgumentError) as refused:
            runner.run(kv.open_step([sequence]), torch.tensor([5, 6, 7]), torch.tensor(rows))
        assert refused.value.field == "rows"
        assert kv.describe([sequence])[0].num_computed_tokens == 0
        kv.free([sequence])


def test_refuses_sequences_of_another_model(kv: Session, llama: Any) -> None:
    runner = ModelRunner(llama, kv)
    sequence = kv.allocate([5, 6, 7])
    with pytest.raises(FailedPreconditionError, match="model_keys"):
        runner.run(kv.open_step([sequence]), torch.tensor([5, 6, 7]), torch.tensor([2]))
    kv.free([sequence])
