"""Sampling parameters are checked one by one, and refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from each_row import each_row
from transformers import TopKLogitsWarper

from kvservice.engines import SamplingParams
from kvservice.errors import InvalidArgumentError

WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", True),
    ("n", 1.0),
    ("n", 257),
    ("best_of", 0),
    ("temperature", -0.1),
    ("temperature", math.nan),
    ("temperature", 1e-9),
    ("temperature", "1"),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("seed", 2**64),
    ("repetition_penalty", 0.0),
    ("presence_penalty", math.inf),
    ("frequency_penalty", None),
    ("logit_bias", {-1: 1.0}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", [1]),
    ("logits_processors", [len]),
    ("logits_processors", 5),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("stop", ""),
    ("stop", [b"x"]),
    ("stop", ["x"] * 65),
    ("stop", 5),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [0] * 65),
    ("ignore_eos", 1),
    ("logprobs", -1),
    ("logprobs", 1025),
    ("priority", 2**31),
    ("beam_width", 0),
    ("length_penalty", math.nan),
    ("early_stopping", "never"),
]


TOGETHER: list[tuple[str, dict[str, Any]]] = [
    ("best_of", {"n": 3, "best_of": 2}),
    ("min_tokens", {"min_tokens": 17}),
    ("n", {"beam_width": 2, "n": 3}),
    ("temperature", {"beam_width": 2, "temperature": 0.5}),
    ("top_p", {"beam_width": 2, "top_p": 0.5}),
    ("stop", {"beam_width": 2, "stop": "x"}),
    ("seed", {"beam_width": 2, "seed": 1}),
    ("logprobs", {"beam_width": 2, "logprobs": 1}),
    ("prompt_logprobs", {"prompt_logprobs": 1}),
]


def test_a_wrong_value_is_refused_by_name() -> None:
    with each_row() as row:
        for field, value in WRONG:
            with row(f"{field}={value!r:.20}"):
                with pytest.raises(InvalidArgumentError) as refused:
                    SamplingParams(**{field: value})
                assert refused.value.field == field


def test_values_that_do_not_go_together_and_unknown_names_are_refused() -> None:
    with each_row() as row:
        for field, values in TOGETHER:
            with row(values):
                with pytest.raises(InvalidArgumentError) as refused:
                    SamplingParams.of(values)
                assert refused.value.field == field


def test_the_width_is_the_number_of_sequences() -> None:
    assert SamplingParams().width == 1
    assert SamplingParams(n=3).width == 3
    assert SamplingParams(n=3, best_of=5).width == 5
    assert SamplingParams(n=3, beam_width=4).width == 4


def test_lists_become_tuples_and_one_stop_string_is_enough() -> None:
    processor = TopKLogitsWarper(3)
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logits_processors=[processor])
    assert (params.stop, params.stop_token_ids, params.logits_processors) == (("end",), (1, 2), (processor,))


def test_none_is_an_empty_list() -> None:
    params = SamplingParams(stop=None, stop_token_ids=None, logits_processors=None)  # type: ignore[arg-type]
    assert params == SamplingParams()


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5), stop_token_ids=np.arange(2))  # type: ignore[arg-type]
    assert params == SamplingParams(max_tokens=5, temperature=0.5, stop_token_ids=(0, 1))
    assert type(params.max_tokens) is int
