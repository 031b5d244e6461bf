"""Linear layers with blocked copies of the weights: equal to torch's, and never stale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from causal_lms import CASES, make_config, make_model
from torch.nn.functional import linear

from kvservice.engines.blocked_linear import BlockedWeights, blocked_linear
from kvservice.engines.runner import ModelRunner
from kvservice.integrations.transformers import install, model_keys

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def llama() -> Any:
    return install(make_model(make_config(CASES["llama"])))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The copies with which products are computed."""
    copies: list[torch.Tensor] = []
    copy_of = BlockedWeights.copy_of

    def recording(self: BlockedWeights, weight: torch.Tensor) -> torch.Tensor | None:
        if (copy := copy_of(self, weight)) is not None:
            copies.append(copy)
        return copy

    monkeypatch.setattr(BlockedWeights, "copy_of", recording)
    return copies


@pytest.mark.parametrize("num_rows", [0, 1, 7, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_is_torchs_linear(num_rows: int, has_bias: bool, llama: Any, products: list[torch.Tensor]) -> None:
    weight = llama.model.layers[0].mlp.gate_proj.weight
    bias = torch.randn(weight.shape[0]) if has_bias else None
    inputs = torch.randn(1, num_rows, weight.shape[1])
    with BlockedWeights(llama).in_use():
        output = blocked_linear(inputs, weight, bias)
    torch.testing.assert_close(output, linear(inputs, weight, bias))
    assert len(products) == min(num_rows, 1)


def test_only_parameters_have_copies(llama: Any, products: list[torch.Tensor]) -> None:
    """The memory of other tensors may have other values later, at the same address."""
    weight = llama.model.layers[0].mlp.gate_proj.weight
    inputs = torch.randn(3, weight.shape[1])
    with BlockedWeights(llama).in_use():
        for other in (weight.clone(), weight[:8]):
            torch.testing.assert_close(blocked_linear(inputs, other, None), linear(inputs, other))
    assert products == []


def test_a_model_without_a_key_has_no_copies(llama: Any, products: list[torch.Tensor]) -> None:
    weight = llama.model.layers[0].mlp.gate_proj.weight
    llama.model.layers[0].register_forward_hook(lambda *_: None)  # may change what the model computes
    with BlockedWeights(llama).in_use():
        blocked_linear(torch.randn(3, weight.shape[1]), weight, None)
    assert products == []


def test_changed_weights_are_used(session_for: Any, llama: Any, products: list[torch.Tensor]) -> None:
    kv = session_for(CASES["llama"])
    runner = ModelRunner(llama, kv, compiled=True, backend="eager")
    weight = llama.model.layers[1].mlp.down_proj.weight

    def logits() -> torch.Tensor:
        sequence = kv.allocate([5, 6, 7], extra_keys=model_keys(llama))
        found = runner.run(kv.open_step([sequence]), torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2]))
        kv.free([sequence])
        kv.reset_prefix_cache()
        return found

    def assert_as_the_layers_themselves() -> None:
        found = logits()
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(found, logits(), atol=1e-4, rtol=0)

    assert_as_the_layers_themselves()
    assert products, "the linear layers of the graph have copies"
    weight.neg_()
    assert_as_the_layers_themselves()
    weight.data.mul_(2)  # does not raise the version of the weight
    assert_as_the_layers_themselves()
    weight.data = -weight.data
    assert_as_the_layers_themselves()
