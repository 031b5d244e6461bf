"""Speculation changes the number of steps, and no token."""

from __future__ import annotations

import functools
from typing import Any, cast

import pytest

from kvservice.engines import DraftModel, PromptLookup
from kvservice.engines.speculation import lookup
from kvservice.errors import InvalidArgumentError


def test_lookup_proposes_what_followed_the_longest_and_latest_match() -> None:
    method = PromptLookup(num_tokens=3, max_ngram=2)
    assert lookup([1, 2, 3, 4, 5, 1, 2], method) == [3, 4, 5]
    assert lookup([1, 2, 7, 8, 1, 2, 9, 9, 1, 2], method) == [9, 9, 1]
    assert lookup([2, 6, 1, 2], method) == [6, 1, 2], "one token matches"
    assert lookup([4, 4, 4], method) == [4], "only what is there"
    assert lookup([1, 2, 3], method) == []
    assert lookup([1], method) == []
    assert lookup([1, 2, 3, 2], PromptLookup(max_ngram=2, min_ngram=2)) == []


@pytest.mark.parametrize("kind", [PromptLookup, functools.partial(DraftModel, cast(Any, None))])
def test_the_number_of_proposals_is_checked(kind: Any) -> None:
    for wrong in (0, 65):
        with pytest.raises(InvalidArgumentError) as refused:
            kind(num_tokens=wrong)
        assert refused.value.field == "num_tokens"
