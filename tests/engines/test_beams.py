"""Beam search is the library's, with ends of the sequence, length penalties and early stopping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from known_logits import small_config
from transformers import GenerationConfig, LlamaForCausalLM

from kvservice.engines import LLM, RequestOutput, SamplingParams

EOS = [1, 2]
PROMPT = [3, 4]
SEARCHES = [
    (2, 1.0, False),
    (4, 1.0, False),
    (4, 0.0, False),
    (4, 2.0, True),
    (3, -1.0, False),
    (5, 1.0, True),
]


def params_of(width: int, length_penalty: float, early_stopping: bool) -> SamplingParams:
    return SamplingParams(
        n=width, beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping, max_tokens=12
    )


def assert_beams_equal(model: Any, params: SamplingParams, output: RequestOutput) -> None:
    config = GenerationConfig(
        num_beams=params.beam_width, num_return_sequences=params.n, length_penalty=params.length_penalty,
        early_stopping=params.early_stopping, max_new_tokens=params.max_tokens, eos_token_id=EOS, pad_token_id=0,
        do_sample=False, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    expected = model.generate(torch.tensor([PROMPT]), generation_config=config)
    found = [list(one.token_ids) for one in output.outputs]
    wanted = [row[len(PROMPT) :].tolist() for row in expected.sequences]
    assert found == [row[: len(beam)] for row, beam in zip(wanted, found, strict=True)]
    assert all(set(row[len(beam) :]) <= {EOS[0]} for row, beam in zip(wanted, found, strict=True)), "it is padded"
    ended = ["stop" if beam[-1] in EOS else "length" for beam in found]
    assert [one.finish_reason for one in output.outputs] == ended
    scores = [one.cumulative_logprob / len(one.token_ids) ** params.length_penalty for one in output.outputs]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), rel=1e-4)


def test_the_beams_are_the_librarys(small_daemon) -> None:
    with each_row() as row:
        for seed in range(6):
            torch.manual_seed(seed)
            model = LlamaForCausalLM(small_config(13, eos_token_id=EOS, initializer_range=0.5)).eval()
            reference = LlamaForCausalLM(model.config).eval()
            reference.load_state_dict(model.state_dict())
            every = [params_of(*search) for search in SEARCHES]
            with LLM(model, address=small_daemon.address) as llm:
                outputs = llm.generate([PROMPT] * len(every), every)
            for params, output in zip(every, outputs, strict=True):
                with row((seed, params)), torch.no_grad():
                    assert_beams_equal(reference, params, output)
