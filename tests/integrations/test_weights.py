"""The digest of a model's tensors: it is that of their values, and follows every change that can be known."""

from __future__ import annotations

import pytest
import torch

from kvservice.integrations.transformers.keys import identify
from kvservice.integrations.transformers.weights import Weights, can_digest

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.bool]


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(600).reshape(20, 30).remainder(7).to(dtype)


def digest(tensors: dict[str, torch.Tensor]) -> bytes:
    weights = Weights()
    weights.track(tensors)
    return weights.digest()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_values_have_equal_digests_wherever_they_lie(dtype: torch.dtype) -> None:
    placed = {
        "as made": values(dtype),
        "transposed": values(dtype).T.contiguous().T,
        "part of more": torch.stack([values(dtype), values(dtype)], 2)[:, :, 1],
        "odd offset": torch.cat([values(dtype).flatten()[:1], values(dtype).flatten()])[1:].reshape(20, 30),
    }
    assert len({digest({"weight": tensor}) for tensor in placed.values()}) == 1


def test_names_shapes_dtypes_and_each_value_count() -> None:
    others = [
        {"weight": values()},
        {"bias": values()},
        {"weight": values().reshape(30, 20)},
        {"weight": values().to(torch.int32)},
        {"weight": values(), "empty": torch.zeros(0), "one": torch.tensor(3.0)},
        {"weight": values(), "empty": torch.zeros(0), "one": torch.tensor(4.0)},
        *(
            {"weight": values().index_put_((torch.tensor(i), torch.tensor(j)), torch.tensor(9.0))}
            for i, j in [(0, 0), (13, 17)]
        ),
    ]
    assert len({digest(tensors) for tensors in others}) == len(others)


@pytest.mark.parametrize("other", [-1.0, float("nan")])
def test_a_change_is_followed_and_back(other: float) -> None:
    tensors = {name: torch.nn.Parameter(values()) for name in ("one", "two")}
    weights = Weights()
    weights.track(tensors)
    first = weights.digest()
    assert weights.unchanged(thorough=True)
    with torch.no_grad():
        tensors["two"][3, 4] = other
        assert not weights.unchanged(thorough=False)
        changed = weights.digest()
        assert changed == digest(tensors) != first
        assert weights.unchanged(thorough=True)
        tensors["two"].copy_(values())
    assert weights.digest() == first


def test_changes_that_raise_no_version_are_found_in_samples() -> None:
    with torch.inference_mode():
        tensors = {"one": values(), "two": values()}
    weights = Weights()
    weights.track(tensors)
    weights.digest()
    with torch.inference_mode():
        tensors["two"].neg_()
    assert weights.unchanged(thorough=False)
    assert not weights.unchanged(thorough=True)
    assert weights.digest() == digest(tensors)


def test_only_what_changed_is_hashed_again(monkeypatch) -> None:
    hashed: list[int] = []
    hash_bytes = "kvservice.integrations.transformers.weights._hash_bytes"
    monkeypatch.setattr(hash_bytes, lambda tensor: (hashed.append(len(tensor)), b"")[1])
    tensors = {str(size): torch.zeros(size) for size in (3, 4, 5)}
    weights = Weights()
    weights.track(tensors)
    weights.digest()
    tensors["4"].add_(1)
    weights.digest()
    weights.track(tensors | {"6": torch.zeros(6)})
    weights.digest()
    assert sorted(hashed[:3]) == [3, 4, 5]
    assert hashed[3:] == [4, 6]


class Scaled(torch.Tensor):
    """What quantization libraries do: a class with scales beside its values."""


@pytest.mark.parametrize(
    "tensor",
    [values().as_subclass(Scaled), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()],
    ids=["subclass", "meta", "sparse"],
)
def test_tensors_that_are_more_than_their_bytes_are_not_digested(llama, tensor: torch.Tensor) -> None:
    assert can_digest(values())
    assert not can_digest(tensor)
    llama.model.model.layers[0].register_buffer("scales", tensor)
    assert identify(llama.model).private_because.startswith("model.layers.0.scales is a ")


class Packed(torch.nn.Module):
    def get_extra_state(self) -> bytes:
        return b"weights"


def test_modules_that_keep_weights_elsewhere_are_not_shared(llama) -> None:
    assert identify(llama.model).private_because == ""
    llama.model.model.layers[0].mlp.packed = Packed()
    assert identify(llama.model).private_because == "Packed keeps weights outside of its parameters and buffers"
