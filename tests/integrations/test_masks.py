"""Attention masks over stored columns, and padding between tokens: equal to the library, or refused."""

from __future__ import annotations

import pytest
import torch
import transformers
from cache_argument import cached
from each_row import each_row

from kvservice.errors import InvalidArgumentError
from kvservice.integrations.transformers import KVServiceCache, install, pool_options

IDS = torch.arange(1, 25).reshape(2, 12)


def masked(*columns: int) -> torch.Tensor:
    """Return ones `[2, 12]`, with zeros in these columns of the second row."""
    mask = torch.ones_like(IDS)
    mask[1, list(columns)] = 0
    return mask


def positions(model, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the position ids of the tokens. ALiBi models accept none."""
    return {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def logits_in_two_passes(model, cache, mask: torch.Tensor, second_mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the logits of the tokens after the first 8 columns."""
    for columns in (slice(0, 8), slice(8, 12)):
        inputs = {name: value[:, columns] for name, value in positions(model, mask).items()}
        inputs["attention_mask"] = mask[:, : columns.stop]
        if second_mask is not None and columns.stop == 12:
            inputs["attention_mask"] = second_mask
        logits = model(IDS[:, columns], **inputs, **cached(cache)).logits
    return logits[mask[:, 8:].bool()]


def expected_logits(model, mask: torch.Tensor) -> torch.Tensor:
    logits = model(IDS, attention_mask=mask, **positions(model, mask)).logits
    return logits[:, 8:][mask[:, 8:].bool()]


def test_a_mask_that_changes_over_stored_columns_is_refused(llama) -> None:
    for changed in (masked(), masked(0, 1, 2), masked(0, 5)):
        cache = KVServiceCache(llama.new_session())
        with pytest.raises(InvalidArgumentError, match="attention_mask: differs from the previous mask"):
            logits_in_two_passes(llama.model, cache, masked(0, 1), second_mask=changed)
        assert [sequence.length for sequence in cache.sequences if sequence is not None] == [8, 6]
        assert cache.get_seq_length() == 8


def test_no_mask_after_a_mask_is_another_mask(llama) -> None:
    cache = KVServiceCache(llama.new_session())
    llama.model(IDS[:, :8], attention_mask=masked(0)[:, :8], **cached(cache))
    with pytest.raises(InvalidArgumentError, match="attention_mask: differs from the previous mask"):
        llama.model(IDS[:, 8:], **cached(cache))


def test_a_mask_of_the_new_columns_alone_is_refused(llama) -> None:
    cache = KVServiceCache(llama.new_session())
    with pytest.raises(InvalidArgumentError, match=r"must be \[2, 12\], past and new columns, not \[2, 4\]"):
        logits_in_two_passes(llama.model, cache, masked(), second_mask=masked()[:, 8:])


def test_a_mask_may_be_longer_than_the_columns(llama) -> None:
    mask = masked(0, 1)
    longer = torch.cat([mask, torch.zeros(2, 3, dtype=torch.long)], 1)
    actual = logits_in_two_passes(llama.model, KVServiceCache(llama.new_session()), mask, second_mask=longer)
    torch.testing.assert_close(actual, expected_logits(llama.reference, mask), atol=1e-3, rtol=0)


def test_selected_rows_keep_their_masks(llama) -> None:
    cache = KVServiceCache(llama.new_session())
    mask = masked(0, 1)
    llama.model(IDS, attention_mask=mask, **positions(llama.model, mask), **cached(cache))
    cache.batch_select_indices(torch.tensor([1]))
    token, mask = torch.tensor([[41]]), torch.cat([mask[1:], torch.ones(1, 1, dtype=torch.long)], 1)
    actual = llama.model(token, attention_mask=mask, position_ids=torch.tensor([[10]]), **cached(cache)).logits
    inputs = {"attention_mask": mask, **positions(llama.model, mask), "logits_to_keep": 1}
    expected = llama.reference(torch.cat([IDS[1:], token], 1), **inputs).logits
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=0)


HOLES = {"in one pass": masked(3, 4), "where passes meet": masked(6, 7), "and padding": masked(0, 5, 9)}


def test_padding_between_tokens(make_pair) -> None:
    with each_row() as row:
        for family in ("llama", "gpt2", "bloom"):
            pair = make_pair(family)
            for name, mask in HOLES.items():
                with row((family, name)):
                    # Without position ids it is unknown whether positions are token indices, so nothing can be shared.
                    cache = KVServiceCache(pair.new_session(), share=family != "bloom")
                    actual = logits_in_two_passes(pair.model, cache, mask)
                    torch.testing.assert_close(actual, expected_logits(pair.reference, mask), atol=1e-3, rtol=0)


def test_padding_between_tokens_within_a_sliding_window_is_refused(make_pair) -> None:
    """In sliding windows, here of 5, the library counts columns and the daemon counts tokens."""
    pair = make_pair("mistral")
    with each_row() as row:
        for name, mask in HOLES.items():
            with row(name):
                cache = KVServiceCache(pair.new_session())
                with pytest.raises(InvalidArgumentError, match="attention_mask: has padding between tokens"):
                    logits_in_two_passes(pair.model, cache, mask)
                lengths = [info.length for info in cache.kv.describe()]
                assert sum(lengths) == mask[:, : cache.get_seq_length()].sum()


def test_padding_between_tokens_whose_columns_mpt_counts_is_refused(clients) -> None:
    """MPT's ALiBi biases depend on columns, those of BLOOM on tokens."""
    torch.manual_seed(2)
    config = transformers.MptConfig(d_model=64, n_heads=2, n_layers=2, vocab_size=97)
    model = install(transformers.MptForCausalLM(config).eval())
    with clients(pool_options(config)).session() as kv, torch.no_grad():
        for share in (True, False):
            cache = KVServiceCache(kv, share=share)
            model(IDS, attention_mask=masked(0, 1), **cached(cache))
            with pytest.raises(InvalidArgumentError, match="attention_mask: has padding between tokens"):
                model(IDS, attention_mask=masked(3), **cached(KVServiceCache(kv, share=share)))


def test_a_window_that_sees_the_whole_row_does_not_matter(make_pair) -> None:
    pair = make_pair("mistral")
    mask = torch.tensor([[1] * 8, [0, 0, 0, 1, 1, 0, 1, 1]])
    inputs = {"input_ids": IDS[:, :8], "attention_mask": mask, **positions(pair.model, mask)}
    actual = pair.model(**inputs, **cached(KVServiceCache(pair.new_session()))).logits
    torch.testing.assert_close(actual[mask.bool()], pair.reference(**inputs).logits[mask.bool()], atol=1e-3, rtol=0)
