"""Prompts are checked before anything is queued for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvservice.engines import SamplingParams
from kvservice.engines.prompts import ModelLimits, check_prompt
from kvservice.errors import InvalidArgumentError

LIMITS = ModelLimits(vocabulary=40, max_length=100, eos_ids=frozenset())


@pytest.mark.parametrize(
    ("text", "said"), [("w39 w60", "60 is not in the vocabulary of 40"), ("w3 \ud800", "surrogate"), ("", "no tokens")]
)
def test_a_text_that_the_model_cannot_take_is_refused(text, said) -> None:
    """The tokenizer may have more tokens than the model."""
    words: Any = SimpleNamespace(encode=lambda text: [int(word[1:]) for word in text.split()])
    with pytest.raises(InvalidArgumentError, match=said) as refused:
        check_prompt(text, SamplingParams(), LIMITS, words, "prompts[1]")
    assert refused.value.field == "prompts[1]"
    assert check_prompt("w3 w39", SamplingParams(), LIMITS, words).token_ids == (3, 39)
