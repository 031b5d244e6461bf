"""Compiled layers give the library's logits, share their code, and never use stale weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from causal_lms import CASES, make_config, make_model
from each_row import each_row
from random_steps import assert_random_steps_equal
from todays_part import ENTRIES

from kvservice.client import Session
from kvservice.engines import ModelRunner
from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import model_keys

pytestmark = pytest.mark.filterwarnings("ignore")  # Tiny random models cause many warnings of the library.


class Graphs:
    """A backend of torch.compile that runs graphs as they are, and counts graphs and calls."""

    def __init__(self) -> None:
        self.num_graphs = self.num_calls = 0

    def __call__(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.num_graphs += 1

        def run(*inputs: Any) -> Any:
            self.num_calls += 1
            return module(*inputs)

        return run


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def logits_of(runner: ModelRunner, kv: Session, token_ids: list[int]) -> torch.Tensor:
    """Compute a prompt that is found nowhere."""
    kv.reset_prefix_cache()
    sequence = kv.allocate(token_ids, extra_keys=model_keys(runner.model))
    rows = torch.arange(len(token_ids))
    found = runner.run(kv.open_step([sequence]), torch.tensor(token_ids), rows)
    kv.free([sequence])
    return found


@pytest.mark.slow
def test_compiled_layers_give_the_librarys_logits(session_for: Any) -> None:
    """A run tries a third of the families."""
    with each_row() as row:
        for family in ("llama", "gemma2", "bloom", "qwen2")[ENTRIES]:
            torch.compiler.reset()
            with row(family):
                # aot_eager traces as inductor does, but does not generate code.
                assert_random_steps_equal(
                    CASES[family], session_for(CASES[family]), seed=5, compiled=True, backend="aot_eager"
                )


@pytest.mark.slow
@pytest.mark.third
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_generated_code_gives_the_librarys_logits(session_for: Any) -> None:
    case = CASES["llama"]
    assert_random_steps_equal(case, session_for(case), seed=6, compiled=True)


@pytest.mark.slow
def test_layers_and_steps_of_all_sizes_share_one_graph(session_for: Any) -> None:
    """There is a second graph for a step of one token, a size that torch never makes symbolic."""
    case, graphs = CASES["llama"], Graphs()
    assert_random_steps_equal(case, session_for(case), seed=7, compiled=True, backend=graphs)
    assert graphs.num_graphs <= 2


@pytest.mark.slow
def test_the_model_itself_is_not_compiled(session_for: Any) -> None:
    """Functions that the caller has compiled stay compiled."""
    kv, of_caller, of_runner = session_for(CASES["llama"]), Graphs(), Graphs()
    model: Any = make_model(make_config(CASES["llama"]))
    model.model.layers[1].compile(backend=of_caller)
    compiled, plain = ModelRunner(model, kv, compiled=True, backend=of_runner), ModelRunner(model, kv)
    expected = logits_of(plain, kv, [5, 6, 7])
    calls = (of_caller.num_calls, of_runner.num_calls)
    assert calls[0] > 0
    assert calls[1] == 0
    torch.testing.assert_close(logits_of(compiled, kv, [5, 6, 7]), expected, atol=1e-4, rtol=0)
    assert of_caller.num_calls == calls[0]
    num_calls = of_runner.num_calls
    assert num_calls >= 4, "each layer"
    torch.testing.assert_close(logits_of(plain, kv, [5, 6, 7]), expected, atol=1e-4, rtol=0)
    assert of_caller.num_calls == 2 * calls[0]
    assert of_runner.num_calls == num_calls


@pytest.mark.slow
def test_a_new_runner_finds_the_compiled_code(session_for: Any) -> None:
    """An engine that reconnects makes a new runner of the same model."""
    case, graphs = CASES["llama"], Graphs()
    model, kv = make_model(make_config(case)), session_for(case)
    for _ in range(2):
        logits_of(ModelRunner(model, kv, compiled=True, backend=graphs), kv, [5, 6, 7])
    assert graphs.num_graphs == 1


def test_refuses_a_model_without_a_list_of_layers(kv: Session) -> None:
    model: Any = make_model(make_config(CASES["llama"]))
    model.model.layers = torch.nn.Sequential(*model.model.layers)
    with pytest.raises(InvalidArgumentError) as refused:
        ModelRunner(model, kv, compiled=True, backend="eager")
    assert refused.value.field == "compiled"


class OfABuffer(torch.nn.Module):
    """A linear layer whose weight is no parameter. Only parameters have copies."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach().clone())

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight: Any = self.weight
        return torch.nn.functional.linear(hidden, weight)


@pytest.mark.slow
def test_changed_weights_are_used(kv: Session) -> None:
    """On the CPU, the linear layers of the graph have copies of their weights."""
    model: Any = make_model(make_config(CASES["llama"]))
    compiled, plain = ModelRunner(model, kv, compiled=True, backend="eager"), ModelRunner(model, kv)
    weight = model.model.layers[1].mlp.down_proj.weight
    buffer = OfABuffer(model.model.layers[0].mlp.up_proj.weight)
    model.model.layers[0].mlp.up_proj = buffer

    def negate() -> None:
        weight.neg_()

    def double_without_a_version() -> None:
        weight.data.mul_(2)

    def replace_memory() -> None:
        weight.data = -weight.data

    def change_buffer() -> None:
        buffer.weight.data.mul_(3)  # type: ignore[operator]

    def hook() -> None:
        """The model has no key any more, so there are no copies."""
        model.model.layers[0].register_forward_hook(lambda _module, _args, output: output * 0.5)

    before = None
    for change in (lambda: None, negate, double_without_a_version, replace_memory, change_buffer, hook):
        with torch.no_grad():
            change()
        expected = logits_of(plain, kv, [5, 6, 7])
        torch.testing.assert_close(logits_of(compiled, kv, [5, 6, 7]), expected, atol=1e-4, rtol=0)
        assert before is None or not torch.allclose(before, expected, atol=1e-2)
        before = expected
