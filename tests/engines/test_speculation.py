"""Speculation changes the number of steps, and no token."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, NoRepeatNGramLogitsProcessor

from kvservice.engines import LLM, DraftModel, PromptLookup, SamplingParams
from kvservice.engines.draft import Drafter
from kvservice.engines.speculation import lookup
from kvservice.errors import ConnectionLostError, InvalidArgumentError

GREEDY = SamplingParams(temperature=0, max_tokens=40)


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


@pytest.fixture(scope="module")
def repetitive() -> list[list[int]]:
    return [[*range(10, 30), *range(10, 20)], [7, 8, 9] * 6, [50, 51, 50, 51, 50]]


@pytest.fixture(scope="module")
def looking_up(directory, engine_daemon):
    with LLM(directory, address=engine_daemon.address, speculation=PromptLookup()) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(directory, engine_daemon):
    """The draft model is the model with noise, so that it is often right."""
    draft = AutoModelForCausalLM.from_pretrained(directory)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.004 * torch.randn(parameter.shape, generator=noise))
    method = DraftModel(draft.eval(), 3, daemon={"num_blocks": 64})
    with LLM(directory, address=engine_daemon.address, speculation=method) as llm:
        yield llm


@pytest.fixture(params=["looking_up", "drafting"])
def speculating(request) -> LLM:
    return request.getfixturevalue(request.param)


def test_greedy_tokens_are_those_of_plain_decoding(speculating, prompts, repetitive, alone) -> None:
    every = [*prompts, *repetitive]
    outputs = speculating.generate(every, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [alone(prompt, 40) for prompt in every]
    proposed = sum(output.num_proposed_tokens for output in outputs)
    assert 0 <= sum(output.num_accepted_tokens for output in outputs) <= proposed
    assert proposed > 0


def test_a_good_draft_saves_steps(drafting, prompts, monkeypatch) -> None:
    outputs = drafting.generate(prompts, GREEDY)
    proposed = sum(output.num_proposed_tokens for output in outputs)
    accepted = sum(output.num_accepted_tokens for output in outputs)
    assert accepted > 0.3 * proposed > 0
    run = Mock(wraps=drafting.core.host.runner.run)
    monkeypatch.setattr(drafting.core.host.runner, "run", run)
    drafting.generate(prompts, GREEDY)
    assert run.call_count < 40, "plain decoding takes 40 steps"


def test_samples_are_those_of_plain_decoding(speculating, llm, prompts, repetitive) -> None:
    """A sampled token depends on logits, seed and position, which are the same."""
    params = [
        SamplingParams(n=2, seed=at, temperature=0.5, max_tokens=30, presence_penalty=0.3)
        for at in range(len(prompts) + len(repetitive))
    ]
    every = [*prompts, *repetitive]
    plain, speculative = (one.generate(every, params) for one in (llm, speculating))
    assert [one.outputs for one in plain] == [one.outputs for one in speculative]


def test_stops_and_limits_hold_inside_of_accepted_proposals(speculating, llm, repetitive) -> None:
    for params in (
        SamplingParams(temperature=0, max_tokens=7, stop_token_ids=list(range(100, 160))),
        SamplingParams(temperature=0, max_tokens=5, logprobs=1),
        SamplingParams(temperature=0, max_tokens=30, logits_processors=[NoRepeatNGramLogitsProcessor(2)]),
        SamplingParams(beam_width=3, max_tokens=6),
    ):
        plain, speculative = (one.generate(repetitive, params) for one in (llm, speculating))
        assert [one.outputs[0].token_ids for one in plain] == [one.outputs[0].token_ids for one in speculative]
        assert [one.outputs[0].finish_reason for one in plain] == [one.outputs[0].finish_reason for one in speculative]


def test_a_draft_model_without_room_harms_nothing(directory, engine_daemon, prompts, alone) -> None:
    draft = AutoModelForCausalLM.from_pretrained(directory).eval()
    with LLM(
        directory, address=engine_daemon.address, speculation=DraftModel(draft, 2, daemon={"num_blocks": 3})
    ) as llm:
        outputs = llm.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [alone(prompt, 40) for prompt in prompts]


def test_a_draft_model_needs_the_same_vocabulary(directory, engine_daemon) -> None:
    from kvservice.demo.model import build_model

    draft = build_model()
    draft.config.vocab_size = 100
    with pytest.raises(InvalidArgumentError) as refused:
        LLM(directory, address=engine_daemon.address, speculation=DraftModel(draft))
    assert refused.value.field == "speculation"


def test_a_draft_daemon_that_is_away_harms_no_recovery() -> None:
    """The engine forgets its drafts while it recovers from the loss of its own daemon. The next proposals reopen."""
    host = Mock(noticing_restarts=contextlib.nullcontext)
    host.session.info.max_sequence_tokens = 100
    host.model.config = LlamaConfig()
    host.model.modules.return_value = []
    host.model.generation_config.eos_token_id = None
    host.session.free.side_effect = ConnectionLostError("away")
    for forget in (lambda drafter: drafter.reset(), lambda drafter: drafter.forget([Mock(sequence_id=4)])):
        host.reopen.reset_mock()
        drafter = Drafter(host, 2)
        drafter._sequences[4] = Mock()
        forget(drafter)
        host.reopen.assert_not_called()
        for _ in range(2):
            assert drafter.propose([]) == []
        host.reopen.assert_called_once()
