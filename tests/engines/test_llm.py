"""The engine's tokens are the library's own, in batches, as samples and as beams; what it cannot do it refuses."""

from __future__ import annotations

import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from each_row import each_row
from peft_like import PeftLike
from transformers import AutoModelForCausalLM, LogitsProcessor, NoRepeatNGramLogitsProcessor, TopKLogitsWarper

from kvservice.client import EngineBatch, KVClient, KVScheduler, Step
from kvservice.engines import LLM, ModelRunner, RequestOutput, SamplingParams
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, OutOfBlocksError
from kvservice.integrations.transformers import install, pool_options
from kvservice.launch import Daemon

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def tokens(output: RequestOutput, index: int = 0) -> list[int]:
    return list(output.outputs[index].token_ids)


class Preempted:
    """Collects the sequences that were preempted."""

    def __init__(self) -> None:
        self.sequences: set[int] = set()

    def update(self, _: object, batch: EngineBatch[Step] | None) -> None:
        assert batch is not None
        self.sequences |= {one.sequence_id for one in batch.preempted}


def test_greedy_tokens_are_those_of_each_request_alone(llm, prompts, alone) -> None:
    outputs = llm.generate(prompts, GREEDY)
    assert [tokens(output) for output in outputs] == [alone(prompt, 20) for prompt in prompts]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts


def test_without_a_batch_ahead_the_tokens_are_the_same(directory, engine_daemon, prompts, alone) -> None:
    with LLM(directory, address=engine_daemon.address, ahead=False) as engine:
        outputs = engine.generate(prompts, GREEDY)
    assert [tokens(output) for output in outputs] == [alone(prompt, 20) for prompt in prompts]


def test_the_model_is_compiled_if_asked(directory, engine_daemon, prompts) -> None:
    """In this stance torch refuses to compile anything."""
    for compiled in (False, True):
        refused = pytest.raises(RuntimeError, match="fail_on_recompile") if compiled else contextlib.nullcontext()
        engine = LLM(directory, address=engine_daemon.address, compiled=compiled)
        with engine, refused, torch.compiler.set_stance("fail_on_recompile"):
            engine.generate(prompts[:1], GREEDY)


def test_a_model_that_its_user_installed_stays_installed(directory, engine_daemon, prompts, alone) -> None:
    """The model is inside of another, like PEFT's."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    for install_first in (False, True):
        if install_first:
            install(model)
        engines = [LLM(PeftLike(model), address=engine_daemon.address) for _ in range(2)]
        for engine in engines:
            (output,) = engine.generate(prompts[2], GREEDY)
            assert tokens(output) == alone(prompts[2], 20)
            engine.close()
        assert (model.config._attn_implementation == "kvservice") is install_first


def test_all_blocks_are_given_back(llm, prompts, engine_daemon) -> None:
    llm.generate(prompts, GREEDY)
    with KVClient(engine_daemon.address) as client:
        stats = client.stats()
    assert stats.sequences == 0
    assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


def test_under_pressure_the_tokens_are_the_same(llm, alone) -> None:
    """Twelve requests that need 9 blocks each share a pool of 64, so some are preempted."""
    prompts, preempted = [[3 + request, *range(10, 100)] for request in range(12)], Preempted()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=50), progress=preempted)
    assert [tokens(output) for output in outputs] == [alone(prompt, 50) for prompt in prompts]
    assert preempted.sequences


def test_texts_are_continued_and_end_at_stop_strings(llm, alone) -> None:
    prompt = [5, 9, 300, 31]
    expected = alone(prompt, 20)
    words = "".join(f" w{token}" for token in expected)
    (whole,) = llm.generate("w5 w9 w300 w31", GREEDY)
    assert (whole.prompt, whole.prompt_token_ids, whole.outputs[0].text) == ("w5 w9 w300 w31", tuple(prompt), words)
    stop = f"w{expected[7]} "
    (stopped,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, stop=stop))
    end = words.index(stop)
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == (words[:end], stop)
    token = expected[4]
    (stopped,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[token]))
    assert tokens(stopped) == expected[: expected.index(token) + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", token)


def test_each_prompt_can_have_its_own_parameters(llm, prompts, alone) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=3),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=12, logits_processors=[NoRepeatNGramLogitsProcessor(1)]),
        SamplingParams(temperature=0, max_tokens=12, min_tokens=12),
    ]
    outputs = llm.generate(prompts[:4], params)
    options: list[dict[str, Any]] = [
        {},
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 12},
    ]
    for prompt, output, one, given in zip(prompts, outputs, params, options, strict=False):
        assert tokens(output) == alone(prompt, one.max_tokens, **given)


def test_samples_of_a_prompt_differ_and_are_repeatable(llm, prompts) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=12)
    first, second = (llm.generate([prompts[5]], params)[0] for _ in range(2))
    assert first == RequestOutput(first.request_id, None, second.prompt_token_ids, second.outputs, True)
    assert [one.index for one in first.outputs] == [0, 1, 2, 3]
    assert len({one.token_ids for one in first.outputs}) == 4
    together = llm.generate([*prompts[:3], prompts[5]], [GREEDY, params, SamplingParams(), params])
    assert [one.token_ids for one in together[3].outputs] == [one.token_ids for one in first.outputs]


def test_samples_are_what_the_models_distribution_says(llm, reference) -> None:
    """The first tokens of 256 samples, against the library's probabilities after top_k."""
    prompt = [40, 41, 42]
    (output,) = llm.generate([prompt], SamplingParams(n=256, seed=11, top_k=4, temperature=3.0, max_tokens=1))
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[:, -1] / 3.0
    expected = TopKLogitsWarper(4)(None, logits).softmax(-1)[0]
    found = torch.bincount(torch.tensor([one.token_ids[0] for one in output.outputs]), minlength=512) / 256
    assert not found[expected == 0].any()
    assert ((found - expected).abs() <= 4.5 * (expected * (1 - expected) / 256).sqrt() + 1e-9).all()


def test_best_of_returns_the_likeliest_samples(llm, prompts) -> None:
    params: dict[str, Any] = {"seed": 5, "max_tokens": 6}
    (every,) = llm.generate([prompts[1]], SamplingParams(n=5, logprobs=0, **params))
    (best,) = llm.generate([prompts[1]], SamplingParams(n=2, best_of=5, **params))
    ordered = sorted(every.outputs, key=lambda one: -one.cumulative_logprob)
    assert [one.token_ids for one in best.outputs] == [one.token_ids for one in ordered[:2]]
    for one in every.outputs:
        assert one.cumulative_logprob == pytest.approx(
            sum(logprobs[token].logprob for token, logprobs in zip(one.token_ids, one.logprobs, strict=True))
        )


def library_beams(reference, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    with torch.no_grad():
        found = reference.generate(
            torch.tensor([prompt]), max_new_tokens=params.max_tokens, num_beams=params.beam_width, pad_token_id=0,
            num_return_sequences=params.n, length_penalty=params.length_penalty, do_sample=False,
        )  # fmt: skip
    sequences: list[list[int]] = found[:, len(prompt) :].tolist()
    return sequences


def test_beams_are_the_librarys(llm, reference, prompts) -> None:
    params = SamplingParams(n=3, beam_width=4, max_tokens=10)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        expected = library_beams(reference, prompt, params)
        assert [tokens(output, index) for index in range(3)] == [
            row[: len(tokens(output, index))] for index, row in enumerate(expected)
        ]


def test_beams_that_were_preempted_are_the_librarys(llm, reference) -> None:
    prompts, preempted = [[3 + request, *range(10, 105)] for request in range(8)], Preempted()
    params = SamplingParams(beam_width=4, max_tokens=30)
    outputs = llm.generate(prompts, params, progress=preempted)
    for prompt, output in zip(prompts, outputs, strict=True):
        (expected,) = library_beams(reference, prompt, params)
        assert tokens(output) == expected[: len(tokens(output))]
    assert preempted.sequences


def test_the_logprobs_of_tokens_are_the_models(llm, reference) -> None:
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, logprobs=3))
    one = output.outputs[0]
    with torch.no_grad():
        logits = reference(torch.tensor([[5, 6, 7, *one.token_ids]])).logits[0, 2:-1]
    expected = logits.log_softmax(-1)
    for token, found, row in zip(one.token_ids, one.logprobs, expected, strict=True):
        assert list(found) == row.topk(3).indices.tolist()
        assert found[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert (found[token].rank, found[token].decoded_token) == (1, f"w{token}")


class Failing(LogitsProcessor):
    """Raises at the third token after the prompt."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self._length + 2:
            raise ValueError("the third token")
        return scores


def test_an_error_of_one_request_does_not_end_others(llm, prompts, alone) -> None:
    failing = SamplingParams(n=2, temperature=0, max_tokens=20, logits_processors=[Failing(len(prompts[1]))])
    outputs = llm.generate(prompts[:3], [GREEDY, failing, GREEDY])
    assert [tokens(outputs[at]) for at in (0, 2)] == [alone(prompts[at], 20) for at in (0, 2)]
    assert isinstance(outputs[1].error, ValueError)
    assert {one.finish_reason for one in outputs[1].outputs} == {"error"}
    assert tokens(outputs[1]) == alone(prompts[1], 2)
    assert tokens(llm.generate([prompts[1]], GREEDY)[0]) == alone(prompts[1], 20)


WRONG: list[tuple[Any, dict[str, Any], str, str]] = [
    ([], {}, "prompts[1]", "no tokens"),
    ("", {}, "prompts[1]", "no tokens"),
    ("w3 \ud800", {}, "prompts[1]", "surrogate"),
    ([512], {}, "prompts[1]", "512 is not in the vocabulary of 512"),
    ([-1], {}, "prompts[1]", "-1 is not in the vocabulary"),
    ([1.5], {}, "prompts[1]", "must be a text or token ids: 1.5 at 0 is no token id"),
    ([5, True], {}, "prompts[1]", "True at 1 is no token id"),
    ([5, "w6"], {}, "prompts[1]", "'w6' at 1 is no token id"),
    ([5, None], {}, "prompts[1]", "None at 1 is no token id"),
    ([[1], [2, 3]], {}, "prompts[1]", "must be a text or token ids"),
    ([[[5]]], {}, "prompts[1]", "[5] at 0 is no token id"),
    ([2**70], {}, "prompts[1]", "is not in the vocabulary"),
    (np.array([5.0]), {}, "prompts[1]", "5.0 at 0 is no token id"),
    (np.array([True]), {}, "prompts[1]", "True at 0 is no token id"),
    (np.array([[5], [6]]), {}, "prompts[1]", "[5] at 0 is no token id"),
    (torch.tensor([5.0]), {}, "prompts[1]", "5.0 at 0 is no token id"),
    (torch.tensor(5), {}, "prompts[1]", "must be a text or token ids"),
    (None, {}, "prompts[1]", "must be a text or token ids, not None"),
    (b"w5", {}, "prompts[1]", "must be a text or token ids"),
    ({5, 6}, {}, "prompts[1]", "must be a text or token ids"),
    (7, {}, "prompts[1]", "must be a text or token ids"),
    ({"input_ids": ["ab"]}, {}, "prompts[1].input_ids", "'ab' at 0 is no token id"),
    ({"input_ids": "ab"}, {}, "prompts[1]", "must be a text, token ids"),
    ({"input_ids": [[5], [6, 0.5]]}, {}, "prompts[1].input_ids", "0.5 at 1 is no token id"),
    ({"input_ids": [[5], 6]}, {}, "prompts[1].input_ids", "not 6"),
    ({"input_ids": [[5], [6]]}, {}, "prompts[1]", "has 2 prompts"),
    ({"input_ids": np.array([5.0])}, {}, "prompts[1].input_ids", "5.0 at 0 is no token id"),
    ({"input_ids": [5, 512]}, {}, "prompts[1]", "512 is not in the vocabulary"),
    ({"input_ids": [5], "attention_mask": "1"}, {}, "prompts[1]", "attention_mask of another shape"),
    ({"input_ids": [5], "attention_mask": [[1]]}, {}, "prompts[1].attention_mask", "other than 0 and 1"),
    ([5] * 8192, {}, "prompts[1]", "has 8192 tokens, and prompt and output have at most 8192"),
    ([5], {"stop_token_ids": [512]}, "stop_token_ids", "512 is not in the vocabulary"),
    ([5], {"logit_bias": {512: 1.0}}, "logit_bias", "512 is not in the vocabulary"),
]


def test_a_wrong_prompt_is_refused_before_anything_is_queued(llm, engine_daemon) -> None:
    with each_row() as row, KVClient(engine_daemon.address) as client:
        for prompt, params, field, said in WRONG:
            with row((f"{prompt!r:.20}", params)):
                with pytest.raises(InvalidArgumentError, match=re.escape(said)) as refused:
                    llm.generate([[5], prompt], [GREEDY, SamplingParams(**params)])
                assert refused.value.field == field
                assert client.stats().sequences == 0
        for prompts in (None, 5, b"w5", {5}, torch.tensor(5), np.array(5), {"input_ids": ["w5"]}):
            with row(prompts), pytest.raises(InvalidArgumentError) as refused:
                llm.generate(prompts, GREEDY)
            assert refused.value.field.startswith("prompts")


def test_token_ids_may_be_arrays_and_tensors_of_any_whole_numbers(llm, alone) -> None:
    ids = [5, 6, 7]
    forms = [ids, tuple(ids), range(5, 8), iter(ids), np.array(ids, np.uint8), torch.tensor([ids]), map(np.int32, ids)]
    for output in llm.generate([*forms, list(torch.tensor(ids))], GREEDY):
        assert tokens(output) == alone(ids, 20)


def test_what_the_pool_can_never_hold_is_refused_with_the_numbers(llm, prompts, alone) -> None:
    with pytest.raises(OutOfBlocksError) as refused:
        llm.generate([prompts[0], [5] * 2000], SamplingParams(temperature=0, max_tokens=10))
    assert (refused.value.never, refused.value.required, refused.value.total) == (True, 126, 64)
    assert tokens(llm.generate([prompts[0]], GREEDY)[0]) == alone(prompts[0], 20)


def test_parameters_are_one_for_all_or_one_for_each(llm) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        llm.generate([[5], [6]], [GREEDY])
    assert refused.value.field == "sampling_params"
    assert llm.generate([], GREEDY) == []
    (output,) = llm.generate([5, 6])
    ended = output.outputs[0].finish_reason == "stop"
    assert ended or len(tokens(output)) == 16, "one prompt of token ids, with the default parameters"


def test_prompts_may_be_any_iterable(llm, alone) -> None:
    expected = [alone(prompt, 20) for prompt in ([11, 39, 57], [7, 8])]
    batches: list[Any] = [
        (prompt for prompt in ([11, 39, 57], [7, 8])),
        iter([np.array([11, 39, 57]), torch.tensor([7, 8])]),
    ]
    for batch in batches:
        assert [tokens(output) for output in llm.generate(batch, GREEDY)] == expected
    singles: list[Any] = [
        iter([11, 39, 57]),
        np.array([11, 39, 57]),
        torch.tensor([11, 39, 57]),
        [np.int64(11), 39, 57],
    ]
    for single in singles:
        assert [tokens(output) for output in llm.generate(single, GREEDY)] == expected[:1]


def test_what_is_no_prompt_is_refused(llm) -> None:
    wrong: list[Any] = [{"prompt": "x"}, [{"prompt": "x"}], b"x", 5, None]
    for prompts in wrong:
        with pytest.raises(InvalidArgumentError) as refused:
            llm.generate(prompts)
        assert refused.value.field.startswith("prompts"), prompts


def test_parameters_of_another_class_are_refused(llm) -> None:
    wrong: list[Any] = [{"temperature": 0}, [{"temperature": 0}], [None], 5]
    for params in wrong:
        with pytest.raises(InvalidArgumentError, match="SamplingParams"):
            llm.generate([[5]], params)


def test_more_prompts_than_a_call_may_have_are_added_in_parts(directory, reference, alone, monkeypatch) -> None:
    """The first part is full by its number of requests, the second by its tokens."""
    sizes: list[int] = []
    add = KVScheduler.add

    def counted(scheduler: KVScheduler, part: Any, **options: Any) -> Any:
        sizes.append(len(part))
        return add(scheduler, part, **options)

    monkeypatch.setattr(KVScheduler, "add", counted)
    limits: dict[str, Any] = {"max_request_sequences": 3, "max_request_tokens": 70, "watermark": 0.0}
    options = pool_options(reference.config, reference.dtype)
    batch = [[5]] * 4 + [[6] * 40, [7] * 40]
    with (
        Daemon(**options, num_blocks=4, block_size=16, **limits) as daemon,
        LLM(directory, address=daemon.address) as engine,
    ):
        outputs = engine.generate(batch, GREEDY)
        assert sizes == [3, 2, 1]
        assert [tokens(output) for output in outputs] == [alone(prompt, 20) for prompt in batch]
        sizes.clear()
        with pytest.raises(OutOfBlocksError) as refused:
            engine.generate([*batch, [5] * 39], [GREEDY] * 6 + [SamplingParams(temperature=0, max_tokens=30)])
        assert refused.value.field == "requests[6].max_tokens"
        with KVClient(daemon.address) as client:
            assert client.stats().sequences == 0
        assert tokens(engine.generate([[5]], GREEDY)[0]) == alone([5], 20)


def test_threads_take_turns(llm, prompts, alone) -> None:
    with ThreadPoolExecutor(4) as threads:
        outputs = list(threads.map(lambda prompt: llm.generate([prompt], GREEDY)[0], prompts[:4]))
    assert [tokens(output) for output in outputs] == [alone(prompt, 20) for prompt in prompts[:4]]


def test_a_closed_engine_says_so(directory, engine_daemon) -> None:
    engine = LLM(directory, address=engine_daemon.address)
    engine.close()
    with pytest.raises(FailedPreconditionError, match="the engine is closed"):
        engine.generate([5])


def test_an_error_of_the_model_ends_all_requests_and_the_engine_goes_on(llm, prompts, alone, monkeypatch) -> None:
    def broken(*_):
        raise RuntimeError("device lost")

    with monkeypatch.context() as patched:
        patched.setattr(ModelRunner, "run", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.generate(prompts, GREEDY)
    assert tokens(llm.generate([prompts[0]], GREEDY)[0]) == alone(prompts[0], 20)


def test_progress_is_shown_on_standard_error(llm, prompts, capsys) -> None:
    llm.generate(prompts[:2], GREEDY, progress=True)
    shown = capsys.readouterr()
    assert "2/2" in shown.err
    assert "40 tokens" in shown.err
    assert shown.out == ""


def test_a_directory_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        LLM(tmp_path)
    assert refused.value.field == "model"


def test_texts_need_a_tokenizer(directory, engine_daemon) -> None:
    with LLM(AutoModelForCausalLM.from_pretrained(directory), address=engine_daemon.address) as llm:
        for field, prompt, stop in (("prompts[0]", "w5", ()), ("stop", [5], ("w6",))):
            with pytest.raises(InvalidArgumentError) as refused:
                llm.generate([prompt], SamplingParams(stop=stop))
            assert refused.value.field == field
        assert llm.generate([[5]], SamplingParams(max_tokens=2))[0].outputs[0].text == ""


def test_engines_can_share_a_model(directory, engine_daemon, prompts, alone) -> None:
    """The model keeps its attention in the daemon until the last engine is closed."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    with LLM(model, address=engine_daemon.address) as first:
        with LLM(model, address=engine_daemon.address):
            pass
        (output,) = first.generate([prompts[0]], GREEDY)
        assert tokens(output) == alone(prompts[0], 20)
    ids = torch.tensor([[5, 6]])
    with torch.no_grad():
        assert model(ids).logits.shape[:2] == (1, 2)


def test_wrong_options_are_refused(directory) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"speculation": 4}, "speculation"),
        ({"address": "unix:/absent", "daemon": {"num_blocks": 4}}, "daemon"),
    ]
    for options, field in wrong:
        with pytest.raises(InvalidArgumentError) as refused:
            LLM(directory, **options)
        assert refused.value.field == field
