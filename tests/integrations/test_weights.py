"""The digest of a model's tensors: it depends on their values and follows every detectable change."""

from __future__ import annotations

import random

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
    tensors: dict[str, torch.Tensor] = {name: torch.nn.Parameter(values()) for name in ("one", "two")}
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


SHAPES = {
    "embedding": (1500, 96),
    "projection": (257, 640),
    "bias": (17,),
    "less than a word": (3,),
    "scalar": (),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_change_of_any_element_that_raises_no_version_is_found(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rng = random.Random(0)
    for place in (lambda tensor: tensor, _transposed, _at_odd_offset, _part_of_more):
        tensor = place(torch.zeros(shape).to(dtype))
        weights = Weights()
        weights.track({"other": torch.ones(3), "weight": tensor})
        before = weights.digest()
        for _ in range(5):
            index = tuple(rng.randrange(size) for size in shape)
            tensor.data[index] = 1
            assert weights.unchanged(thorough=False)
            assert not weights.unchanged(thorough=True)
            assert weights.digest() == digest({"other": torch.ones(3), "weight": tensor}) != before
            assert weights.unchanged(thorough=True)
            tensor.data[index] = 0
            assert weights.digest() == before


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def _at_odd_offset(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    return torch.cat([flat[:1], flat])[1:].reshape(tensor.shape)


def _part_of_more(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 1]


@pytest.mark.parametrize("permuted", ["rows", "columns", "two rows"])
def test_elements_that_change_places_are_found(permuted: str) -> None:
    tensor = torch.randn(3000, 512, generator=torch.Generator().manual_seed(0))
    weights = Weights()
    weights.track({"weight": tensor})
    before = weights.digest()
    if permuted == "rows":
        tensor.data[:] = tensor.flip(0)
    elif permuted == "columns":
        tensor.data[:] = tensor.flip(1)
    else:
        tensor.data[[5, 2900]] = tensor[[2900, 5]]
    assert not weights.unchanged(thorough=True)
    assert weights.digest() != before


def test_changes_in_inference_mode_are_found() -> None:
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


def test_other_memory_is_noticed_and_its_changes_too() -> None:
    tensor = torch.zeros(2000)
    weights = Weights()
    weights.track({"weight": tensor})
    weights.digest()
    tensor.data = torch.ones(2000)
    assert not weights.unchanged(thorough=False)
    weights.digest()
    tensor.data[1234] = 5
    assert not weights.unchanged(thorough=True)


def test_only_what_changed_is_hashed_again(monkeypatch) -> None:
    hashed: list[int] = []
    hash_bytes = "kvservice.integrations.transformers.weights._hash_bytes"

    def count(tensor: torch.Tensor) -> bytes:
        hashed.append(len(tensor))
        return b""

    monkeypatch.setattr(hash_bytes, count)
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
    """A tensor class with scales beside its values, as in quantization libraries."""


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
