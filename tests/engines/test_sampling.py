"""Tokens are chosen as the library's own logits processors say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from each_row import each_row
from known_logits import table_model
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvservice.engines import LLM, RequestOutput, SamplingParams

PROMPT = [3, 4, 5, 4]
VOCABULARY = 40
# 16 prompts with 256 samples of each.
NUM_SAMPLES = 16 * 256
# Random logits after each token.
TABLE = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
OpenTable = Callable[[torch.Tensor], LLM]


@pytest.fixture(scope="module")
def open_table(small_daemon) -> Iterator[OpenTable]:
    """Return an engine whose model has these logits after each token."""
    with ExitStack() as stack:
        yield lambda table: stack.enter_context(LLM(table_model(table), address=small_daemon.address))


@pytest.fixture(scope="module")
def llm(open_table: OpenTable) -> LLM:
    return open_table(TABLE)


def same_after_each_token(**logits: float) -> torch.Tensor:
    """Return a table with these logits, by `t` and the token, after each token. All others are 0."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    for name, value in logits.items():
        table[:, int(name.removeprefix("t"))] = value
    return table


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def library_scores(token_ids: list[int], *processors: LogitsProcessor) -> torch.Tensor:
    ids: Any = torch.tensor([token_ids])
    logits: Any = TABLE[token_ids[-1:]].clone()
    scores: torch.Tensor = LogitsProcessorList(processors)(ids, logits)
    return scores


def test_samples_have_the_librarys_distribution(llm) -> None:
    rows: list[tuple[dict[str, Any], list[LogitsProcessor]]] = [
        ({}, []),
        ({"temperature": 0.7}, [TemperatureLogitsWarper(0.7)]),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_k": 1000}, []),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
            [
                RepetitionPenaltyLogitsProcessor(1.3),
                TemperatureLogitsWarper(1.5),
                TopKLogitsWarper(9),
                TopPLogitsWarper(0.9),
                MinPLogitsWarper(0.05),
            ],
        ),
    ]
    prompt = [*PROMPT, 5, 6]
    with each_row() as row:
        for params, processors in rows:
            with row(params):
                every = [SamplingParams(n=256, seed=seed, max_tokens=1, **params) for seed in range(16)]
                outputs = llm.generate([prompt] * 16, every)
                chosen = torch.tensor([one.token_ids[0] for output in outputs for one in output.outputs])
                found = torch.bincount(chosen, minlength=VOCABULARY) / NUM_SAMPLES
                expected = library_scores(prompt, *processors).softmax(-1)[0]
                assert not found[expected == 0].any()
                deviation = (expected * (1 - expected) / NUM_SAMPLES).sqrt()
                assert ((found - expected).abs() <= 4.5 * deviation + 1e-9).all()


def test_requests_with_different_parameters_get_what_they_get_alone(llm) -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_k=3),
        SamplingParams(seed=2),
        SamplingParams(seed=3, top_p=0.5, temperature=2.0),
        SamplingParams(seed=4, min_p=0.2, presence_penalty=1.0),
        SamplingParams(temperature=0, logit_bias={9: 100.0}),
    ]
    prompts = [[*PROMPT, at] for at in range(10, 10 + len(params))]
    together = [tokens(output) for output in llm.generate(prompts, params)]
    alone = [tokens(llm.generate([prompt], one)[0]) for prompt, one in zip(prompts, params, strict=True)]
    assert together == alone
    assert together[0][0] == int(TABLE[10].argmax())
    assert set(together[5]) == {9}


def test_penalties_count_tokens_of_the_output(open_table) -> None:
    llm = open_table(same_after_each_token(t6=5.0, t7=4.0))
    params = SamplingParams(temperature=0, presence_penalty=0.25, frequency_penalty=0.5, max_tokens=4)
    (output,) = llm.generate([[6, 6, 6, 3]], params)
    assert tokens(output) == [6, 6, 7, 6], "5 - 0.75 > 4, 5 - 1.25 < 4, 5 - 1.25 > 4 - 0.75"


def test_before_min_tokens_nothing_ends_a_sequence(open_table) -> None:
    llm = open_table(same_after_each_token(t1=9.0, t8=8.0, t9=7.0))
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[8])
    (output,) = llm.generate([PROMPT], params)
    assert tokens(output) == [9, 9, 1]


def test_the_librarys_processors_get_the_tokens_of_their_own_request(llm) -> None:
    processors: list[Any] = [SuppressTokensLogitsProcessor([0]), NoRepeatNGramLogitsProcessor(2)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logits_processors=processors)
    prompts = [PROMPT, [4, 4, 5, 4], [17, 3, 17]]
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        expected = list(prompt)
        for _ in range(12):
            expected.append(int(library_scores(expected, *processors).argmax()))
        assert [*prompt, *tokens(output)] == expected
    plain = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert all(len(set(zip(tokens(one), tokens(one)[1:], strict=False))) < 11 for one in plain), "they repeat pairs"


def test_each_request_has_processors_of_its_own_unless_they_look_at_scores_alone(llm) -> None:
    """A processor may have state. `n` samples of a prompt have their own, too."""

    class Counting(LogitsProcessor):
        def __init__(self) -> None:
            self.num_calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            assert len(input_ids) == len(scores) == 1
            self.num_calls += 1
            scores = torch.full_like(scores, -torch.inf)
            scores[:, self.num_calls] = 0.0
            return scores

    counting: Any = Counting()
    params = SamplingParams(
        seed=1, n=2, max_tokens=5, ignore_eos=True, logits_processors=[TopKLogitsWarper(VOCABULARY), counting]
    )
    outputs = llm.generate([PROMPT, [5], [6]], params)
    assert {one.token_ids for output in outputs for one in output.outputs} == {(1, 2, 3, 4, 5)}
    assert counting.num_calls == 0


def test_an_error_of_a_processor_is_its_requests_error(llm) -> None:
    class Failing(LogitsProcessor):
        def __call__(self, *_: Any) -> Any:
            raise ValueError("no")

    class Shrinking(LogitsProcessor):
        def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores[:, :3]

    params = [
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(logits_processors=[Failing()]),
        SamplingParams(logits_processors=[Shrinking()]),
        SamplingParams(logit_bias=dict.fromkeys(range(VOCABULARY), -torch.inf)),
    ]
    good, *others = llm.generate([PROMPT] * 4, params)
    assert good.error is None
    assert tokens(good) == [int(TABLE[4].argmax())]
    assert isinstance(others[0].error, ValueError)
    assert "Shrinking" in str(others[1].error)
    assert "not finite" in str(others[2].error)


def test_logprobs_are_of_the_logits_before_changes(llm) -> None:
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=1, logprobs=2, logit_bias={7: 1000.0}))
    expected = TABLE[4].log_softmax(-1)
    first, second = expected.topk(2).indices.tolist()
    (found,) = output.outputs[0].logprobs
    assert list(found) == [first, second, 7]
    for token, one in found.items():
        assert one.logprob == pytest.approx(float(expected[token]), abs=1e-5)
        assert one.rank == 1 + int((expected > expected[token]).sum())


def test_random_numbers_depend_on_seed_sample_and_position_only(open_table) -> None:
    """All tokens are equally likely, so a token is a random number."""
    llm = open_table(torch.zeros(VOCABULARY, VOCABULARY))
    every = [SamplingParams(n=4, seed=seed, max_tokens=50, ignore_eos=True) for seed in range(50)]
    outputs = llm.generate([[3]] * 50, every)
    drawn = np.array([one.token_ids for output in outputs for one in output.outputs])
    assert drawn.shape == (200, 50)
    assert len({tuple(row) for row in drawn.tolist()}) == 200
    (again,) = llm.generate([[7, 8, 9]], every[23])
    assert [list(one.token_ids) for one in again.outputs] == drawn[4 * 23 : 4 * 24].tolist()
    expected = drawn.size / VOCABULARY
    assert np.abs(np.bincount(drawn.ravel(), minlength=VOCABULARY) - expected).max() < 4.5 * np.sqrt(expected)
    for one, other in ((drawn[:-1], drawn[1:]), (drawn[:, :-1], drawn[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4.5 / np.sqrt(one.size)
