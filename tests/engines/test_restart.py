"""The engine survives its own kill, and the daemon's."""

from __future__ import annotations

import asyncio
import json
import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from each_row import each_row
from socket_owner import owner_of
from transformers import AutoModelForCausalLM

from kvservice.cli import main
from kvservice.client import KVClient, Session
from kvservice.engines import LLM, AsyncLLM, ModelRunner, PromptLookup, RequestOutput, SamplingParams
from kvservice.errors import FailedPreconditionError, InvalidArgumentError, OutOfBlocksError
from kvservice.integrations.transformers import pool_options
from kvservice.launch import Daemon

GREEDY = SamplingParams(temperature=0, max_tokens=40)
# Forks an engine for each line of its input, and answers with the exit code. An engine kills itself when it has made
# `num_steps` steps. Only this process imports what takes seconds.
DOOMED = """
import json, os, signal, sys, torch
from kvservice.engines import LLM, ModelRunner, SamplingParams

def work(directory, address, journal, prompts, params, num_steps):
    inner, done = ModelRunner.run, 0

    def run(runner, *step):
        nonlocal done
        done += 1
        if done > num_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(runner, *step)

    ModelRunner.run = run
    LLM(directory, address=address, journal=journal).generate(prompts, [SamplingParams(**one) for one in params])

torch.set_num_threads(1)
for line in sys.stdin:
    if (child := os.fork()) == 0:
        work(*json.loads(line))
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
RunDoomed = Callable[[Path, Daemon, Path, list[list[int]], list[dict[str, Any]], int], None]


@pytest.fixture(scope="module")
def run_doomed() -> Iterator[RunDoomed]:
    command = [sys.executable, "-P", "-c", DOOMED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run(directory, daemon, journal, prompts, params, num_steps) -> None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps([str(directory), daemon.address, str(journal), prompts, params, num_steps]))
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{-signal.SIGKILL}\n"

        yield run


def before_steps(monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], object]) -> None:
    """Make a call with each step that the model computes, before."""
    inner = ModelRunner.run

    def run(runner: ModelRunner, step: Any, *arguments: Any) -> Any:
        call(step)
        return inner(runner, step, *arguments)

    monkeypatch.setattr(ModelRunner, "run", run)


def computed_positions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Record (sequence, first position, past the last) of all that models compute from now on."""
    computed: list[tuple[int, int, int]] = []

    def note(step: Any) -> None:
        for sequence, query, context in zip(step.sequences, step.query_lens, step.context_lens, strict=True):
            computed.append((sequence.sequence_id, int(context - query), int(context)))

    before_steps(monkeypatch, note)
    return computed


class EndedError(Exception):
    """A view ends the generation."""


class EndsAt:
    """A view that raises an error after a number of steps."""

    def __init__(self, num_steps: int, error: type[BaseException] = EndedError) -> None:
        self.left, self.error = num_steps, error

    def update(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error


@pytest.mark.parametrize("num_steps", [pytest.param(0, marks=pytest.mark.slow), 15])
def test_a_killed_engine_goes_on(
    num_steps, run_doomed, directory, engine_daemon, prompts, alone, tmp_path, monkeypatch
) -> None:
    """Written K/V are not computed again, except the token of each sequence that was in flight."""
    journal = tmp_path / "journal"
    params = [{"temperature": 0, "max_tokens": 5 if at == 0 else 40} for at in range(len(prompts))]
    run_doomed(directory, engine_daemon, journal, prompts, params, num_steps)
    assert journal.stat().st_mode & 0o777 == 0o600
    with LLM(directory, address=engine_daemon.address, journal=journal) as llm:
        assert llm.resumed == list(range(len(prompts)))
        computed = computed_positions(monkeypatch)
        outputs = llm.finish_resumed()
        expected = [alone(prompt, one["max_tokens"]) for prompt, one in zip(prompts, params, strict=True)]
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        if num_steps:
            firsts = {sequence: first for sequence, first, _ in reversed(computed)}
            assert all(first >= len(prompts[sequence]) - 1 for sequence, first in firsts.items())
            assert all(past == first + 1 for _, first, past in computed), "no prompt was computed again"
        assert llm.resumed == []
        (again,) = llm.generate([prompts[1]], GREEDY)
        assert list(again.outputs[0].token_ids) == expected[1]
    with LLM(directory, address=engine_daemon.address, journal=journal) as llm:
        assert llm.resumed == []
    with KVClient(engine_daemon.address) as client:
        assert client.stats().sequences == 0


def test_samples_go_on_with_their_own_random_numbers(directory, engine_daemon, llm, prompts, tmp_path) -> None:
    excluded = dict.fromkeys(range(3, 500, 2), -math.inf)
    params = [GREEDY, SamplingParams(n=3, seed=8, max_tokens=30, logit_bias=excluded)]
    expected = llm.generate(prompts[:2], params)
    journal = tmp_path / "journal"
    first = LLM(directory, address=engine_daemon.address, journal=journal)
    with pytest.raises(EndedError):
        first.generate(prompts[:2], params, progress=EndsAt(7))
    first.close()
    for line in journal.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    with LLM(directory, address=engine_daemon.address, journal=journal) as second:
        outputs = second.finish_resumed()
    assert [output.outputs for output in outputs] == [output.outputs for output in expected]


def interrupt_step(monkeypatch: pytest.MonkeyPatch) -> EndsAt | bool:
    ends = EndsAt(9, KeyboardInterrupt)
    before_steps(monkeypatch, ends.update)
    return False


def interrupt_view(_: pytest.MonkeyPatch) -> EndsAt | bool:
    return EndsAt(9, KeyboardInterrupt)


@pytest.mark.parametrize("interrupt", [interrupt_step, interrupt_view])
def test_an_interrupted_engine_leaves_its_requests_too(
    interrupt, directory, engine_daemon, prompts, alone, tmp_path, monkeypatch
) -> None:
    journal = tmp_path / "journal"
    with LLM(directory, address=engine_daemon.address, journal=journal) as first:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            first.generate(prompts[:2], GREEDY, progress=interrupt(patched))
        for call in (lambda: first.generate(prompts[:1], GREEDY), first.finish_resumed):
            with pytest.raises(FailedPreconditionError, match="was interrupted"):
                call()
    with LLM(directory, address=engine_daemon.address, journal=journal) as second:
        computed = computed_positions(monkeypatch)
        outputs = second.finish_resumed()
    assert [list(output.outputs[0].token_ids) for output in outputs] == [alone(one, 40) for one in prompts[:2]]
    assert all(past == first + 1 for _, first, past in computed), "no prompt was computed again"


def test_a_journal_has_no_requests_that_were_refused(directory, engine_daemon, tmp_path) -> None:
    journal = tmp_path / "journal"
    with (
        LLM(directory, address=engine_daemon.address, journal=journal) as llm,
        pytest.raises(OutOfBlocksError, match="never"),
    ):
        llm.generate([[5] * 3000], GREEDY)
    with LLM(directory, address=engine_daemon.address, journal=journal) as llm:
        assert llm.resumed == []


def test_another_model_does_not_go_on_with_a_journal(
    run_doomed, directory, engine_daemon, prompts, alone, tmp_path
) -> None:
    journal = tmp_path / "journal"
    run_doomed(directory, engine_daemon, journal, prompts[:1], [{"temperature": 0}], 3)
    other = AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.no_grad():
        next(other.parameters()).neg_()
    with pytest.raises(InvalidArgumentError, match="requests of another model") as refused:
        LLM(other, address=engine_daemon.address, journal=journal)
    assert refused.value.field == "journal"
    with LLM(directory, address=engine_daemon.address, journal=journal) as llm:
        (output,) = llm.finish_resumed()
    assert list(output.outputs[0].token_ids) == alone(prompts[0], 16)


def test_ids_of_returned_requests_are_not_used_again(
    run_doomed, directory, engine_daemon, prompts, alone, tmp_path
) -> None:
    """The journal keeps the end of a returned request while another one is not fetched."""
    journal = tmp_path / "journal"
    run_doomed(directory, engine_daemon, journal, prompts[:1], [{"temperature": 0}], 3)
    for prompt in prompts[1:3]:
        with LLM(directory, address=engine_daemon.address, journal=journal) as llm:
            assert llm.resumed == [0]
            (output,) = llm.generate([prompt], GREEDY)
            assert list(output.outputs[0].token_ids) == alone(prompt, 40)
    run_doomed(directory, engine_daemon, journal, prompts[3:5], [{"temperature": 0, "max_tokens": 40}] * 2, 3)
    with LLM(directory, address=engine_daemon.address, journal=journal) as llm:
        outputs = llm.finish_resumed()
    expected = [alone(prompts[0], 16), *(alone(prompt, 40) for prompt in prompts[3:5])]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_an_unfinished_line_of_a_journal_is_removed(
    run_doomed, directory, engine_daemon, prompts, alone, tmp_path
) -> None:
    journal = tmp_path / "journal"
    run_doomed(directory, engine_daemon, journal, prompts[:1], [{"temperature": 0}], 3)
    with journal.open("a") as file:
        file.write('{"ended":0,"tok')
    for _ in range(2):
        first = LLM(directory, address=engine_daemon.address, journal=journal)
        assert first.resumed == [0]
        first.close()
    with LLM(directory, address=engine_daemon.address, journal=journal) as llm:
        (output,) = llm.finish_resumed()
    assert list(output.outputs[0].token_ids) == alone(prompts[0], 16)


@pytest.fixture(scope="module")
def sizes(reference) -> dict[str, object]:
    return {
        **pool_options(reference.config, reference.dtype),
        "num_blocks": 64,
        "block_size": 16,
        "swap_space_gib": 0.01,
    }


def test_a_killed_daemon_costs_a_recomputation(directory, sizes, prompts, alone, tmp_path) -> None:
    """The engine waits for the daemon, and continues each sample with the tokens that it has. Beams begin again."""
    params = [GREEDY] * 3 + [SamplingParams(n=2, seed=4, max_tokens=40), SamplingParams(beam_width=3, max_tokens=20)]
    socket = tmp_path / "kv.sock"
    with Daemon(**sizes, unix_socket=socket) as daemon, LLM(directory, address=daemon.address) as llm:
        expected = llm.generate(prompts[:5], params)
        daemon.process.kill()
        daemon.process.wait()
        with Daemon(**sizes, unix_socket=socket):
            again = llm.generate(prompts[:5], params)
            assert [one.outputs for one in again] == [one.outputs for one in expected]
    assert [list(one.outputs[0].token_ids) for one in again[:3]] == [alone(prompt, 40) for prompt in prompts[:3]]


@pytest.mark.parametrize(("event", "ahead"), [("kill", True), ("upgrade", False)])
def test_the_next_process_of_the_daemon_has_the_kv(
    event, ahead, directory, sizes, prompts, alone, tmp_path, monkeypatch
) -> None:
    """The session goes on, with a new scheduler. Of each request, the tokens past its last full block are computed
    again."""
    socket, happened, sessions = tmp_path / "kv.sock", list[str](), list[Session]()
    open_session = KVClient.session

    def opening(client: KVClient, *arguments: Any, **options: Any) -> Session:
        sessions.append(open_session(client, *arguments, **options))
        return sessions[-1]

    monkeypatch.setattr(KVClient, "session", opening)
    with (
        Daemon(**sizes, unix_socket=socket, keeper=True, session_grace_s=60) as daemon,
        LLM(directory, address=daemon.address, ahead=ahead, client={"reconnect_wait_s": 60.0}) as llm,
    ):
        computed = computed_positions(monkeypatch)

        def replace_daemon(_: object) -> None:
            if len(computed) >= 30 and not happened:
                happened.append(event)
                if event == "kill":
                    os.kill(daemon.daemon_pid(), signal.SIGKILL)
                else:
                    done = CliRunner().invoke(main, ["upgrade", "--unix-socket", str(socket)])
                    assert done.exit_code == 0, done.output

        before_steps(monkeypatch, replace_daemon)
        outputs = llm.generate(prompts[:3], GREEDY)
        (session,) = sessions
        assert session.num_restarts == 1
    assert happened == [event]
    assert [list(one.outputs[0].token_ids) for one in outputs] == [alone(prompt, 40) for prompt in prompts[:3]]
    positions = [(sequence, at) for sequence, first, past in computed for at in range(first, past)]
    assert len(positions) - len(set(positions)) <= 3 * (int(sizes["block_size"]) + 1)


def test_a_restarted_daemon_refuses_one_request_alone(directory, sizes, prompts, alone, tmp_path) -> None:
    """The new daemon's pool is too small for one of the requests. The others go on, also as streams."""
    socket = tmp_path / "kv.sock"
    long = SamplingParams(temperature=0, max_tokens=600)

    async def generate(llm: AsyncLLM, daemon: Daemon, daemons: ExitStack) -> list[list[int] | Exception]:
        streams = [llm.generate(prompts[0], GREEDY), llm.generate(prompts[1], long), llm.generate(prompts[2], GREEDY)]
        for stream in streams:
            await anext(stream)
        daemon.process.kill()
        daemon.process.wait()
        daemons.enter_context(Daemon(**(sizes | {"num_blocks": 16}), unix_socket=socket))
        return [await last(stream) for stream in streams]

    async def last(stream: AsyncIterator[RequestOutput]) -> list[int] | Exception:
        try:
            return [list(output.outputs[0].token_ids) async for output in stream][-1]
        except OutOfBlocksError as error:
            return error

    async def scenario() -> list[list[int] | Exception]:
        # The engine is closed first: without a daemon it would wait for the next one.
        with ExitStack() as daemons:
            daemon = daemons.enter_context(Daemon(**sizes, unix_socket=socket))
            async with AsyncLLM(directory, address=daemon.address) as llm:
                return await generate(llm, daemon, daemons)

    first, refused, third = asyncio.run(scenario())
    assert (first, third) == (alone(prompts[0], 40), alone(prompts[2], 40))
    assert isinstance(refused, OutOfBlocksError)
    assert refused.never


def one_stops_early(llm: LLM, prompt: list[int], index: int) -> tuple[SamplingParams, list[tuple[int, ...]]]:
    """Return parameters with which this one of two samples ends after six tokens and the other goes on, and the tokens
    of both."""
    params: dict[str, Any] = {"n": 2, "seed": 1, "ignore_eos": True, "max_tokens": 40}
    (plain,) = llm.generate([prompt], SamplingParams(**params))
    tokens = [one.token_ids for one in plain.outputs]
    stop = next(token for token in tokens[index][5:] if token not in tokens[1 - index])
    tokens[index] = tokens[index][: tokens[index].index(stop) + 1]
    assert len(tokens[index]) < 10
    return SamplingParams(**params, stop_token_ids=[stop]), tokens


def test_a_daemon_killed_in_the_middle_of_requests(llm, directory, prompts, alone, tmp_path, monkeypatch) -> None:
    """A private daemon is started again. Of one request, a sample is done before."""
    early, early_tokens = one_stops_early(llm, prompts[3], index=0)
    socket, steps = tmp_path / "kv.sock", 0

    def kill(_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == 10:
            pids.append(owner_of(socket))
            os.kill(pids[0], signal.SIGKILL)

    pids: list[int] = []
    with LLM(directory, daemon={"num_blocks": 64, "unix_socket": str(socket)}) as engine:
        with monkeypatch.context() as patched:
            before_steps(patched, kill)
            params = [GREEDY, GREEDY, SamplingParams(n=2, temperature=0, max_tokens=40), early]
            *outputs, last = engine.generate(prompts[:4], params)
        assert owner_of(socket) not in pids
    assert [one.token_ids for one in last.outputs] == early_tokens
    expected = [alone(prompt, 40) for prompt in prompts[:3]]
    assert [[list(one.token_ids) for one in output.outputs] for output in outputs] == [
        [expected[0]], [expected[1]], [expected[2]] * 2
    ]  # fmt: skip
    assert steps > 10


def test_a_journal_goes_on_with_the_samples_that_are_not_done(
    llm, directory, sizes, prompts, tmp_path, monkeypatch
) -> None:
    """The daemon is replaced while one of two samples runs, and the engine afterwards."""
    params, expected = one_stops_early(llm, prompts[3], index=1)
    socket, journal, steps = tmp_path / "kv.sock", tmp_path / "journal", list[int]()
    with ExitStack() as daemons:
        daemon = daemons.enter_context(Daemon(**sizes, unix_socket=socket))

        def replace_daemon(_: object) -> None:
            steps.append(1)
            if len(steps) == 20:
                daemon.process.kill()
                daemon.process.wait()
                daemons.enter_context(Daemon(**sizes, unix_socket=socket))

        before_steps(monkeypatch, replace_daemon)
        first = LLM(directory, address=daemon.address, journal=journal)
        with pytest.raises(EndedError):
            first.generate([prompts[3]], params, progress=EndsAt(30))
        first.close()
        with LLM(directory, address=daemon.address, journal=journal) as second:
            (output,) = second.finish_resumed()
    assert [one.token_ids for one in output.outputs] == expected


def test_what_a_journal_cannot_hold_is_refused(directory, engine_daemon, tmp_path) -> None:
    rows: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"logprobs": 1}, "logprobs"),
        ({}, {"beam_width": 2}, "beam_width"),
        ({}, {"best_of": 2}, "best_of"),
        ({"speculation": PromptLookup()}, {}, "speculation"),
        ({"address": None}, {}, "journal"),
    ]
    given = {"address": engine_daemon.address, "journal": tmp_path / "journal"}
    with each_row() as row:
        for options, params, field in rows:
            with row((options, params)):
                with pytest.raises(InvalidArgumentError) as refused:  # noqa: SIM117
                    with LLM(directory, **given | options) as llm:
                        llm.generate([[5]], SamplingParams(**params))
                assert refused.value.field == field


def test_a_file_that_is_no_journal_is_refused(directory, engine_daemon, tmp_path) -> None:
    path = tmp_path / "journal"
    path.write_text("hello\n")
    with pytest.raises(InvalidArgumentError) as refused:
        LLM(directory, address=engine_daemon.address, journal=path)
    assert refused.value.field == "journal"
    assert path.read_text() == "hello\n"


def test_a_path_that_cannot_be_a_journal_is_refused(directory, engine_daemon, tmp_path) -> None:
    with pytest.raises(InvalidArgumentError, match="is not a regular file"):
        LLM(directory, address=engine_daemon.address, journal="/dev/full")
    with pytest.raises(FailedPreconditionError, match="No such file") as refused:
        LLM(directory, address=engine_daemon.address, journal=tmp_path / "missing" / "journal")
    assert refused.value.field == "journal"


def test_a_full_disk_leaves_whole_lines(directory, engine_daemon, tmp_path, prompts, alone) -> None:
    """The write fails in the middle of a line, here at the limit of the size of files."""
    path = tmp_path / "journal"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with LLM(directory, address=engine_daemon.address, journal=path) as llm:
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, limits[1]))
        try:
            with pytest.raises(FailedPreconditionError, match="File too large") as refused:
                llm.generate(prompts[:1], GREEDY)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert refused.value.field == "journal"
        assert path.read_bytes() == before
        (output,) = llm.generate(prompts[:1], GREEDY)
    assert list(output.outputs[0].token_ids) == alone(prompts[0], 40)
