"""The key of a model depends on the values of its tensors and follows every change that can be noticed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_argument import cached
from each_row import each_row
from transformers import LlamaConfig, LlamaForCausalLM

from kvservice.integrations.transformers import KVServiceCache, install, model_keys

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.bool]


def values(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(600).reshape(20, 30).remainder(7).to(dtype)


@pytest.fixture(scope="module")
def tiny() -> Any:
    """An installed model. Its buffers that a test adds count as its weights."""
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=64,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return install(LlamaForCausalLM(config).eval())


@pytest.fixture
def key(tiny: Any) -> Any:
    """Return the key of the model with these buffers besides its weights."""

    def key_of(tensors: dict[str, torch.Tensor]) -> bytes:
        tiny.model.extra = torch.nn.Module()
        for name, tensor in tensors.items():
            tiny.model.extra.register_buffer(name, tensor)
        return current_key(tiny)

    yield key_of
    del tiny.model.extra


def current_key(model: Any) -> bytes:
    ((_, key),) = model_keys(model)
    return key


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.clone()


def at_odd_offset(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    return torch.cat([flat[:1], flat])[1:].reshape(tensor.shape)


def part_of_more(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 1]


PLACES: list[Callable[[torch.Tensor], torch.Tensor]] = [as_it_is, transposed, at_odd_offset, part_of_more]


def test_equal_values_have_equal_keys_wherever_they_lie(key) -> None:
    for dtype in DTYPES:
        assert len({key({"weight": place(values(dtype))}) for place in PLACES}) == 1, dtype


def test_names_shapes_dtypes_and_each_value_count(key) -> None:
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
    assert len({key(tensors) for tensors in others}) == len(others)


def test_a_change_is_followed_and_back(tiny, key) -> None:
    for other in (-1.0, float("nan")):
        tensors = {name: values() for name in ("one", "two")}
        first = key(tensors)
        tensors["two"][3, 4] = other
        changed = current_key(tiny)
        assert changed != first
        assert changed == current_key(tiny)
        tensors["two"].copy_(values())
        assert current_key(tiny) == first


SHAPES = {
    "embedding": (1500, 96),
    "projection": (257, 640),
    "bias": (17,),
    "less_than_a_word": (3,),
    "scalar": (),
}


def test_a_change_of_any_element_that_raises_no_version_is_found(tiny, key) -> None:
    rng = random.Random(0)
    with each_row() as row:
        for dtype in DTYPES:
            tensors = {
                f"{name}_{place.__name__}": place(torch.zeros(shape).to(dtype))
                for name, shape in SHAPES.items()
                for place in PLACES
            }
            before, seen = key(tensors), set()
            for name, tensor in tensors.items():
                for _ in range(2):
                    index = tuple(rng.randrange(size) for size in tensor.shape)
                    with row((dtype, name, index)):
                        tensor.data[index] = 1
                        seen.add(current_key(tiny))
                        tensor.data[index] = 0
                        assert current_key(tiny) == before
            with row((dtype, "keys")):
                assert before not in seen
                # The second change of a small tensor may be that of the first.
                assert len(seen) >= len(tensors)


def test_elements_that_change_places_are_found(tiny, key) -> None:
    def flip_rows(tensor: torch.Tensor) -> None:
        tensor.data[:] = tensor.flip(0)

    def flip_columns(tensor: torch.Tensor) -> None:
        tensor.data[:] = tensor.flip(1)

    def exchange_rows(tensor: torch.Tensor) -> None:
        tensor.data[[5, 2900]] = tensor[[2900, 5]]

    for permute in (flip_rows, flip_columns, exchange_rows):
        tensor = torch.randn(3000, 512, generator=torch.Generator().manual_seed(0))
        before = key({"weight": tensor})
        permute(tensor)
        assert current_key(tiny) != before, permute.__name__


def test_changes_in_inference_mode_are_found(tiny, key) -> None:
    with torch.inference_mode():
        tensors = {"one": values(), "two": values()}
    before = key(tensors)
    with torch.inference_mode():
        tensors["two"].neg_()
    changed = current_key(tiny)
    assert changed != before
    with torch.inference_mode():
        tensors["two"].neg_()
    assert current_key(tiny) == before


def test_other_memory_is_noticed_and_its_changes_too(tiny, key) -> None:
    tensor = torch.zeros(2000)
    keys = {key({"weight": tensor})}
    tensor.data = torch.ones(2000)
    keys.add(current_key(tiny))
    tensor.data[1234] = 5
    keys.add(current_key(tiny))
    assert len(keys) == 3


class Scaled(torch.Tensor):
    """A tensor class with scales beside its values, as in quantization libraries."""


class Packed(torch.nn.Module):
    def get_extra_state(self) -> bytes:
        return b"weights"


def private_because(pair: Any) -> str:
    with KVServiceCache(pair.new_session()) as cache:
        pair.model(torch.tensor([[1, 2, 3]]), **cached(cache))
        return cache.private_because


def test_tensors_that_are_more_than_their_bytes_are_not_shared(make_pair) -> None:
    tensors = [values().as_subclass(Scaled), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()]
    for tensor in tensors:
        pair = make_pair("llama")
        pair.model.model.layers[0].register_buffer("scales", tensor)
        assert private_because(pair).startswith("model.layers.0.scales is a ")
        assert model_keys(pair.model) != model_keys(pair.model)


def test_modules_that_keep_weights_elsewhere_are_not_shared(llama) -> None:
    assert private_because(llama) == ""
    llama.model.model.layers[0].mlp.packed = Packed()
    assert private_because(llama) == "Packed keeps weights outside of its parameters and buffers"
