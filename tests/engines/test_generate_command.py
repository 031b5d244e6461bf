"""`kvservice generate`, as a user sees it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from click import Command
from click.testing import CliRunner, Result
from each_row import each_row
from socket_owner import owner_of
from transfer_rig import is_gone
from waiting import until

from kvservice.cli import main
from kvservice.commands import generate
from kvservice.engines import LLM, CompletionOutput, RequestOutput, SamplingParams, TokenLogprob
from kvservice.owned import OwnedFolder


@pytest.fixture
def run(directory, engine_daemon):
    """Run the command in this process, on the tiny model and the shared daemon."""

    def call(prompts: str | bytes, *options: str, env: dict[str, str] | None = None) -> Result:
        given = ["--model", str(directory), "--address", engine_daemon.address, "--prompts", "-", *options]
        return CliRunner().invoke(main, ["generate", *given], input=prompts, env=env)

    return call


def test_lines_are_texts_or_json_with_parameters(run, alone) -> None:
    lines = ["w5 w6", '"w7 w8"', "[9, 10]", '{"prompt": [11], "max_tokens": 3}', "", '{"prompt": "w30", "n": 2}']
    done = run("\n".join(lines), "--json", "--temperature", "0", "--max-tokens", "6")
    assert done.exit_code == 0, done.output
    outputs = [json.loads(line) for line in done.stdout.splitlines()]
    prompts, lengths = [[5, 6], [7, 8], [9, 10], [11], [30]], [6, 6, 6, 3, 6]
    assert [output["prompt"] for output in outputs] == ["w5 w6", "w7 w8", None, None, "w30"]
    assert [output["prompt_token_ids"] for output in outputs] == prompts
    expected = [alone(prompt, length) for prompt, length in zip(prompts, lengths, strict=True)]
    assert [output["outputs"][0]["token_ids"] for output in outputs] == expected
    assert [len(output["outputs"]) for output in outputs] == [1, 1, 1, 1, 2]
    assert outputs[0]["outputs"][0]["finish_reason"] == "length"
    assert re.search(r"5 requests, 33 tokens in \d+\.\d s", done.stderr)


def test_as_text_every_output_is_a_line(run, alone) -> None:
    done = run("w5 w6\n", "--temperature", "0", "--max-tokens", "2")
    text = "".join(f" w{token}" for token in alone([5, 6], 2))
    assert done.stdout == f"[1] w5 w6\n    -> {text}  (length)\n"


def test_with_proposals_the_acceptance_rate_is_shown(run) -> None:
    done = run("w5 w6 w5 w6 w5\n", "--temperature", "0", "--max-tokens", "20", "--lookup", "3")
    assert re.search(r"\d+ of \d+ proposals accepted \(\d+%\)", done.stderr), done.output


def test_with_a_journal_the_command_finishes_what_was_begun(run, directory, engine_daemon, alone, tmp_path) -> None:
    class StopError(Exception): ...

    class Stopping:
        def update(self, *_: object) -> None:
            raise StopError

    journal = tmp_path / "journal"
    with LLM(directory, address=engine_daemon.address, journal=journal) as llm, pytest.raises(StopError):
        llm.generate([[5, 6], [7, 8]], SamplingParams(temperature=0, max_tokens=20), progress=Stopping())
    done = run("ignored\n", "--json", "--journal", str(journal))
    outputs = [json.loads(line)["outputs"][0]["token_ids"] for line in done.stdout.splitlines()]
    assert outputs == [alone([5, 6], 20), alone([7, 8], 20)]
    again = run("[9, 10]\n", "--json", "--journal", str(journal), "--temperature", "0", "--max-tokens", "3")
    assert json.loads(again.stdout)["outputs"][0]["token_ids"] == alone([9, 10], 3)
    (line,) = journal.read_text().splitlines()
    assert set(json.loads(line)) == {"session", "model"}


WRONG: list[tuple[str | bytes, tuple[str, ...], str]] = [
    ("{\n", (), "line 1 of the prompts: no JSON"),
    ("[" * 100_000, (), "line 1 of the prompts: no JSON"),
    ('w5\n\n{"promt": "w5"}\n', (), 'line 3 of the prompts: there is no "prompt"'),
    ('w5\n{"prompt": 5}\n', (), "line 2 of the prompts: the prompt must be a text or a list of token ids"),
    ('"\\ud800"\n', (), "line 1 of the prompts: prompt: has a surrogate"),
    ('{"prompt": "w5", "stop": 5}\n', (), "line 1 of the prompts: stop: must be"),
    ('{"prompt": "w5", "logit_bias": [1]}\n', (), "line 1 of the prompts: logit_bias: must"),
    ('{"prompt": "w5", "logit_bias": {"x": 1}}\n', (), "line 1 of the prompts: logit_bias: must"),
    (b"w\xff5\n", (), "the prompts in <stdin> are not UTF-8"),
    ("w5\nw\0\n", (), "line 2 of the prompts: has a NUL byte: <stdin> is no text file"),
    ("\n\n", (), "there are no prompts in <stdin>"),
    ("", ("--prompts", "/dev/null"), "there are no prompts in /dev/null"),
    ("", ("--prompts", "/"), "'/': Is a directory"),
    ("", ("--prompts", "/absent"), "'/absent': No such file"),
    ("", ("--prompts", "/proc/self/mem"), "the prompts in /proc/self/mem cannot be read: "),
    ("", ("--prompts", "/dev/zero"), "the prompts in /dev/zero are more than 200000 characters"),
    ("w5\n", ("--dtype", "bogus"), "'bogus' is not one of"),
    ("w5\n", ("--num-blocks", "9"), "--address and --num-blocks exclude each other"),
    ("w5\n", ("--draft-tokens", "2"), "--draft-tokens needs --draft-model"),
    ("w5\n", ("--address", ""), "--address must not be empty"),
    ('{"prompt": "w5", "top_q": 1}\n', (), "top_q: is not a sampling parameter"),
    ('{"prompt": "w5", "top_p": 2}\n', (), "top_p: must be a number from 0 to 1"),
    ("w5\n[512]\n", ("--address", "unix:/absent"), "line 2 of the prompts: prompt: 512 is not in the vocabulary"),
    ("w5\n", ("--n", "0"), "Error: --n: must be a whole number"),
    ("w5\n", ("--chat", "--n", "0"), "Error: --n: must be a whole number"),
    ("w5\n", ("--stop-token-id", "-1"), "Error: --stop-token-id: "),
    ('{"prompt": "w5", "n": 0}\n', ("--n", "1"), "line 1 of the prompts: n: must be a whole number"),
    ("w5\n", ("--max-tokens", "5000"), "the pool can never give more than 64"),
    ("w5\n", ("--model", "/absent"), "/absent is not a directory with a model"),
    ("w5\n", ("--lookup", "2", "--draft-model", "/absent"), "exclude each other"),
]


def test_wrong_input_is_an_error_in_plain_words(run, monkeypatch) -> None:
    monkeypatch.setattr(generate, "MAX_CHARACTERS", 200_000)
    with each_row() as row:
        for prompts, options, said in WRONG:
            with row((prompts[:40], options)):
                done = run(prompts, *options)
                assert done.exit_code != 0
                assert said in done.output
                assert done.stdout == "" or "Error" in done.stdout


def test_a_file_may_begin_with_a_byte_order_mark(run) -> None:
    done = run(b"\xef\xbb\xbf[5, 6]\r\nw7\r\n", "--json", "--max-tokens", "1")
    assert [json.loads(line)["prompt_token_ids"] for line in done.stdout.splitlines()] == [[5, 6], [7]]


def test_standard_streams_may_be_closed() -> None:
    """As by a supervisor. The command says what it misses, where it can."""
    command = f"{sys.executable} -P -m kvservice generate --prompts -"
    for closing, status, said in (("<&-", 1, "there are no prompts in"), ("<&- >&- 2>&-", 1, "")):
        done = subprocess.run(["sh", "-c", f"{command} {closing}"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr.count("\n")) == (status, len(said) > 0)
        assert said in done.stderr


def test_a_full_disk_below_standard_output_is_named(run, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(generate, "_print", full)
    done = run("w5\n", "--max-tokens", "1")
    assert (done.exit_code, done.output.strip()) == (1, "Error: standard output: No space left on device")


def test_failed_requests_are_an_error_at_the_end(run) -> None:
    nothing = {str(token): float("-inf") for token in range(512)}
    lines = [json.dumps({"prompt": "w5", "logit_bias": nothing}), "w6"]
    done = run("\n".join(lines), "--json", "--max-tokens", "1")
    assert done.exit_code == 1
    errors = [json.loads(line)["error"] for line in done.stdout.splitlines()]
    assert "not finite" in errors[0]
    assert errors[1] is None
    assert "1 of 2 requests failed" in done.stderr


def test_a_number_that_is_not_finite_is_null(run, monkeypatch) -> None:
    """A model can exclude tokens by itself."""
    excluded = TokenLogprob(float("-inf"), 512, "w5")
    one = CompletionOutput(0, "w5", (5,), float("-inf"), ({5: excluded},), "length")
    monkeypatch.setattr(LLM, "generate", lambda *_, **__: [RequestOutput(0, "w5", (5,), (one,), True)])
    done = run("w5\n", "--json")
    (output,) = (json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines())
    assert output["outputs"][0]["cumulative_logprob"] is None
    assert output["outputs"][0]["logprobs"] == [{"5": {"logprob": None, "rank": 512, "decoded_token": "w5"}}]


def test_every_sampling_parameter_has_an_option() -> None:
    command: Command = main.commands["generate"]
    options = {parameter.name for parameter in command.params}
    left_out = {"logit_bias", "logits_processors", "skip_special_tokens"}  # for lines of JSON, and for programs
    assert {field.name for field in dataclasses.fields(SamplingParams)} - left_out <= options


@pytest.mark.slow
def test_the_command_has_a_model_and_a_daemon_of_its_own(tmp_path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("Hello\nGood day\n")
    command = [sys.executable, "-P", "-m", "kvservice", "generate", "--prompts", str(prompts), "--temperature", "0"]
    done = subprocess.run([*command, "--json", "--num-blocks", "32"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    outputs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [output["prompt"] for output in outputs] == ["Hello", "Good day"]
    assert [len(output["outputs"][0]["token_ids"]) for output in outputs] == [16, 16]


@pytest.mark.slow
@pytest.mark.third
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_a_command_that_is_ended(number, tmp_path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("Hello\n" * 1000)
    command = [sys.executable, "-P", "-m", "kvservice", "generate", "--prompts", str(prompts), "--ignore-eos"]
    # The paths of sockets are short.
    with OwnedFolder("kv-") as folder:
        environ = os.environ | {"TMPDIR": str(folder)}
        with subprocess.Popen([*command, "--max-tokens", "400"], env=environ, stderr=subprocess.DEVNULL) as running:
            until(lambda: list(folder.glob("kvservice-*/kvservice.sock.fds")))
            daemon = owner_of(next(folder.glob("kvservice-*/kvservice.sock.fds")))
            running.send_signal(number)
            assert running.wait() == -number
        until(lambda: is_gone(daemon) and not list(folder.glob("kvservice-*")))


# An engine with a draft model, whose context a fork leaves, one that is dropped, and one that nobody closes.
ENGINES = """
import os, sys, time
from pathlib import Path
from kvservice.engines import LLM, DraftModel, SamplingParams
from kvservice.demo.model import build_model

def folders():
    return list(Path(os.environ["TMPDIR"]).glob("kvservice-*"))

params, options = SamplingParams(max_tokens=4, temperature=0), {"daemon": {"num_blocks": 32}}
with LLM(build_model(), speculation=DraftModel(build_model(), 2), **options) as llm:
    alike = llm.generate([[1, 2, 3]], params)
    if os.fork() == 0:
        llm.close()
        os._exit(0)
    assert os.wait()[1] == 0
    assert llm.generate([[1, 2, 3]], params)[0].outputs == alike[0].outputs
assert folders() == []
llm = LLM(build_model(), **options)
assert len(folders()) == 1
del llm
while folders():
    time.sleep(0.01)
llm = LLM(build_model(), **options)
"""


@pytest.mark.slow
@pytest.mark.third
def test_nothing_is_left_of_an_engine() -> None:
    with OwnedFolder("kv-") as folder:
        command = [sys.executable, "-P", "-c", ENGINES]
        done = subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, timeout=300, check=False)
        assert done.returncode == 0
        until(lambda: not list(folder.glob("kvservice-*")))


def test_on_a_terminal_the_queues_are_shown(run) -> None:
    """Requests of 300 tokens take longer than the time between two views."""
    options = ["--temperature", "0", "--max-tokens", "300", "--ignore-eos", "--lookup", "3"]
    terminal = {"FORCE_COLOR": "1", "COLUMNS": "120", "TERM": "xterm"}
    done = run("w5 w6 w5 w6 w5\nw7\nw8\n", *options, env=terminal)
    assert done.exit_code == 0, done.output
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", done.stderr)
    assert re.search(r"0/3 finished +waiting \d+ +running [123] +swapped 0 +\d+ tokens, \d+/s", shown)
    assert re.search(r"3/3 finished .* 900 tokens, \d+/s +accepted \d+ of \d+ proposals \(\d+%\)", shown)
    assert re.search(r"request \d+ .* 5 \+ \d+/300", shown)
