"""Compiled layers give the library's logits, and share their code."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from causal_lms import CASES, make_config, make_model
from random_steps import assert_random_steps_equal
from torch._dynamo.testing import CompileCounter

from kvservice.engines.compiled import CompiledLayers
from kvservice.engines.runner import ModelRunner
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import model_keys

pytestmark = pytest.mark.filterwarnings("ignore")  # Tiny random models cause many warnings of the library.


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "gemma2", "bloom"])
def test_compiled_layers_give_the_librarys_logits(family: str, session_for: Any) -> None:
    case = CASES[family]
    # aot_eager traces as inductor does, but does not generate code.
    assert_random_steps_equal(case, session_for(case), seed=5, compiled=True, backend="aot_eager")


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_generated_code_gives_the_librarys_logits(session_for: Any) -> None:
    case = CASES["llama"]
    assert_random_steps_equal(case, session_for(case), seed=6, compiled=True)


def test_layers_and_steps_of_all_sizes_share_one_graph(session_for: Any) -> None:
    """There is a second graph for a step of one token, a size that torch never makes symbolic."""
    case = CASES["llama"]
    counter = CompileCounter()
    assert_random_steps_equal(case, session_for(case), seed=7, compiled=True, backend=counter)
    assert counter.frame_count <= 2


def test_the_model_itself_is_not_compiled() -> None:
    layers = (model := make_model(make_config(CASES["llama"]))).model.layers
    layers[1].compile(backend="eager")  # by the caller
    before = [layer._compiled_call_impl for layer in layers]
    with CompiledLayers(model, "eager").in_use():
        assert not {None, *before} & {layer._compiled_call_impl for layer in layers}
    assert [layer._compiled_call_impl for layer in layers] == before


def test_a_new_runner_finds_the_compiled_code(session_for: Any) -> None:
    """An engine that reconnects makes a new runner of the same model."""
    case, counter = CASES["llama"], CompileCounter()
    model = make_model(make_config(case))
    kv = session_for(case)
    for _ in range(2):
        runner = ModelRunner(model, kv, compiled=True, backend=counter)
        sequence = kv.allocate([5, 6, 7], extra_keys=model_keys(model))
        runner.run(kv.open_step([sequence]), torch.tensor([5, 6, 7]), torch.tensor([2]))
        kv.free([sequence])
        kv.reset_prefix_cache()
    assert counter.frame_count == 1


def test_refuses_a_model_without_a_list_of_layers() -> None:
    model = make_model(make_config(CASES["llama"]))
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(InvalidArgumentError) as refused:
        CompiledLayers(model, "eager")
    assert refused.value.field == "compiled"
