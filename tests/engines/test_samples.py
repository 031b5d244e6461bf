"""Text grows token by token, and ends where it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from known_logits import Scripted, byte_tokenizer, small_config
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvservice.engines import LLM, CompletionOutput, SamplingParams

PROMPT = "Say: "


class Growing:
    """Collects the text of a request after each step."""

    def __init__(self) -> None:
        self.texts = [""]

    def update(self, requests: Any, _: object) -> None:
        text = requests[0].output().outputs[0].text
        if text != self.texts[-1]:
            self.texts.append(text)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    (eos,) = tokenizer.encode("$")
    return LlamaForCausalLM(small_config(256, eos_token_id=eos)).eval()


@pytest.fixture(scope="module")
def say(model, tokenizer, small_daemon) -> Any:
    """Generate a text, or what comes before it must end. The view gets each step. "$" is the end of the sequence."""
    with LLM(model, tokenizer, address=small_daemon.address) as llm:

        def generate(text: str, view: Any = False, **params: Any) -> CompletionOutput:
            script = tokenizer.encode(text)
            processors: list[Any] = [Scripted(len(tokenizer.encode(PROMPT)), script)]
            given = SamplingParams(**{"max_tokens": len(script)} | params, logits_processors=processors)
            (output,) = llm.generate(PROMPT, given, progress=view)
            assert output.error is None
            return output.outputs[0]

        yield generate


def test_the_parts_are_the_text_and_whole_characters(say) -> None:
    with each_row() as row:
        for text in ("plain", "naïve café", "日本語 text", "🙂🙃"):
            with row(text):
                view = Growing()
                assert say(text, view).text == text
                assert view.texts[-1] == text
                assert len(view.texts) > len(text) / 2
                assert all(text.startswith(part) for part in view.texts)


def test_a_skipped_token_leaves_the_space_before_the_next_word(small_daemon) -> None:
    words = Tokenizer(WordLevel({"▁the": 0, "<unk>": 1, "▁cat": 2, "▁sat": 3}, unk_token="<unk>"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    model, view = LlamaForCausalLM(small_config(4, eos_token_id=None)).eval(), Growing()
    script = [1, 2, 1, 1, 3, *[1] * 50]
    processors: list[Any] = [Scripted(1, script)]
    with LLM(model, tokenizer, address=small_daemon.address) as llm:
        params = SamplingParams(max_tokens=len(script), logits_processors=processors)
        (output,) = llm.generate([[0]], params, progress=view)
    assert output.outputs[0].text == " cat sat"
    assert view.texts == ["", " cat", " cat sat"]


def test_an_incomplete_character_at_the_end_is_replaced(say) -> None:
    output = say("ab🙂", max_tokens=3)
    assert (output.text, output.finish_reason) == ("ab\ufffd", "length")


def test_a_stop_string_ends_the_text_before_it_and_is_never_shown(say) -> None:
    view = Growing()
    output = say("one EN two END three", view, stop=["END", "never"])
    assert (output.text, output.finish_reason, output.stop_reason) == ("one EN two ", "stop", "END")
    assert all("one EN two ".startswith(text) for text in view.texts)
    assert view.texts[-1] == "one EN two "


def test_a_stop_string_can_be_kept(say) -> None:
    assert say("one END two", stop="END", include_stop_str_in_output=True).text == "one END"


def test_the_first_stop_string_counts(say) -> None:
    """Both become complete with the same token."""
    output = say("ab cd ef", stop=["cd", "b cd", "x"])
    assert (output.text, output.stop_reason) == ("a", "b cd")
    output = say("ab cd ef", stop=["ef", "b c"])
    assert (output.text, output.stop_reason) == ("a", "b c")


def test_the_end_of_the_sequence_and_stop_tokens_are_not_text(say, tokenizer) -> None:
    output = say("ab$cd")
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)
    assert len(output.token_ids) == 3
    (token,) = tokenizer.encode("c")
    output = say("ab$cd", stop_token_ids=[token], ignore_eos=True)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab$", "stop", token)


def test_nothing_stops_before_min_tokens(say) -> None:
    output = say("b$b$cb", stop="b", min_tokens=4)
    assert (output.text, output.finish_reason, output.stop_reason) == ("b$b", "stop", None), "$ was the fourth token"
    output = say("b-b$cb", stop="b", min_tokens=3)
    assert (output.text, output.finish_reason, output.stop_reason) == ("b-", "stop", "b")
