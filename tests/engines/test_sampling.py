"""Tokens are chosen as the library's own logits processors say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampled_rows import PROMPT, make_row
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

from kvservice.engines import SamplingParams
from kvservice.engines.sampling import choose, stream_of, uniform

VOCABULARY = 40
NUM_ROWS = 4000


def logits_of_seed(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def library_probabilities(logits: torch.Tensor, token_ids: list[int], *processors: LogitsProcessor) -> torch.Tensor:
    scores = LogitsProcessorList(processors)(torch.tensor([token_ids]), logits.clone())  # type: ignore[arg-type]
    return torch.softmax(scores, -1)[0]


def frequencies(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The shares of tokens in NUM_ROWS samples of one row of logits."""
    rows = [make_row(params, (5, 6), index=index) for index in range(NUM_ROWS)]
    chosen = choose(logits.expand(NUM_ROWS, -1), rows).token_ids
    return torch.bincount(torch.tensor(chosen), minlength=VOCABULARY) / NUM_ROWS


@pytest.mark.parametrize(
    ("params", "processors"),
    [
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
    ],
    ids=["plain", "temperature", "top_k", "top_k of all", "top_p", "min_p", "all"],
)
def test_samples_have_the_librarys_distribution(params, processors) -> None:
    logits = logits_of_seed(1)
    expected = library_probabilities(logits, [*PROMPT, 5, 6], *processors)
    found = frequencies(logits, SamplingParams(seed=7, **params))
    assert not found[expected == 0].any()
    deviation = (expected * (1 - expected) / NUM_ROWS).sqrt()
    assert ((found - expected).abs() <= 4.5 * deviation + 1e-9).all()


def test_rows_with_different_parameters_are_chosen_as_if_alone() -> None:
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1, top_k=3),
        SamplingParams(seed=2),
        SamplingParams(seed=3, top_p=0.5, temperature=2.0),
        SamplingParams(seed=4, min_p=0.2, presence_penalty=1.0),
        SamplingParams(temperature=0, logit_bias={9: 100.0}),
    ]
    logits = logits_of_seed(2, len(params))
    together = choose(logits, [make_row(one, (5,)) for one in params]).token_ids
    alone = [choose(logits[at : at + 1], [make_row(one, (5,))]).token_ids[0] for at, one in enumerate(params)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())
    assert together[5] == 9


def test_penalties_count_tokens_of_the_output_and_proposals() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [6, 7]] = torch.tensor([5.0, 4.0])
    penalized = SamplingParams(temperature=0, presence_penalty=0.25, frequency_penalty=0.5)
    assert choose(logits, [make_row(penalized, (6,))]).token_ids == [6], "5 - 0.75 > 4"
    assert choose(logits, [make_row(penalized, (6,), following=(6,))]).token_ids == [7], "5 - 1.25 < 4"
    logits[0, 4] = 5.0
    assert choose(logits, [make_row(penalized, (6, 6))]).token_ids == [4], "tokens of the prompt do not count"


def test_before_min_tokens_nothing_ends_a_sequence() -> None:
    logits = torch.zeros(1, VOCABULARY)
    logits[0, [1, 8, 9]] = torch.tensor([9.0, 8.0, 7.0])
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[8])
    assert choose(logits, [make_row(params, (5,))]).token_ids == [9]
    assert choose(logits, [make_row(params, (5,), following=(5,))]).token_ids == [1]


def test_the_librarys_processors_get_the_tokens_of_their_own_row() -> None:
    logits = logits_of_seed(3, 2)
    processor = NoRepeatNGramLogitsProcessor(2)
    params = SamplingParams(temperature=0, logits_processors=[SuppressTokensLogitsProcessor([0]), processor])
    best = int(library_probabilities(logits[:1], PROMPT, SuppressTokensLogitsProcessor([0])).argmax())
    repeated = (best, 9, *PROMPT[-1:])
    rows = [make_row(params), make_row(params, (PROMPT[-1], best, PROMPT[-1]))]
    chosen = choose(logits[:1].expand(2, -1), rows).token_ids
    assert chosen[0] == best
    expected = library_probabilities(
        logits[:1], [*PROMPT, PROMPT[-1], best, PROMPT[-1]], SuppressTokensLogitsProcessor([0]), processor
    )
    assert chosen[1] == int(expected.argmax()) != best
    assert repeated[0] == best


def test_one_call_serves_rows_that_share_a_processor_of_scores() -> None:
    sizes: list[int] = []

    class Counting(TopKLogitsWarper):
        def __call__(self, input_ids, scores):
            sizes.append(len(scores))
            return super().__call__(input_ids, scores)

    shared, own = TopKLogitsWarper(1), Counting(1)
    params = SamplingParams(seed=1, logits_processors=[shared, own])
    rows = [make_row(params, index=index) for index in range(3)]
    assert all(row.sample.processors[0] is shared for row in rows)
    assert len({id(row.sample.processors[1]) for row in rows}) == 3, "a processor may have state"
    logits = logits_of_seed(4, 3)
    assert choose(logits, rows).token_ids == logits.argmax(-1).tolist()
    assert sizes == [1, 1, 1]


def test_an_error_of_a_processor_is_its_rows_error() -> None:
    class Failing(LogitsProcessor):
        def __call__(self, *_):
            raise ValueError("no")

    class Shrinking(LogitsProcessor):
        def __call__(self, _, scores):
            return scores[:, :3]

    logits = logits_of_seed(5, 4)
    greedy = SamplingParams(temperature=0)
    rows = [
        make_row(greedy),
        make_row(SamplingParams(logits_processors=[Failing()])),
        make_row(SamplingParams(logits_processors=[Shrinking()])),
        make_row(SamplingParams(logit_bias=dict.fromkeys(range(VOCABULARY), -torch.inf))),
    ]
    choice = choose(logits, rows)
    assert set(choice.errors) == {1, 2, 3}
    assert isinstance(choice.errors[1], ValueError)
    assert "Shrinking" in str(choice.errors[2])
    assert "not finite" in str(choice.errors[3])
    assert choice.token_ids[0] == int(logits[0].argmax())


def test_logprobs_are_of_the_logits_before_changes() -> None:
    logits = logits_of_seed(6)
    params = SamplingParams(temperature=0, logprobs=2, logit_bias={7: 1000.0})
    choice = choose(logits, [make_row(params)])
    expected = logits.log_softmax(-1)[0]
    first, second = expected.topk(2).indices.tolist()
    found = choice.logprobs[0]
    assert list(found) == [first, second, 7]
    for token, one in found.items():
        assert one.logprob == pytest.approx(float(expected[token]))
        assert one.rank == 1 + int((expected > expected[token]).sum())


def test_random_numbers_depend_on_seed_sample_and_position_only() -> None:
    streams = np.array([stream_of(seed, index) for seed in range(50) for index in range(4)], np.uint64)
    assert len(set(streams.tolist())) == 200
    positions = np.arange(200, dtype=np.uint64)
    numbers = np.array([uniform(np.full(200, stream), positions) for stream in streams])
    assert np.array_equal(numbers[7, 5:9], uniform(np.full(4, streams[7]), positions[5:9]))
    assert ((numbers >= 0) & (numbers < 1)).all()
    counts, _ = np.histogram(numbers, 20, (0, 1))
    assert np.abs(counts - numbers.size / 20).max() < 4.5 * np.sqrt(numbers.size / 20)
    correlation = np.corrcoef(numbers[:-1].ravel(), numbers[1:].ravel())[0, 1]
    assert abs(correlation) < 4.5 / np.sqrt(numbers.size)
