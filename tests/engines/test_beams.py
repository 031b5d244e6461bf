"""Beam search is the library's, with ends of the sequence, length penalties and early stopping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from each_row import each_row
from known_logits import small_config
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessor

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


def test_a_processor_with_a_state_is_called_once_a_step_in_every_batch(small_daemon) -> None:
    class Counts(LogitsProcessor):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            scores[:, self.calls % 13] += 100.0
            return scores

    torch.manual_seed(0)
    model = LlamaForCausalLM(small_config(13, eos_token_id=None)).eval()
    beams = SamplingParams(beam_width=2, max_tokens=6, logits_processors=[Counts()])
    with LLM(model, address=small_daemon.address) as llm:
        (alone,) = llm.generate(PROMPT, beams)
        sampled = SamplingParams(temperature=0, max_tokens=6, logits_processors=[Counts()])
        (sample,) = llm.generate(PROMPT, sampled)
        first, *among, last = llm.generate([PROMPT] * 4, [sampled, beams, beams, sampled])
    assert alone.outputs[0].token_ids == (1, 2, 3, 4, 5, 6)
    assert [one.outputs for one in among] == [alone.outputs] * 2
    assert [one.outputs for one in (first, last)] == [sample.outputs] * 2
