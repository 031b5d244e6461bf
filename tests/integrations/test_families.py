"""Every family gives the same results with its K/V in the daemon, and every attention option is necessary."""

from __future__ import annotations

from typing import Any

import torch
from cache_argument import cached
from each_row import each_row
from model_families import FAMILIES
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


def daemon_logits_of(pair, batch, positions, num_decode_steps=3):
    with KVServiceCache(pair.new_session()) as cache:
        return logits_of(pair.model, cache, batch, positions, num_decode_steps)


def test_logits_are_those_of_the_librarys_own_cache(make_pair, batch, positions) -> None:
    with each_row() as row:
        for family in FAMILIES:
            with row(family):
                pair = make_pair(family)
                expected = logits_of(pair.reference, DynamicCache(config=pair.reference.config), batch, positions)
                actual = daemon_logits_of(pair, batch, positions)
                assert expected.std() > 1
                torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_generates_the_same_tokens(make_pair, batch) -> None:
    with each_row() as row:
        for family in FAMILIES:
            pair = make_pair(family)
            for do_sample in (False, True):
                arguments = {**batch, "max_new_tokens": 16, "do_sample": do_sample, "top_k": 0}
                with row((family, "sampled" if do_sample else "greedy")):
                    torch.manual_seed(11)
                    expected = pair.reference.generate(**arguments)
                    torch.manual_seed(11)
                    with KVServiceCache(pair.new_session()) as cache:
                        actual = pair.model.generate(**arguments, **cached(cache))
                    assert torch.equal(actual, expected)


# The options of attention that families use.
OPTIONS = [
    ("qwen2", "sliding_window"),
    ("mistral", "sliding_window"),
    ("gpt2", "scale"),
    ("gemma2", "scale"),
    ("gemma2", "sliding_window"),
    ("gemma2", "logits_soft_cap"),
    ("bloom", "alibi_slopes"),
]


def test_an_option_that_got_lost_would_show(make_pair, batch, positions, monkeypatch) -> None:
    attend = Step.attend
    with each_row() as row:
        for family, option in OPTIONS:
            pair, num_lost = make_pair(family), 0
            expected = logits_of(pair.reference, DynamicCache(config=pair.reference.config), batch, positions)

            def without_option(step: Step, *tensors: Any, lost: str = option, **options: Any) -> Any:
                nonlocal num_lost
                num_lost += bool(options[lost])
                return attend(step, *tensors, **{name: value for name, value in options.items() if name != lost})

            with row((family, option)), monkeypatch.context() as patched:
                patched.setattr(Step, "attend", without_option)
                actual = daemon_logits_of(pair, batch, positions)
                assert num_lost, "the family does not use the option"
                assert (actual - expected).abs().max() > 300 * TOLERANCE


def test_windows_of_any_length(make_pair, batch, positions) -> None:
    with each_row() as row:
        for window in (1, 2, 4, 7, 4096):
            with row(window):
                pair = make_pair("mistral", sliding_window=window)
                # The library's cache has no window of one token.
                steps = 0 if window == 1 else 3
                library = DynamicCache(config=pair.reference.config)
                expected = logits_of(pair.reference, library, batch, positions, steps)
                actual = daemon_logits_of(pair, batch, positions, steps)
                torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_alibi_slopes_of_a_number_of_heads_that_is_no_power_of_two(make_pair, batch, positions) -> None:
    pair = make_pair("bloom", hidden_size=12 * 32, n_head=12)
    expected = logits_of(pair.reference, DynamicCache(config=pair.reference.config), batch, positions)
    actual = daemon_logits_of(pair, batch, positions)
    torch.testing.assert_close(actual, expected, atol=5 * TOLERANCE, rtol=0)


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
    actual = daemon_logits_of(pair, batch, positions).float()

    def error(logits: torch.Tensor) -> float:
        return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())

    # bfloat16 has 8 bits of precision. The rest of the model, equal in both, amplifies the rounding of attention.
    assert error(actual) < 1.2 * error(library) < 0.1
