"""Every family gives the same results with its K/V in the daemon, and every attention option is necessary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_argument import cached
from transformers import DynamicCache

from kvservice.client import Step
from kvservice.integrations.transformers import KVServiceCache

# float32 sums in another order than the library's. With scores as large as here a softmax turns 1e-6 of a score into
# 1e-4 of a logit, whose standard deviation is about 4. Losing an option moves logits by hundreds of times as much.
TOLERANCE = 1e-3


def logits_of(model, cache, batch, positions, num_decode_steps=3):
    """Return the logits of all prompt tokens and of some later tokens, without padding: `[tokens, vocabulary]`."""
    mask = batch["attention_mask"]
    ids = batch["input_ids"]
    extra = positions(model, mask)
    logits = [model(ids, attention_mask=mask, **cached(cache), **extra).logits[mask.bool()]]
    for step in range(num_decode_steps):
        mask = torch.cat([mask, torch.ones(len(mask), 1, dtype=torch.long)], 1)
        extra = {name: value[:, -1:] for name, value in positions(model, mask).items()}
        token = torch.full((len(mask), 1), 7 + step)
        logits.append(model(token, attention_mask=mask, **cached(cache), **extra).logits[:, 0])
    return torch.cat(logits)


def test_logits_are_those_of_the_librarys_own_cache(pair, batch, positions) -> None:
    expected = logits_of(pair.reference, DynamicCache(config=pair.reference.config), batch, positions)
    actual = logits_of(pair.model, KVServiceCache(pair.new_session()), batch, positions)
    assert expected.std() > 1
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_generates_the_same_tokens(pair, batch, do_sample: bool) -> None:
    arguments = {**batch, "max_new_tokens": 16, "do_sample": do_sample, "top_k": 0}
    torch.manual_seed(11)
    expected = pair.reference.generate(**arguments)
    torch.manual_seed(11)
    actual = pair.model.generate(**arguments, **cached(KVServiceCache(pair.new_session())))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("qwen2", "sliding_window"),
        ("mistral", "sliding_window"),
        ("gpt2", "scale"),
        ("gemma2", "scale"),
        ("gemma2", "sliding_window"),
        ("gemma2", "logits_soft_cap"),
        ("bloom", "alibi_slopes"),
    ],
)
def test_an_option_that_got_lost_would_show(make_pair, batch, positions, monkeypatch, family, option) -> None:
    pair = make_pair(family)
    expected = logits_of(pair.reference, DynamicCache(config=pair.reference.config), batch, positions)
    attend = Step.attend

    def without_option(step: Step, *tensors: Any, **options: Any) -> Any:
        assert options.pop(option), "the family does not use the option"
        return attend(step, *tensors, **options)

    def when_used(step: Step, *tensors: Any, **options: Any) -> Any:
        return (without_option if options[option] else attend)(step, *tensors, **options)

    monkeypatch.setattr(Step, "attend", when_used)
    actual = logits_of(pair.model, KVServiceCache(pair.new_session()), batch, positions)
    assert (actual - expected).abs().max() > 300 * TOLERANCE


def test_sampling_depends_on_the_seed(llama, batch) -> None:
    def sample(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        cache = KVServiceCache(llama.new_session())
        return llama.model.generate(**batch, max_new_tokens=16, do_sample=True, top_k=0, **cached(cache))

    assert not torch.equal(sample(1), sample(2))


def test_bfloat16_is_as_close_to_float32_as_the_library_is(make_pair, batch, positions) -> None:
    exact = make_pair("llama").reference
    pair = make_pair("llama", torch.bfloat16)
    exact.load_state_dict(pair.reference.float().state_dict())
    expected = logits_of(exact, DynamicCache(config=exact.config), batch, positions)
    pair.reference.to(torch.bfloat16)
    library = logits_of(pair.reference, DynamicCache(config=exact.config), batch, positions).float()
    actual = logits_of(pair.model, KVServiceCache(pair.new_session()), batch, positions).float()

    def error(logits: torch.Tensor) -> float:
        return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    # bfloat16 has 8 bits of precision. The rest of the model, equal in both, amplifies the rounding of attention.
    assert error(actual) < 1.2 * error(library) < 0.1
