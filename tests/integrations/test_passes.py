"""Every call of a model with a cache is a pass of that cache, or is refused before anything is stored."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_argument import CACHE, cache_of, cached
from each_row import each_row
from transformers import DynamicCache

from kvservice.client import KVClient, Sequence, Step
from kvservice.engines import ModelRunner
from kvservice.errors import FailedPreconditionError, InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache, forward, install, model_keys, uninstall

IDS = torch.arange(1, 25).reshape(2, 12)


def assert_refused(
    cache: KVServiceCache, error: type[BaseException], match: str | None, call: Callable[[], Any]
) -> None:
    """Check that the call raises, and that cache and session are unchanged."""
    before = cache.get_seq_length(), cache.sequences, cache.kv.describe()
    with pytest.raises(error, match=match):
        call()
    assert (cache.get_seq_length(), cache.sequences, cache.kv.describe()) == before


@pytest.fixture
def cache(llama) -> KVServiceCache:
    return KVServiceCache(llama.new_session())


def test_a_model_that_is_not_installed_is_refused(llama, cache) -> None:
    for implementation in ("eager", "sdpa"):
        llama.reference.set_attn_implementation(implementation)
        calls = {
            "generate": lambda: llama.reference.generate(IDS, max_new_tokens=3, **cached(cache)),
            "call": lambda: llama.reference(IDS, **cached(cache)),
            "positional": lambda: llama.reference.model.forward(IDS, None, None, cache),
        }
        for call in calls.values():
            assert_refused(cache, FailedPreconditionError, r"install\(model\) first", call)


def test_other_families_that_are_not_installed_are_refused(make_pair) -> None:
    with each_row() as row:
        for family in ("gpt2", "bloom", "gemma2"):
            with row(family):
                pair = make_pair(family)
                cache = KVServiceCache(pair.new_session())
                arguments = {"max_new_tokens": 3, **cached(cache)}
                generate = functools.partial(pair.reference.generate, IDS, **arguments)
                assert_refused(cache, FailedPreconditionError, r"install\(model\) first", generate)


def test_attention_that_was_changed_back_is_refused(llama, cache) -> None:
    llama.model.set_attn_implementation("sdpa")
    calls = {
        "call": lambda: llama.model(IDS, **cached(cache)),
        "forward": lambda: llama.model.forward(IDS, **cached(cache)),
        "generate": lambda: llama.model.generate(IDS, max_new_tokens=3, **cached(cache)),
    }
    for call in calls.values():
        assert_refused(cache, FailedPreconditionError, "changed to sdpa", call)
    install(llama.model)
    expected = llama.reference(IDS).logits
    torch.testing.assert_close(llama.model(IDS, **cached(cache)).logits, expected, atol=1e-3, rtol=0)
    own = uninstall(llama.model)
    torch.testing.assert_close(own(IDS).logits, expected, atol=1e-3, rtol=0)


def test_a_layer_whose_attention_was_changed_is_refused(make_pair) -> None:
    for layer in (0, 1):
        pair = make_pair("llama")
        cache = KVServiceCache(pair.new_session())
        attention = pair.model.model.layers[layer].self_attn
        attention.config = type(attention.config)(**attention.config.to_dict(), attn_implementation="eager")
        call = functools.partial(pair.model, IDS, **cached(cache))
        assert_refused(cache, FailedPreconditionError, "attention itself|sent 1 layers", call)


def test_a_part_of_the_model_is_refused(llama, cache) -> None:
    decoder, layer = llama.model.model, llama.model.model.layers[0]
    embedded = decoder.embed_tokens(IDS)
    rotary = decoder.rotary_emb(embedded, torch.arange(12)[None])
    calls = {
        "decoder": lambda: decoder(IDS, **cached(cache)),
        "layer": lambda: layer(embedded, **cached(cache), position_embeddings=rotary),
        "attention": lambda: layer.self_attn(embedded, rotary, None, cache),
    }
    for call in calls.values():
        assert_refused(cache, FailedPreconditionError, "do not call a part of the model", call)


def test_every_way_to_name_the_cache_is_a_pass(llama) -> None:
    expected = llama.reference(IDS).logits
    calls = {
        "by name": lambda cache: llama.model(input_ids=IDS, **cached(cache)),
        "positional": lambda cache: llama.model(IDS, None, None, cache),
        "forward": lambda cache: llama.model.forward(IDS, **cached(cache)),
    }
    for call in calls.values():
        cache = KVServiceCache(llama.new_session())
        torch.testing.assert_close(call(cache).logits, expected, atol=1e-3, rtol=0)
        assert cache.get_seq_length() == 12


@pytest.mark.slow
def test_compiled_code_calls_the_model_as_it_is(llama) -> None:
    ids = IDS[:1]
    expected = llama.reference(ids).logits
    for layer in llama.model.model.layers:
        layer.compile(backend="eager")
    for _ in range(2):
        llama.model.compile(backend="eager")
        cache = KVServiceCache(llama.new_session())
        prompt = llama.model(ids[:, :11], **cached(cache)).logits
        last = llama.model(ids[:, 11:], **cached(cache)).logits
        torch.testing.assert_close(torch.cat([prompt, last], 1), expected, atol=1e-3, rtol=0)


def test_refuses(llama, cache) -> None:
    rows: dict[str, tuple[dict[str, Any], type[BaseException], str]] = {
        "no cache": ({}, FailedPreconditionError, "got none"),
        "another cache": ({CACHE: DynamicCache()}, FailedPreconditionError, "got a DynamicCache"),
        "weights": ({"output_attentions": True}, InvalidArgumentError, "output_attentions"),
        "use_cache": ({"use_cache": False}, InvalidArgumentError, "use_cache"),
        "dict": (
            {"attention_mask": {"full_attention": torch.ones(2, 12)}},
            InvalidArgumentError,
            r"attention_mask.*not dict",
        ),
        "4 dimensions": ({"attention_mask": torch.ones(2, 1, 12, 12)}, InvalidArgumentError, "attention_mask"),
        "positions": (
            {"position_ids": torch.arange(5)[None]},
            InvalidArgumentError,
            "position_ids: must be a tensor of 12",
        ),
    }
    with each_row() as row:
        for name, (arguments, error, match) in rows.items():
            inputs = {CACHE: cache, **arguments} if arguments else {}
            with row(name):
                assert_refused(cache, error, match, functools.partial(llama.model, IDS, **inputs))


def test_a_model_in_training_is_refused(llama, cache) -> None:
    llama.model.train()
    assert_refused(cache, FailedPreconditionError, r"eval\(\)", lambda: llama.model(IDS, **cached(cache)))


def with_dropout(model: Any, rate: float) -> torch.nn.Module:
    """Put dropout into a layer of a model, in training mode like all new modules. Returns the layer's part."""
    mlp = model.model.layers[1].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Dropout(rate))
    part: torch.nn.Module = mlp.down_proj
    return part


def test_a_module_in_training_is_refused_by_its_name(llama, cache) -> None:
    part, kv = with_dropout(llama.model, 0.5), cache.kv
    alone = KVServiceCache(kv, share=False)
    calls: dict[str, Callable[[], Any]] = {
        "model": lambda: llama.model(IDS, **cached(cache)),
        "generate": lambda: llama.model.generate(IDS, max_new_tokens=2, **cached(alone)),
        "forward": lambda: forward(
            llama.model, kv.open_step([kv.allocate([1, 2], extra_keys=model_keys(llama.model))]), [1, 2]
        ),
        "engine": lambda: ModelRunner(llama.model, kv),
    }
    named = r"model\.layers\.1\.mlp\.down_proj\.1 is in training mode.*eval\(\)"
    with each_row() as row:
        for name, call in calls.items():
            with row(name), pytest.raises(FailedPreconditionError, match=named):
                call()
    part.eval()
    for one in (cache, alone):
        llama.model(IDS, **cached(one))
        part.train()
        with pytest.raises(FailedPreconditionError, match=named):
            llama.model(IDS[:, :1], **cached(one))
        part.eval()
        expected = llama.reference(torch.cat([IDS, IDS[:, :1]], 1)).logits[:, -1:]
        torch.testing.assert_close(llama.model(IDS[:, :1], **cached(one)).logits, expected, atol=1e-3, rtol=0)


def test_modules_in_training_without_an_effect_are_computed(llama, cache) -> None:
    """Attention and dropout with a rate of 0, layers without dropout."""
    with_dropout(llama.model, 0.0)
    llama.model.model.layers.train()
    torch.testing.assert_close(llama.model(IDS, **cached(cache)).logits, llama.reference(IDS).logits, atol=1e-3, rtol=0)
    llama.model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(FailedPreconditionError, match=r"layers\.0\.self_attn is in training mode"):
        llama.model(IDS, **cached(KVServiceCache(cache.kv)))


def test_gradients_through_attention_are_refused(llama, cache) -> None:
    with torch.enable_grad():
        call = lambda: llama.model(IDS, **cached(cache)).logits.sum().backward()  # noqa: E731
        assert_refused(cache, FailedPreconditionError, r"no gradients.*torch.no_grad\(\)", call)
        for parameter in llama.model.model.parameters():
            parameter.requires_grad_(False)
        llama.model(IDS, **cached(cache)).logits.sum().backward()
    expected = llama.reference(IDS, output_hidden_states=True).hidden_states[-1].sum((0, 1))
    torch.testing.assert_close(llama.model.lm_head.weight.grad[0], expected, atol=1e-2, rtol=0)


def test_guidance_and_installed_assistants_are_refused(llama, make_pair, cache) -> None:
    guided = {"guidance_scale": 1.5}
    assisted = {"assistant_model": make_pair("mistral").model}
    for arguments in (guided, assisted):
        with pytest.raises(FailedPreconditionError, match=r"got .*guidance_scale or as an assistant.*uninstall"):
            llama.model.generate(IDS[:1], max_new_tokens=4, **cached(cache), **arguments)
        cache.reset()


def test_a_prompt_that_the_cache_holds_already_is_refused(make_pair) -> None:
    with each_row() as row:
        for family in ("llama", "bloom"):
            pair = make_pair(family)
            for length in (5, 9, 10):
                with row((family, length)):
                    cache = KVServiceCache(pair.new_session(), share=False)
                    pair.model(IDS[:, :10], **cached(cache))
                    arguments = {"max_new_tokens": 2, **cached(cache)}
                    generate = functools.partial(pair.model.generate, IDS[:, :length], **arguments)
                    said = "input_ids: has no columns beyond the 10 in the cache"
                    assert_refused(cache, InvalidArgumentError, said, generate)


def test_only_a_session_makes_a_cache() -> None:
    arguments: list[Any] = [KVClient.__new__(KVClient), "unix:///run/kvservice.sock"]
    for argument in arguments:
        with pytest.raises(InvalidArgumentError, match=r"kv: must be a session, .*client.session\(\)") as refused:
            KVServiceCache(argument)
        assert refused.value.field == "kv"


def test_a_copy_of_a_cache_is_a_fork(llama, cache) -> None:
    """The library's idiom for prompts with a common prefix."""
    prefix = {"input_ids": IDS[:1, :7]}
    expected = cache_of(llama.reference(**prefix, **cached(DynamicCache()), use_cache=True))
    llama.model(**prefix, **cached(cache))
    for ending in ([[41, 3]], [[18, 77]]):
        prompt = torch.cat([prefix["input_ids"], torch.tensor(ending)], 1)
        arguments: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
        actual = llama.model.generate(prompt, **cached(copy.deepcopy(cache)), **arguments)
        assert torch.equal(actual, llama.reference.generate(prompt, **cached(copy.deepcopy(expected)), **arguments))
    assert (cache.get_seq_length(), cache.sequences[0].length) == (7, 7)


def test_install_looks_again_only_where_something_changed(make_pair) -> None:
    """A model that is looked at computes a token."""
    pair = make_pair("bloom")
    calls = []
    pair.model.register_forward_pre_hook(lambda *_: calls.append(1))
    install(install(pair.model))
    assert calls == []
    pair.model.transformer.h[0] = copy.deepcopy(pair.reference.transformer.h[0])
    cache = KVServiceCache(pair.new_session())
    call = functools.partial(pair.model, IDS, **cached(cache))
    assert_refused(cache, FailedPreconditionError, "install", call)
    calls.clear()
    install(pair.model)
    assert len(calls) == 1
    torch.testing.assert_close(call().logits, pair.reference(IDS).logits, atol=1e-3, rtol=0)


def interrupt_attention(_: KVServiceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Step, "attend", attend)


def interrupt_after_the_append(cache: KVServiceCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon has executed the call, but the caller does not get the answer."""
    append = cache.kv.append

    def append_and_stop(sequences: Any, *arguments: Any, **options: Any) -> Any:
        copies = [Sequence(one.sequence_id, one.length, extra_keys=one.extra_keys) for one in sequences]
        append(copies, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache.kv, "append", append_and_stop)


def test_an_interrupted_pass_leaves_the_cache_as_it_was(llama, monkeypatch) -> None:
    for interrupt in (interrupt_attention, interrupt_after_the_append):
        cache = KVServiceCache(llama.new_session())
        llama.model(IDS[:, :8], **cached(cache))
        with monkeypatch.context() as interrupted:
            interrupt(cache, interrupted)
            call = functools.partial(llama.model, IDS[:, 8:], **cached(cache))
            assert_refused(cache, KeyboardInterrupt, None, call)
        logits = llama.model(IDS[:, 8:], **cached(cache)).logits
        torch.testing.assert_close(logits, llama.reference(IDS).logits[:, 8:], atol=1e-3, rtol=0)
