"""Text grows token by token, and ends where it must."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvservice.demo.model import build_tokenizer
from kvservice.engines import SamplingParams
from kvservice.engines.detokenizer import Detokenizer, find_stop
from kvservice.engines.samples import Sample


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token is a byte."""
    return build_tokenizer()


def make_sample(tokenizer, max_tokens: int = 100, **params) -> Sample:
    prompt = tokenizer.encode("Say: ")
    eos = tokenizer.encode("$")
    return Sample(0, 0, prompt, SamplingParams(**params), max_tokens, eos, 0, tokenizer)


def feed(sample: Sample, tokenizer, text: str) -> list[str]:
    """Add the tokens of a text until the sample ends. Returns its text after each."""
    shown = []
    for token in tokenizer.encode(text):
        sample.add(token)
        shown.append(sample.output().text)
        if sample.finished:
            break
    return shown


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語 text", "🙂🙃"])
def test_the_parts_are_the_text_and_whole_characters(tokenizer, text) -> None:
    detokenizer = Detokenizer(tokenizer, tokenizer.encode("Say: "), True)
    parts = [detokenizer.add(token) for token in tokenizer.encode(text)]
    assert "".join(parts) + detokenizer.flush() == text
    assert all("\ufffd" not in part for part in parts)


def test_a_skipped_token_leaves_the_space_before_the_next_word() -> None:
    words = Tokenizer(WordLevel({"▁the": 0, "<unk>": 1, "▁cat": 2, "▁sat": 3}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    detokenizer = Detokenizer(tokenizer, [0], True)
    assert [detokenizer.add(token) for token in (1, 2, 1, 1, 3)] == ["", " cat", "", "", " sat"]
    for _ in range(1000):
        assert detokenizer.add(1) == ""
    assert len(detokenizer._window) < 100


def test_an_incomplete_character_at_the_end_is_replaced(tokenizer) -> None:
    sample = make_sample(tokenizer, max_tokens=3)
    feed(sample, tokenizer, "ab🙂")
    assert (sample.text, sample.finish_reason) == ("ab\ufffd", "length")


def test_a_stop_string_ends_the_text_before_it_and_is_never_shown(tokenizer) -> None:
    sample = make_sample(tokenizer, stop=["END", "never"])
    shown = feed(sample, tokenizer, "one EN two END three")
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("one EN two ", "stop", "END")
    assert all("one EN two ".startswith(text) for text in shown)
    assert shown[-1] == "one EN two "


def test_a_stop_string_can_be_kept(tokenizer) -> None:
    sample = make_sample(tokenizer, stop="END", include_stop_str_in_output=True)
    feed(sample, tokenizer, "one END two")
    assert sample.text == "one END"


def test_the_end_of_the_sequence_and_stop_tokens_are_not_text(tokenizer) -> None:
    sample = make_sample(tokenizer)
    feed(sample, tokenizer, "ab$cd")
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ab", "stop", None)
    assert len(sample.generated_ids) == 3
    (token,) = tokenizer.encode("c")
    sample = make_sample(tokenizer, stop_token_ids=[token], ignore_eos=True)
    feed(sample, tokenizer, "ab$cd")
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("ab$", "stop", token)


def test_nothing_stops_before_min_tokens(tokenizer) -> None:
    sample = make_sample(tokenizer, stop="b", min_tokens=4)
    feed(sample, tokenizer, "b$b$cb")
    assert (sample.text, sample.finish_reason) == ("b$b", "stop"), "$ was the fourth token"


def test_the_first_stop_string_counts() -> None:
    assert find_stop("ab cd ef", 8, ["cd", "b c", "x"]) == (1, "b c")
    assert find_stop("ab cd", 1, ["ab"]) is None, "it was there before"
    assert find_stop("ab", 1, ["ab"]) == (0, "ab")


def test_tokens_of_a_range_include_proposals_and_zeros_after_an_abort(tokenizer) -> None:
    sample = make_sample(tokenizer)
    length = sample.prompt_length
    sample.add(50)
    sample.proposals = [60, 61]
    assert sample.tokens_of(length, length + 3) == [50, 60, 61]
    assert sample.tokens_of(length + 1, length + 2) == [60]
    assert sample.tokens_of(length - 1, length + 5)[1:] == [50, 60, 61, 0, 0]
