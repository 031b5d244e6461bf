"""A request may bring things that fail. Its error is its own: no other request notices, and its blocks are free."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from each_row import each_row
from known_logits import Scripted, byte_tokenizer, small_config, table_model
from transformers import (
    EtaLogitsWarper,
    ForcedEOSTokenLogitsProcessor,
    LlamaForCausalLM,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForCausalLM,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from kvservice.client import KVClient
from kvservice.engines import LLM, AsyncLLM, DraftModel, ModelRunner, PromptLookup, RequestOutput, SamplingParams
from kvservice.engines.host import EngineHost, WatchedScheduler
from kvservice.engines.requests import EngineRequest
from kvservice.errors import (
    ConnectionLostError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    KVServiceError,
    ResourceExhaustedError,
)
from kvservice.launch import Daemon

PROMPT = "Say: "
# The token that the tokenizer cannot decode, and the text that it cannot encode.
BROKEN = 11
VOCABULARY = 40
LARGEST = torch.finfo(torch.float32).max


class BrokenTokenizer(PreTrainedTokenizerFast):
    def decode(self, token_ids: Any, *arguments: Any, **options: Any) -> Any:
        self._check(token_ids)
        return super().decode(token_ids, *arguments, **options)

    def convert_ids_to_tokens(self, ids: Any, *arguments: Any, **options: Any) -> Any:
        self._check(ids)
        return super().convert_ids_to_tokens(ids, *arguments, **options)

    def encode(self, text: Any, *arguments: Any, **options: Any) -> Any:
        if "broken" in text:
            raise KeyError(text)
        return super().encode(text, *arguments, **options)

    def _check(self, ids: Any) -> None:
        if BROKEN in ([ids] if isinstance(ids, int) else ids):
            raise KeyError("the broken token")


@pytest.fixture(scope="module")
def tokenizer() -> BrokenTokenizer:
    return BrokenTokenizer(tokenizer_object=byte_tokenizer().backend_tokenizer)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(small_config(256, eos_token_id=None)).eval()


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def assert_all_is_free(daemon: Daemon) -> None:
    with KVClient(daemon.address) as client:
        stats = client.stats()
        assert stats.sequences == 0
        assert stats.free_blocks + stats.cached_blocks == stats.num_blocks


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput | Exception:
    """Return the last output of a stream, or its error."""
    try:
        return [output async for output in stream][-1]
    except Exception as error:
        return error


def saying(tokenizer: BrokenTokenizer, text: str, broken_at: int | None = None, **options: Any) -> SamplingParams:
    script = tokenizer.encode(text)
    if broken_at is not None:
        script[broken_at] = BROKEN
    processors: list[Any] = [Scripted(len(tokenizer.encode(PROMPT)), script)]
    return SamplingParams(max_tokens=len(script), logits_processors=processors, **options)


@pytest.mark.parametrize("speculation", [None, PromptLookup(2)], ids=["plain", "speculation"])
def test_a_tokenizer_that_fails_ends_its_own_request(speculation, model, tokenizer, small_daemon) -> None:
    ways: list[dict[str, Any]] = [{}, {"n": 2}, {"beam_width": 2}, {"logprobs": 1}]
    good = saying(tokenizer, "good text")
    broken = [saying(tokenizer, "this fails", 4, **way) for way in ways]
    options: dict[str, Any] = {"address": small_daemon.address, "speculation": speculation}
    with LLM(model, tokenizer, **options) as llm:
        first, *failed, second = llm.generate([PROMPT] * 6, [good, *broken, good])
        for one, way in zip(failed, ways, strict=True):
            assert isinstance(one.error, KeyError), way
            assert any("the tokenizer" in note for note in one.error.__notes__), way
            assert {part.finish_reason for part in one.outputs} == {"error"}, way
        assert failed[0].outputs[0].text == "this"
        assert [one.outputs[0].text for one in (first, second)] == ["good text"] * 2
        with KVClient(small_daemon.address) as client:
            while client.stats().sequences:  # the daemon frees the last ones with the next step
                assert llm.generate(PROMPT, good)[0].outputs[0].text == "good text"

    async def streams() -> list[RequestOutput | Exception]:
        async with AsyncLLM(model, tokenizer, **options) as llm:
            every = await asyncio.gather(*(last(llm.generate(PROMPT, one)) for one in (good, *broken, good)))
            return [*every, await last(llm.generate(PROMPT, good))]

    first_output, *errors, second_output, third = asyncio.run(streams())
    assert [type(one) for one in errors] == [KeyError] * 4
    for output in (first_output, second_output, third):
        assert isinstance(output, RequestOutput)
        assert output.outputs[0].text == "good text"
    assert_all_is_free(small_daemon)


def test_a_request_that_the_daemons_scheduler_gives_up_ends_with_its_error(
    model, tokenizer, small_daemon, monkeypatch
) -> None:
    """The others go on."""
    schedule, failed = WatchedScheduler.schedule, dict[int, KVServiceError]()

    def failing(self: WatchedScheduler, *arguments: Any, **options: Any) -> Any:
        if failed:
            return schedule(self, *arguments, **options)
        first = min(info.request_id for info in self.describe())
        failed[first] = ResourceExhaustedError("no memory for the sequence")
        ended = self.abort([first])
        batch = schedule(self, *arguments, **options)
        batch.finished[:0] = ended
        batch.failed.update(failed)
        return batch

    monkeypatch.setattr(WatchedScheduler, "schedule", failing)
    good = saying(tokenizer, "good text")
    with LLM(model, tokenizer, address=small_daemon.address) as llm:
        first, second = llm.generate([PROMPT] * 2, [good, good])
    assert [first.error] == list(failed.values())
    assert {part.finish_reason for part in first.outputs} == {"error"}
    assert second.outputs[0].text == "good text"
    assert_all_is_free(small_daemon)


def test_what_cannot_be_begun_is_refused_with_its_name(model, tokenizer, small_daemon) -> None:
    class Uncopyable(LogitsProcessor):
        def __deepcopy__(self, _: object) -> Any:
            raise ZeroDivisionError("never copied")

        def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    of_library: list[Any] = [
        SuppressTokensLogitsProcessor([600]),
        ForcedEOSTokenLogitsProcessor(3000, 600),
        MinLengthLogitsProcessor(2, -1),
        NoBadWordsLogitsProcessor([[3, 600]]),
        SequenceBiasLogitsProcessor([[[600], 1.0]]),
    ]
    rows: list[tuple[str, list[Any], str, str]] = [
        ("broken", [], "prompts[1]", "the tokenizer cannot encode it: KeyError"),
        ("text", [Uncopyable()], "logits_processors", "cannot be copied: ZeroDivisionError"),
        *(("text", [one], "logits_processors", "is not in the vocabulary of 256") for one in of_library),
    ]
    with LLM(model, tokenizer, address=small_daemon.address) as llm, each_row() as row:
        for prompt, processors, field, said in rows:
            with row((prompt, processors)):
                with pytest.raises(InvalidArgumentError, match=said) as refused:
                    llm.generate([PROMPT, prompt], [SamplingParams(), SamplingParams(logits_processors=processors)])
                assert refused.value.field == field
    assert_all_is_free(small_daemon)


class Setting(LogitsProcessor):
    """Sets the scores of token 7 and of all others."""

    def __init__(self, of_seven: float, of_others: float) -> None:
        self.of_seven, self.of_others = of_seven, of_others

    def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = torch.full_like(scores, self.of_others)
        scores[:, 7] = self.of_seven
        return scores


def test_scores_are_right_or_an_error(small_daemon) -> None:
    """Also where the temperature makes them overflow, and in beam search, which adds them up."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    table[:, 9] = 5.0
    shared: Any = EtaLogitsWarper(epsilon=0.3)
    nan, inf = torch.nan, torch.inf
    sampled: dict[str, Any] = {"temperature": 0.5, "seed": 1}
    rows: list[tuple[dict[str, Any], list[LogitsProcessor], int | None]] = [
        (sampled, [Setting(LARGEST, -LARGEST)], 7),
        ({"temperature": 1e-4, "seed": 1, "top_p": 0.9, "min_p": 0.1}, [Setting(LARGEST, -LARGEST)], 7),
        ({"temperature": 0.1, "logit_bias": {7: 1e38}, "repetition_penalty": 1.5}, [], 7),
        ({"temperature": 0, "logit_bias": {7: 1e38}}, [], 7),
        (sampled, [Setting(nan, 0.0)], None),
        (sampled, [Setting(inf, 0.0)], None),
        (sampled, [Setting(-inf, -inf)], None),
        ({"temperature": 0}, [Setting(nan, 0.0)], None),
        ({"beam_width": 2}, [Setting(0.0, -inf)], 7),
        ({"beam_width": 2}, [Setting(LARGEST, -LARGEST)], None),
        ({"beam_width": 2}, [Setting(nan, 0.0)], None),
        ({"beam_width": 2}, [Setting(inf, 0.0)], None),
        ({"beam_width": 2}, [Setting(-inf, -inf)], None),
        ({"beam_width": 2, "length_penalty": 30.0}, [Setting(0.0, -inf)], 7),
        ({"beam_width": 2, "length_penalty": -30.0}, [Setting(0.0, -inf)], 7),
        ({"temperature": 0}, [shared], 9),
        ({"temperature": 0}, [Setting(nan, 0.0), shared], None),
    ]
    params = [SamplingParams(max_tokens=3, logits_processors=some, **one) for one, some, _ in rows]
    with LLM(table_model(table, eos_token_id=None), address=small_daemon.address) as llm:
        outputs = llm.generate([[3, 4]] * len(rows), params)
    with each_row() as row:
        for (one, processors, token), output in zip(rows, outputs, strict=True):
            with row((one, [vars(some) for some in processors])):
                if token is None:
                    assert isinstance(output.error, InternalError | ValueError)
                    assert output.outputs[0].finish_reason == "error"
                else:
                    assert output.error is None
                    assert tokens(output) == [token] * 3


def test_an_end_of_sequence_that_no_token_has_is_ignored_with_a_warning(small_daemon, caplog) -> None:
    """With an end of -1, the last token would be forbidden before min_tokens."""
    table = torch.zeros(VOCABULARY, VOCABULARY)
    table[:, VOCABULARY - 1] = 5.0
    for eos, ignored in ((600, "[600]"), ([1, 600], "[600]"), (-1, "[-1]")):
        model = table_model(table)
        model.generation_config.eos_token_id = eos
        caplog.clear()
        with LLM(model, address=small_daemon.address) as llm:
            params = [SamplingParams(temperature=0, max_tokens=3, min_tokens=least) for least in (2, 0)]
            outputs = llm.generate([[3], [4]], params)
        assert [tokens(one) for one in outputs] == [[VOCABULARY - 1] * 3] * 2
        assert ignored in caplog.text
        assert "from 0 to 39" in caplog.text


@pytest.mark.parametrize("padding", [0, 1])
def test_padding_that_has_no_position_is_its_own_requests_error(padding, small_daemon) -> None:
    """RoBERTa's positions begin after its padding id, and do not count padding."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=1, num_attention_heads=2, hidden_size=64, intermediate_size=16,
        max_position_embeddings=64, pad_token_id=padding, bos_token_id=2, eos_token_id=None, is_decoder=True,
    )  # fmt: skip
    model: Any = RobertaForCausalLM(config).eval()
    good = SamplingParams(temperature=0, max_tokens=12, logit_bias={padding: -100.0})
    says_padding: list[dict[str, Any]] = [{}, {"n": 2}, {"beam_width": 2}, {"stop_token_ids": [padding]}]
    bad = [SamplingParams(max_tokens=12, logit_bias={padding: 1000.0}, **one) for one in says_padding]
    alone = None
    for speculation in (None, PromptLookup(2), DraftModel(model, 2, address=small_daemon.address)):
        with LLM(model, address=small_daemon.address, speculation=speculation) as llm:
            with pytest.raises(InvalidArgumentError, match="has the padding token") as refused:
                llm.generate([[5, 6], [5, padding, 6]], good)
            assert refused.value.field == "prompts[1]"
            alone = alone or tokens(llm.generate([[5, 6]], good)[0])
            first, *failed, stopped, second = llm.generate([[5, 6]] * 6, [good, *bad, good])
            assert [tokens(one) for one in (first, second)] == [alone] * 2
            for one in failed:
                assert "is padding" in str(one.error)
            assert (tokens(stopped), stopped.error) == ([padding], None)


def test_a_view_that_fails_leaves_nothing_in_the_daemon(model, tokenizer, small_daemon) -> None:
    class ViewError(Exception): ...

    class Failing:
        def update(self, requests: Any, _: object) -> None:
            if requests[0].samples[0].num_generated == 3:
                raise ViewError

    with LLM(model, tokenizer, address=small_daemon.address) as llm:
        with pytest.raises(ViewError):
            llm.generate([PROMPT, PROMPT], SamplingParams(max_tokens=500), progress=Failing())
        assert_all_is_free(small_daemon)


def test_an_error_of_the_engine_is_raised_as_it_is(model, tokenizer, small_daemon, monkeypatch) -> None:
    """Although no new session can be opened. The next call opens one, or says why it cannot."""

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    def away(*_: object) -> None:
        raise ConnectionLostError("the daemon is away")

    reopen = EngineHost.reopen

    def reopening(host: EngineHost) -> None:
        host.usable = False
        away() if isaway else reopen(host)

    isaway = True
    good = saying(tokenizer, "good text")
    monkeypatch.setattr(EngineHost, "reopen", reopening)
    with LLM(model, tokenizer, address=small_daemon.address) as llm:
        with monkeypatch.context() as patched:
            patched.setattr(ModelRunner, "run", broken)
            with pytest.raises(RuntimeError, match="device lost") as failed:
                llm.generate(PROMPT, good)
        assert "the daemon is away" in str(failed.value.__notes__)
        with pytest.raises(ConnectionLostError, match="the daemon is away"):
            llm.generate(PROMPT, good)
        isaway = False
        assert llm.generate(PROMPT, good)[0].outputs[0].text == "good text"


def test_when_the_thread_ends_all_that_wait_get_the_reason(model, tokenizer, small_daemon, monkeypatch) -> None:
    """An error where none can be, here of a request's output, ends the thread of AsyncLLM."""

    def broken(_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def scenario() -> list[RequestOutput | Exception]:
        async with AsyncLLM(model, tokenizer, address=small_daemon.address) as llm:
            monkeypatch.setattr(EngineRequest, "output", broken)
            waiting = [last(llm.generate(PROMPT, saying(tokenizer, "good text"))) for _ in range(3)]
            return [*await asyncio.gather(*waiting), await last(llm.generate(PROMPT))]

    for error in asyncio.run(scenario()):
        assert isinstance(error, FailedPreconditionError)
        assert "ZeroDivisionError('a bug')" in str(error)
    assert_all_is_free(small_daemon)


def refused_in_a_fork(call: Any) -> bool:
    """Return whether a call is refused at once in a process that is forked here, with the reason."""
    pid = os.fork()
    if pid == 0:
        gc.freeze()  # what is collected at the end of a fork takes seconds
        signal.alarm(60)
        try:
            call()
        except FailedPreconditionError as error:
            os._exit("forked" not in str(error))
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Forking:
    """A view that forks while the engine generates and holds its locks."""

    def __init__(self, *calls: Any) -> None:
        self._calls, self.refused = calls, list[bool]()

    def update(self, *_: object) -> None:
        if not self.refused:
            self.refused = [refused_in_a_fork(call) for call in self._calls]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_a_fork_of_the_engines_process_is_refused_at_once(model, tokenizer, small_daemon) -> None:
    """There it would wait for threads that a fork has not, and for locks that these hold."""
    params = SamplingParams(temperature=0, max_tokens=5)

    async def scenario() -> list[int]:
        async with AsyncLLM(model, tokenizer, address=small_daemon.address) as engine:
            assert refused_in_a_fork(lambda: anext(engine.generate([3, 4], params)).__await__().__next__())
            return [tokens(output) async for output in engine.generate([3, 4], params)][-1]

    with LLM(model, tokenizer, address=small_daemon.address) as llm:
        (expected,) = llm.generate([[3, 4]], params)
        messages = [{"role": "user", "content": "a"}]
        view = Forking(lambda: llm.generate([[3, 4]], params), lambda: llm.chat(messages), llm.finish_resumed)
        (output,) = llm.generate([[3, 4]], params, progress=view)
        assert view.refused == [True] * 3
        assert tokens(output) == tokens(expected)
    assert asyncio.run(scenario()) == tokens(expected)
