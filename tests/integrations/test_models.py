"""install, uninstall, pool_options: supported models, and errors with the reason for all others."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from cache_argument import cache_of, cached
from each_row import each_row
from model_families import FAMILIES
from peft_like import PeftLike

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import (
    KVServiceCache,
    forward,
    install,
    model_keys,
    pool_options,
    uninstall,
)

TINY: dict[str, Any] = {
    "vocab_size": 11,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def test_pool_options_of_each_family(make_pair) -> None:
    with each_row() as row:
        for family in FAMILIES:
            with row(family):
                pair = make_pair(family)
                options = pool_options(pair.model.config)
                num_kv_heads = 1 if family == "gpt_bigcode" else options["num_kv_heads"]
                assert options == {"num_layers": 2, "num_kv_heads": num_kv_heads, "head_size": 32, "dtype": "float32"}
                keys = cache_of(pair.reference(torch.tensor([[1, 2, 3]]), use_cache=True)).layers[0].keys
                assert keys.shape[1] == num_kv_heads


def test_pool_options_dtype() -> None:
    config = transformers.LlamaConfig(**TINY, dtype="bfloat16")
    assert pool_options(config)["dtype"] == "bfloat16"
    assert pool_options(config, torch.float16)["dtype"] == "float16"
    with pytest.raises(InvalidArgumentError) as refused:
        pool_options(config, "float64")
    assert refused.value.field == "dtype"


def test_pool_options_refuses_what_no_daemon_has() -> None:
    for head_dim, reason in ((16, "32"), (36, "multiple of 8"), (512, "256")):
        with pytest.raises(InvalidArgumentError, match=reason) as refused:
            pool_options(transformers.LlamaConfig(**TINY, head_dim=head_dim))
        assert refused.value.field == "head_size"


def test_uninstall_gives_the_model_its_own_attention_back(make_pair) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    with each_row() as row:
        for family in FAMILIES:
            with row(family):
                pair = make_pair(family)
                assert install(pair.model) is pair.model
                uninstall(uninstall(pair.model)).set_attn_implementation("eager")
                torch.testing.assert_close(pair.model(ids).logits, pair.reference(ids).logits, atol=0, rtol=0)


UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("T5Config", {}, "cross-attention"),
    ("GPT2Config", {"add_cross_attention": True}, "cross-attention"),
    ("GemmaConfig", {"use_bidirectional_attention": True}, "causal"),
    ("DeepseekV3Config", {}, "latent"),
    ("Llama4TextConfig", {}, "chunked_attention"),
    ("Gemma3nTextConfig", {}, "dummy|share K/V"),
    ("MambaConfig", {}, "no attention heads"),
    ("Qwen3NextConfig", {}, "linear_attention"),
    ("Gemma3Config", {}, "text models"),
]


def test_unsupported_configurations_are_refused_by_name() -> None:
    with each_row() as row:
        for name, options, reason in UNSUPPORTED:
            with row((name, options)), pytest.raises(InvalidArgumentError, match=reason):
                pool_options(getattr(transformers, name)(**options))


def test_attention_outside_of_the_registry_is_refused() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=11, n_embd=64, n_layer=1, n_head=2)
    with pytest.raises(InvalidArgumentError, match="attention code of its own"):
        install(transformers.OpenAIGPTLMHeadModel(config))


def test_a_model_that_is_refused_is_as_it_was() -> None:
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**TINY)).eval()
    ids = torch.tensor([[5, 6, 7]])
    expected = model(ids).logits
    with pytest.raises(InvalidArgumentError, match="attends 2 times"):
        install(model)
    assert torch.equal(model(ids).logits, expected)


def test_a_peft_model_stands_for_the_model_inside(llama) -> None:
    ids = torch.tensor([[5, 9, 23, 61, 7]])
    kv, adapted = llama.new_session(), PeftLike(uninstall(llama.model))
    assert install(adapted) is adapted
    tokens = adapted.generate(ids, max_new_tokens=4, do_sample=False, **cached(KVServiceCache(kv)))
    assert torch.equal(tokens, llama.reference.generate(ids, max_new_tokens=4, do_sample=False))
    step = kv.open_step([kv.allocate([5, 9], extra_keys=model_keys(adapted))])
    torch.testing.assert_close(forward(adapted, step, [5, 9]), llama.reference(ids[:, :2]).logits[0], atol=1e-3, rtol=0)
    uninstall(adapted)
    assert torch.equal(adapted.generate(ids, max_new_tokens=4, do_sample=False), tokens)


def test_what_is_no_model_of_the_library_is_refused_by_name(llama) -> None:
    learned = PeftLike(uninstall(llama.model), learned_prompt=True)
    for model, reason in ((torch.nn.Linear(2, 2), "not Linear"), (learned, "learned prompts")):
        with pytest.raises(InvalidArgumentError, match=reason) as refused:
            install(model)
        assert refused.value.field == "model"


def test_encoders_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="causal"):
        install(transformers.BertModel(transformers.BertConfig(**TINY)))


def test_attention_sinks_are_refused() -> None:
    config = transformers.GptOssConfig(**TINY, num_key_value_heads=1, head_dim=32, num_local_experts=2)
    with pytest.raises(InvalidArgumentError, match="sinks"):
        install(transformers.GptOssForCausalLM(config))


def test_the_client_does_without_torch() -> None:
    """The script fails if an import needs torch."""
    program = "import sys, kvservice.client, kvservice.integrations; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
