"""K/V of a model are found only by the same model, and only if they depend on nothing but the tokens."""

from __future__ import annotations

import copy
import gc
import re
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_argument import CACHE, cache_of, cached
from each_row import each_row
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache, install, model_keys, uninstall

PROMPT = torch.tensor([[5, 9, 23, 61, 7, 44, 8, 33, 12, 71, 3, 90, 14]])
NUM_CACHED = 12  # tokens in full blocks of 4


# The prefix-cache hits of the last generation, in tokens.
num_found: list[int] = []


def generate(model: Any, kv: Any, prompt: torch.Tensor = PROMPT, **options: Any) -> torch.Tensor:
    """Return the prompt and 8 generated tokens. Sets `num_found`."""
    with KVServiceCache(kv, **options) as cache:
        tokens: torch.Tensor = model.generate(prompt, max_new_tokens=8, do_sample=False, **cached(cache))
        num_found[:] = [sequence.num_cached_tokens for sequence in cache.sequences if sequence is not None]
        return tokens


def generate_alone(model: Any, prompt: torch.Tensor = PROMPT) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(prompt, max_new_tokens=8, do_sample=False)
    return tokens


class Adapted(nn.Module):
    """A layer like PEFT's replacement of a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora = nn.Linear(base.in_features, base.out_features, bias=False)
        nn.init.ones_(self.lora.weight)
        self.scaling = {"default": 1.0}
        self.merged_adapters: list[str] = []
        self._active_adapter = "default"
        self._disable_adapters = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.base_layer(hidden)
        return output if self._disable_adapters else output + self.scaling["default"] * self.lora(hidden)


def weight_of(model: PreTrainedModel) -> nn.Parameter:
    return model.model.layers[0].self_attn.k_proj.weight


def optimize(model: PreTrainedModel) -> None:
    weight_of(model).grad = torch.ones_like(weight_of(model))
    torch.optim.AdamW([weight_of(model)], lr=0.5).step()


def write_data_in_place(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.flip(0))


def write_behind_torch(model: PreTrainedModel) -> None:
    weight_of(model).detach().numpy()[:] *= -1


def replace_memory(model: PreTrainedModel) -> None:
    weight_of(model).data = -weight_of(model).data


def replace_parameter(model: PreTrainedModel) -> None:
    model.model.layers[0].self_attn.k_proj.weight = nn.Parameter(-weight_of(model))


def replace_layer(model: PreTrainedModel) -> None:
    model.model.layers[0] = copy.deepcopy(model.model.layers[0])
    model.model.layers[0].self_attn.k_proj.weight.neg_()


def load(model: PreTrainedModel) -> None:
    model.load_state_dict({name: tensor.flip(0) for name, tensor in model.state_dict().items()})


def change_in_inference_mode(model: PreTrainedModel) -> None:
    with torch.inference_mode():
        weight_of(model).neg_()


def add_adapter(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.k_proj = Adapted(attention.k_proj)
    attention.k_proj._disable_adapters = False


CHANGES = [
    optimize,
    write_data_in_place,
    write_behind_torch,
    replace_memory,
    replace_parameter,
    replace_layer,
    load,
    change_in_inference_mode,
    add_adapter,
]


def test_two_models_of_one_shape_find_nothing_of_each_other(llama, make_pair) -> None:
    kv = llama.new_session()
    other = make_pair("llama")
    for parameter in (*other.model.parameters(), *other.reference.parameters()):
        parameter.copy_(parameter.flip(0))
    for pair, expected in ((llama, 0), (other, 0), (llama, NUM_CACHED), (other, NUM_CACHED)):
        assert torch.equal(generate(pair.model, kv), generate_alone(pair.reference))
        assert num_found == [expected]
    assert not torch.equal(generate_alone(llama.reference), generate_alone(other.reference))


def test_weights_that_change_between_generations(make_pair) -> None:
    with each_row() as row:
        for change in CHANGES:
            with row(change.__name__):
                pair = make_pair("llama")
                kv = pair.new_session()
                before = generate(pair.model, kv)
                change(pair.model)
                change(pair.reference)
                after = generate(pair.model, kv)
                assert num_found == [0]
                assert torch.equal(after, generate_alone(pair.reference))
                assert not torch.equal(after, before)


def test_adapters_that_are_switched_and_scaled(llama) -> None:
    kv = llama.new_session()
    add_adapter(llama.model)
    add_adapter(llama.reference)
    seen = []
    for state in ({"_disable_adapters": True}, {"_disable_adapters": False}, {"scaling": {"default": 3.0}}):
        for model in (llama.model, llama.reference):
            vars(model.model.layers[0].self_attn.k_proj).update(copy.deepcopy(state))
        seen.append(generate(llama.model, kv))
        assert num_found == [0]
        assert torch.equal(seen[-1], generate_alone(llama.reference))
    assert len({tuple(tokens[0].tolist()) for tokens in seen}) == 3
    llama.model.model.layers[0].self_attn.k_proj.scaling["default"] = 1.0
    generate(llama.model, kv)
    assert num_found == [NUM_CACHED], "as it was in the second generation"


def test_functional_calls_with_other_weights(llama) -> None:
    kv = llama.new_session()
    generate(llama.model, kv)
    others = {name: parameter.flip(0) for name, parameter in llama.reference.named_parameters()}
    arguments = {CACHE: KVServiceCache(kv), "logits_to_keep": 1}
    actual = torch.func.functional_call(llama.model, others, (PROMPT,), arguments).logits
    expected = torch.func.functional_call(llama.reference, others, (PROMPT,), {"logits_to_keep": 1}).logits
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


def test_a_cache_is_not_continued_with_other_weights(llama) -> None:
    kv = llama.new_session()
    cache, private = KVServiceCache(kv), KVServiceCache(kv, share=False)
    token = torch.tensor([[17]])
    for one in (cache, private):
        llama.model(PROMPT, **cached(one))
    library = cache_of(llama.reference(PROMPT, use_cache=True))
    weight_of(llama.model).neg_()
    weight_of(llama.reference).neg_()
    with pytest.raises(FailedPreconditionError, match=r"weights have changed.*reset\(\)"):
        llama.model(token, **cached(cache))
    assert cache.get_seq_length() == 13
    expected = llama.reference(token, **cached(library)).logits
    torch.testing.assert_close(llama.model(token, **cached(private)).logits, expected, atol=1e-3, rtol=0)
    cache.reset()
    llama.model(PROMPT, **cached(cache))


def test_nothing_is_shared_if_the_caller_says_so(llama) -> None:
    kv = llama.new_session()
    every: tuple[dict[str, Any], ...] = ({}, {"share": False}, {"share": False})
    for options in every:
        assert torch.equal(generate(llama.model, kv, **options), generate_alone(llama.reference))
        assert num_found == [0]


def test_extra_keys_keep_prefixes_apart(llama) -> None:
    kv = llama.new_session()
    tenants = [[(0, b"one")], [(0, b"two")], [(5, b"two")]]
    # A key belongs to the block of its position, so the third shares its first block with the sequence without keys.
    for keys, expected in zip([*tenants, *tenants, []], [0, 0, 0, NUM_CACHED, NUM_CACHED, NUM_CACHED, 4], strict=True):
        assert torch.equal(generate(llama.model, kv, extra_keys=keys), generate_alone(llama.reference))
        assert num_found == [expected]


def test_refuses_extra_keys_that_are_none(llama) -> None:
    rows: list[Any] = [[b"one"], [(0, "one")], [("0", b"one")], [(0, b"one", 2)]]
    for keys in rows:
        with pytest.raises(InvalidArgumentError) as refused:
            KVServiceCache(llama.new_session(), extra_keys=keys)
        assert refused.value.field == "extra_keys", keys


LEFT_PADDED = {
    "input_ids": torch.cat([torch.zeros(1, 3, dtype=torch.long), PROMPT], 1),
    "attention_mask": torch.tensor([[0] * 3 + [1] * 13]),
}
UNUSUAL_INPUTS: list[tuple[str, dict[str, torch.Tensor], str]] = [
    ("llama", {"input_ids": PROMPT, "position_ids": torch.arange(13)[None] + 5}, "positions"),
    ("llama", LEFT_PADDED, "positions"),
    ("gpt2", LEFT_PADDED, "positions"),
    ("gpt2", {"input_ids": PROMPT, "token_type_ids": torch.full((1, 13), 4)}, "token_type_ids"),
]


def assert_unusual_inputs_share_nothing(
    pair: Any, inputs: dict[str, torch.Tensor], reason: str, *, unusual_first: bool
) -> None:
    kv = pair.new_session()

    def unusual() -> None:
        with KVServiceCache(kv) as cache:
            logits = pair.model(**inputs, logits_to_keep=1, **cached(cache)).logits
            assert reason in cache.private_because
            (sequence,) = cache.sequences
            assert sequence is not None
            assert sequence.num_cached_tokens == 0
        torch.testing.assert_close(logits, pair.reference(**inputs, logits_to_keep=1).logits, atol=1e-3, rtol=0)

    def usual() -> None:
        assert torch.equal(generate(pair.model, kv), generate_alone(pair.reference))
        assert num_found == [0]

    for run in (unusual, usual) if unusual_first else (usual, unusual):
        run()


def test_unusual_inputs_share_nothing(make_pair) -> None:
    with each_row() as row:
        for family, inputs, reason in UNUSUAL_INPUTS:
            pair = make_pair(family)
            for unusual_first in (True, False):
                with row((family, reason, unusual_first)):
                    assert_unusual_inputs_share_nothing(pair, inputs, reason, unusual_first=unusual_first)


def test_a_shared_cache_is_not_continued_with_unusual_inputs(llama) -> None:
    cache = KVServiceCache(llama.new_session())
    llama.model(PROMPT, **cached(cache))
    token, position = torch.tensor([[17]]), torch.tensor([[20]])
    with pytest.raises(FailedPreconditionError, match=r"positions.*share=False"):
        llama.model(token, position_ids=position, **cached(cache))
    (sequence,) = cache.sequences
    assert sequence is not None
    assert (cache.get_seq_length(), sequence.length, cache.private_because) == (13, 13, "")


def test_hooks_that_may_steer_share_nothing(llama) -> None:
    kv = llama.new_session()
    plain = generate(llama.model, kv)
    for model in (llama.model, llama.reference):
        model.model.layers[0].register_forward_hook(lambda _module, _args, output: output * 0.3)
    assert torch.equal(generate(llama.model, kv), generate_alone(llama.reference))
    assert num_found == [0]
    assert not torch.equal(generate_alone(llama.reference), plain)


def test_hooks_of_the_library_only_record(llama) -> None:
    kv = llama.new_session()
    llama.model(PROMPT, output_hidden_states=True, **cached(KVServiceCache(kv)))
    generate(llama.model, kv)
    assert num_found == [NUM_CACHED]


def test_a_copy_of_an_installed_model_is_an_installed_model_of_its_own(make_pair) -> None:
    for family in ("llama", "bloom"):
        pair = make_pair(family)
        kv = pair.new_session()
        generate(pair.model, kv)
        twin, expected = copy.deepcopy(pair.model), copy.deepcopy(pair.reference)
        for model in (twin, expected):
            for parameter in model.parameters():
                parameter.copy_(parameter.flip(0))
        for model in (twin, install(twin)):
            assert torch.equal(generate(model, kv), generate_alone(expected)), family
        assert torch.equal(generate(pair.model, kv), generate_alone(pair.reference)), family
        assert torch.equal(generate_alone(uninstall(twin)), generate_alone(expected)), family


def test_a_model_that_nobody_holds_is_collected(llama) -> None:
    model = install(copy.deepcopy(llama.reference))
    generate(model, llama.new_session())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_that_is_loaded_again_finds_what_was_computed(llama, tmp_path) -> None:
    kv = llama.new_session()
    llama.reference.save_pretrained(tmp_path)
    tokens = generate(llama.model, kv)
    loaded = install(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert torch.equal(generate(loaded, kv), tokens)
    assert num_found == [NUM_CACHED]


@pytest.mark.slow
def test_the_same_model_in_another_process_finds_what_this_one_computed(llama, tmp_path) -> None:
    kv = llama.new_session()
    llama.reference.save_pretrained(tmp_path)
    generate(llama.model, kv)
    program = (
        "import sys, transformers; from kvservice.integrations.transformers import install, model_keys;"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]);"
        "[(position, key)] = model_keys(install(model)); print(position, key.hex())"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program, tmp_path], capture_output=True, text=True, check=True)
    position, key = done.stdout.split()
    assert kv.match_prefix(PROMPT[0].tolist(), [(int(position), bytes.fromhex(key))]) == NUM_CACHED
    assert model_keys(llama.model) == [(int(position), bytes.fromhex(key))]


def test_a_change_that_raises_no_version_is_noticed_before_a_prompt(llama) -> None:
    before = model_keys(llama.model)
    row = llama.model.model.embed_tokens.weight.data[1]
    row[1] += 1
    changed = model_keys(llama.model)
    llama.model.model.layers[0].self_attn.scaling *= 2
    assert len({str(keys) for keys in (before, changed, model_keys(llama.model))}) == 3
    llama.model.model.layers[0].self_attn.scaling /= 2
    assert model_keys(llama.model) == changed


# A model class as users write them, in a module of its own.
STEERED = """
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

SCALES = {"scale": 2.0}

def scaled(states):  # a helper
    return states * SCALES["scale"]

class Steered(LlamaMLP):
    shift = 0.5

    def forward(self, hidden):
        return scaled(super().forward(hidden)) + self.shift
"""


def loaded(source: str) -> types.ModuleType:
    module = types.ModuleType("steered_model")
    exec(source, vars(module))
    return module


def steer(model: Any, module: types.ModuleType) -> None:
    """Let the first layer have an MLP of the module's class."""
    model.model.layers[0].mlp.__class__ = module.Steered


def patch_forward(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    scale = -5.0
    mlp.forward = types.MethodType(lambda self, hidden: type(self).forward(self, hidden) * scale, mlp)


def put_an_attribute(model: Any) -> None:
    model.model.layers[0].mlp._scales = [1.0, {"two": (2.0,)}]


def change_an_attribute_in_place(model: Any) -> None:
    model.model.layers[0].mlp._scales[1]["two"] = (3.0,)


def test_code_and_attributes_of_modules_are_part_of_the_key(make_pair) -> None:
    """Each change is noticed in the running process, and what was computed before it is found again after its end."""
    pair = make_pair("llama")
    kv, module = pair.new_session(), loaded(STEERED)
    kinds = [type(model.model.layers[0].mlp) for model in (pair.model, pair.reference)]

    def without_anything(model: Any) -> None:
        vars(model.model.layers[0].mlp).pop("forward", None)
        vars(model.model.layers[0].mlp).pop("_scales", None)
        model.model.layers[0].mlp.__class__ = kinds[0]

    changes: list[Callable[[Any], None]] = [
        patch_forward,
        without_anything,
        put_an_attribute,
        change_an_attribute_in_place,
        without_anything,
        lambda model: steer(model, module),
        lambda _: module.SCALES.update(scale=-9.0),
        lambda _: setattr(module.Steered, "shift", 7.0),
        lambda _: setattr(module, "scaled", lambda states: states.flip(-1)),
        lambda _: setattr(module.Steered, "forward", lambda self, hidden: kinds[0].forward(self, hidden) * -1),
    ]
    seen = [generate(pair.model, kv)]
    with each_row() as row:
        for number, change in enumerate(changes):
            with row((number, change)):
                change(pair.model)
                change(pair.reference)
                seen.append(generate(pair.model, kv))
                assert num_found == [NUM_CACHED if change is without_anything else 0]
                assert torch.equal(seen[-1], generate_alone(pair.reference))
    assert len({tuple(tokens[0].tolist()) for tokens in seen}) > 4, "most changes have an effect"


def test_a_class_that_is_edited_between_two_runs_has_another_key(llama) -> None:
    edits = [
        ("* SCALES", "/ SCALES"),
        ('"scale": 2.0', '"scale": 3.0'),
        ("shift = 0.5", "shift = 1.5"),
        ("super().forward(hidden)", "super().forward(-hidden)"),
    ]

    def key_of(source: str) -> str:
        steer(llama.model, loaded(source))
        return str(model_keys(llama.model))

    assert key_of(STEERED) == key_of(f"# A comment\n{STEERED}")
    assert len({key_of(STEERED.replace(*edit)) for edit in [("", ""), *edits]}) == len(edits) + 1


def test_patches_of_the_librarys_classes_are_part_of_the_key(llama, monkeypatch) -> None:
    before = model_keys(llama.model)
    for kind in (type(llama.model.model.layers[0].mlp), nn.Linear, type(llama.model.model.norm)):
        original: Any = kind.forward
        with monkeypatch.context() as patched:
            patched.setattr(kind, "forward", lambda self, hidden, original=original: original(self, hidden) * 2)
            assert model_keys(llama.model) != before, kind
        assert model_keys(llama.model) == before, kind


class Vector:
    """A control vector beside the model."""

    def __init__(self) -> None:
        self.direction = torch.ones(1)


def test_values_that_cannot_be_known_are_not_shared(make_pair) -> None:
    kv = make_pair("llama").new_session()
    vector = Vector()

    def patch(mlp: Any) -> None:
        mlp.forward = lambda hidden: type(mlp).forward(mlp, hidden) + vector.direction

    places: list[tuple[Callable[[Any], None], str]] = [
        (patch, "Vector"),
        (lambda mlp: setattr(mlp, "_control", vector), r"model\.layers\.0\.mlp\._control is a Vector"),
        (lambda mlp: setattr(mlp, "controls", {"one": [torch.ones(1)]}), r"mlp\.controls is a Tensor"),
        (lambda mlp: setattr(mlp, "hidden", [nn.Linear(2, 2)]), r"mlp\.hidden is a Linear"),
    ]
    with each_row() as row:
        for put, reason in places:
            pair = make_pair("llama")
            with row(reason):
                for _ in range(2):
                    generate(pair.model, kv)
                    put(pair.model.model.layers[0].mlp)
                put(pair.reference.model.layers[0].mlp)
                with KVServiceCache(kv) as cache:
                    pair.model(PROMPT, **cached(cache))
                    assert re.search(f"{reason}.*, whose values the key does not cover", cache.private_because)
                assert torch.equal(generate(pair.model, kv), generate_alone(pair.reference))
                assert num_found == [0]
