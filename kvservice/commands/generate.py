"""`kvservice generate`: generate for the prompts of a file with the engine."""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from kvservice import plain_json
from kvservice.commands import Presented, connection_options, needs
from kvservice.errors import KVServiceError

if TYPE_CHECKING:
    from kvservice.engines import LLM, RequestOutput, SamplingParams

# Sampling parameters with a value: name, type, help.
_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("n", int, "Outputs of each prompt."),
    ("best_of", int, "Samples of each prompt, of which the n likeliest are returned."),
    ("temperature", float, "0 picks the likeliest tokens.  [default: 1.0]"),
    ("top_k", int, "Sample from the k likeliest tokens."),
    ("top_p", float, "Sample from the likeliest tokens with this total probability."),
    ("min_p", float, "Exclude tokens less likely than this share of the likeliest."),
    ("seed", int, "Make samples repeatable."),
    ("repetition_penalty", float, "Divide logits of tokens of prompt and output by this."),
    ("presence_penalty", float, "Subtract this from logits of tokens of the output."),
    ("frequency_penalty", float, "Subtract this for each occurrence in the output."),
    ("max_tokens", int, "Most tokens of each output.  [default: 16]"),
    ("min_tokens", int, "Least tokens of each output."),
    ("logprobs", int, "With --json: log probabilities of the token and of so many likeliest ones."),
    ("priority", int, "Lower is more urgent, with --order priority."),
    ("beam_width", int, "Beam search with so many beams."),
    ("length_penalty", float, "Exponent of the length in the scores of beams.  [default: 1.0]"),
)
_FLAGS = (
    ("ignore_eos", "Go on after the end of the sequence."),
    ("include_stop_str_in_output", "Keep the stop string in the text."),
    ("early_stopping", "End beam search with the first complete beams."),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add an option for each sampling parameter that has a plain value."""
    for name, text in reversed(_FLAGS):
        command = click.option(f"--{name.replace('_', '-')}", is_flag=True, default=None, help=text)(command)
    command = click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, help="End here. Repeatable.")(
        command
    )
    command = click.option("--stop", multiple=True, help="End where the text has this. Repeatable.")(command)
    for name, kind, text in reversed(_VALUES):
        command = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(command)
    return command


@click.command()
@click.option("--model", type=click.Path(file_okay=False), help="Directory of a model.  [default: a tiny random one]")
@click.option("--prompts", type=click.File(encoding="utf-8"), required=True, help="One prompt a line. - is stdin.")
@click.option("--address", help="Use this daemon instead of starting one: its pool must have the model's shape.")
@click.option("--num-blocks", type=click.IntRange(1), help="Blocks of the daemon that is started.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Data type of the model and its K/V.",
)
@click.option("--order", type=click.Choice(["fcfs", "priority"]), default="fcfs", show_default=True)
@click.option("--lookup", type=click.IntRange(0), default=0, help="Propose so many tokens by prompt lookup.")
@click.option("--draft-model", type=click.Path(file_okay=False), help="Directory of a model that proposes tokens.")
@click.option("--draft-tokens", type=click.IntRange(1), help="Its proposals a step.  [default: 4]")
@click.option("--compiled", is_flag=True, help="Compile the model's layers, which takes about half a minute.")
@click.option("--journal", type=click.Path(dir_okay=False), help="Go on after a restart, with --address: a file.")
@click.option("--chat", is_flag=True, help="Lines are conversations, for the tokenizer's chat template.")
@click.option("--special-tokens/--no-special-tokens", default=True, help="Whether texts get those of the tokenizer.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines.")
@sampling_options
@connection_options
def generate(prompts: Any, as_json: bool, chat: bool, special_tokens: bool, presented: Presented, **given: Any) -> None:
    """Generate for the prompts of a file.

    A line is a text, or JSON: a string, a list of token ids, or an object with "prompt" and sampling parameters. With
    --chat it is a user's message, or JSON: a list of messages with "role" and "content", or an object with "messages",
    arguments of LLM.chat such as "tools", and sampling parameters. On a terminal, standard error shows the queues. With
    a journal of unfinished requests, the command finishes these, and leaves the file of prompts alone.
    """
    with needs("transformers"):
        import kvservice.engines  # noqa: F401
    try:
        lines = read_lines(prompts, _parameters(given), chat=chat, special_tokens=special_tokens)
        if not lines and given["journal"] is None:
            raise click.ClickException(f"there are no prompts in {prompts.name}")
        started_s = time.monotonic()
        with _engine(given, presented, lines) as llm, _view() as view:
            outputs = llm.finish_resumed(progress=view)
            if not outputs:
                outputs = llm.generate([line.prompt for line in lines], [line.params for line in lines], progress=view)
        try:
            _print(outputs, as_json, time.monotonic() - started_s)
        except OSError as error:
            if error.errno == errno.EPIPE:  # whoever reads has enough
                raise
            raise click.ClickException(f"standard output: {error.strerror}") from None
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    failed = sum(output.error is not None for output in outputs)
    if failed:
        raise click.ClickException(f"{failed} of {len(outputs)} requests failed")


def _parameters(given: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters among the options."""
    names = [name for name, *_ in _VALUES] + [name for name, _ in _FLAGS] + ["stop", "stop_token_ids"]
    return {name: given[name] for name in names if given[name] not in (None, ())}


@contextmanager
def _engine(given: dict[str, Any], presented: Presented, lines: Sequence[PromptLine]) -> Iterator[LLM]:
    """Check the lines, and start the engine."""
    from transformers.utils import logging

    from kvservice.engines import LLM, DraftModel, PromptLookup
    from kvservice.engines.host import load

    hide_bars: Callable[[], None] = logging.disable_progress_bar
    hide_bars()  # the bars of loading weights would disturb the view
    _check_options(given)
    model, tokenizer = _model(given["model"], given["dtype"])
    check_lines(lines, model, tokenizer)
    speculation: Any = PromptLookup(given["lookup"]) if given["lookup"] else None
    if given["draft_model"]:
        speculation = DraftModel(load(given["draft_model"], given["dtype"])[0], given["draft_tokens"] or 4)
    credentials = presented.at(given["address"])
    with LLM(
        model,
        tokenizer,
        address=given["address"],
        daemon={} if given["num_blocks"] is None else {"num_blocks": given["num_blocks"]},
        client={"tls": credentials.tls, "token": credentials.token},
        scheduler={"order": given["order"]},
        speculation=speculation,
        compiled=given["compiled"],
        journal=given["journal"],
    ) as llm:
        yield llm


def _check_options(given: dict[str, Any]) -> None:
    if given["address"] == "":
        raise click.UsageError("--address must not be empty")
    if given["address"] is not None and given["num_blocks"] is not None:
        raise click.UsageError("--address and --num-blocks exclude each other")
    if given["lookup"] and given["draft_model"]:
        raise click.UsageError("--lookup and --draft-model exclude each other")
    if given["draft_tokens"] is not None and not given["draft_model"]:
        raise click.UsageError("--draft-tokens needs --draft-model")


def _model(directory: str | None, dtype: str) -> tuple[Any, Any]:
    if directory is not None:
        from kvservice.engines.host import load

        return load(directory, dtype)
    from kvservice.demo.model import build_model, build_tokenizer

    return build_model("float32" if dtype == "auto" else dtype), build_tokenizer()


def _view() -> AbstractContextManager[Any]:
    from contextlib import nullcontext

    from rich.console import Console

    from kvservice.engines.llm import live_queues

    console = Console(stderr=True)
    return live_queues(console) if console.is_terminal else nullcontext(False)


def _print(outputs: Sequence[RequestOutput], as_json: bool, elapsed_s: float) -> None:
    from kvservice.engines.samples import error_text

    for number, output in enumerate(outputs, 1):
        if as_json:
            click.echo(plain_json.dumps(_to_json(output)))
            continue
        click.echo(f"[{number}] {output.prompt if output.prompt is not None else list(output.prompt_token_ids)}")
        for one in output.outputs:
            click.echo(f"    -> {one.text or list(one.token_ids)}  ({one.finish_reason})")
        if output.error is not None:
            click.echo(f"    failed: {error_text(output.error)}")
    tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    line = f"{len(outputs)} requests, {tokens} tokens in {elapsed_s:.1f} s"
    proposed = sum(output.num_proposed_tokens for output in outputs)
    if proposed:
        accepted = sum(output.num_accepted_tokens for output in outputs)
        line += f"; {accepted} of {proposed} proposals accepted ({accepted / proposed:.0%})"
    click.echo(line, file=sys.stderr)


def _to_json(output: RequestOutput) -> dict[str, Any]:
    from kvservice.engines.samples import error_text

    values = asdict(replace(output, error=None))  # an exception need not be one that can be copied
    values["error"] = None if output.error is None else error_text(output.error)
    return values


# ---- the lines of a file of prompts, for `kvservice generate`


# Most characters of a file of prompts, which is read as a whole.
MAX_CHARACTERS: Final = 1 << 28


@dataclass(frozen=True)
class PromptLine:
    """A prompt with its parameters. `number` is that of its line, from 1. `options` are the names of the parameters
    that it has from the command line."""

    number: int
    prompt: Any
    params: SamplingParams
    options: frozenset[str]

    def fail(self, error: KVServiceError) -> click.ClickException:
        return _error_in(self.number, error, self.options)


def read_lines(file: TextIO, options: dict[str, Any], *, chat: bool, special_tokens: bool) -> list[PromptLine]:
    """Return the prompts of a file, with `chat` its conversations. Parameters in a line go before the options.

    Raises ClickException naming the file or the number of the line.
    """
    try:
        text = file.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise click.ClickException(f"the prompts in {file.name} are not UTF-8: {error}") from None
    except OSError as error:
        raise click.ClickException(f"the prompts in {file.name} cannot be read: {error.strerror}") from None
    if len(text) > MAX_CHARACTERS:
        raise click.ClickException(f"the prompts in {file.name} are more than {MAX_CHARACTERS} characters: split them")
    numbered = enumerate(text.removeprefix("\ufeff").split("\n"), 1)
    lines = [(number, line) for number, line in numbered if line.strip()]
    for number, line in lines:
        if "\0" in line:
            raise _error(number, f"has a NUL byte: {file.name} is no text file")
    if chat:
        return [_parse_chat(number, line, options) for number, line in lines]
    return [_parse(number, line, options, special_tokens) for number, line in lines]


def check_lines(lines: Sequence[PromptLine], model: Any, tokenizer: Any) -> None:
    """Check all prompts against a model. Raises ClickException with the number of the line."""
    from kvservice.engines.prompts import ModelLimits, check_prompt

    limits = ModelLimits.of(model, 2**31)
    for line in lines:
        try:
            check_prompt(line.prompt, line.params, limits, tokenizer)
        except KVServiceError as error:
            raise line.fail(error) from None


def _parse(number: int, line: str, options: dict[str, Any], special_tokens: bool) -> PromptLine:
    from kvservice.engines import SamplingParams
    from kvservice.engines.prompts import Verbatim

    prompt, values = _values(number, line, "prompt")
    if not isinstance(prompt, str | list):
        raise _error(number, "the prompt must be a text or a list of token ids")
    if isinstance(prompt, str) and not special_tokens:
        prompt = Verbatim(prompt)
    given = frozenset(options) - values.keys()
    try:
        return PromptLine(number, prompt, SamplingParams.of(options | values), given)
    except KVServiceError as error:
        raise _error_in(number, error, given) from None


def _parse_chat(number: int, line: str, options: dict[str, Any]) -> PromptLine:
    from kvservice.engines import SamplingParams
    from kvservice.engines.prompts import ChatArguments, conversations_of

    messages, values = _values(number, line, "messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    arguments: Any = {name: values.pop(name) for name in ChatArguments.__annotations__ if name in values}
    given = frozenset(options) - values.keys()
    try:
        conversations = conversations_of(messages, arguments)
        if len(conversations) != 1:
            raise _error(number, "a line has one conversation")
        return PromptLine(number, conversations[0], SamplingParams.of(options | values), given)
    except KVServiceError as error:
        raise _error_in(number, error, given) from None


def _values(number: int, line: str, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of a line, which has this name in objects, and its parameters."""
    if line.lstrip()[0] not in '{["':
        return line, {}
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _error(number, f"no JSON: {error}") from None
    if not isinstance(value, dict):
        return value, {}
    if name not in value:
        hint = ": --chat reads conversations" if "messages" in value else ""
        raise _error(number, f'there is no "{name}"{hint}')
    prompt = value.pop(name)
    if isinstance(value.get("logit_bias"), dict):
        value["logit_bias"] = {_token(token): bias for token, bias in value["logit_bias"].items()}
    return prompt, value


def _token(name: str) -> int | str:
    """Return the token id that is a key in JSON. Other keys stay, and SamplingParams refuses them."""
    return int(name) if name.isdecimal() else name


def _error_in(number: int, error: KVServiceError, options: frozenset[str]) -> click.ClickException:
    """Return the error for a line, or for an option of the command line if that is what is wrong."""
    name = error.field.partition("[")[0]
    if name in options:
        flag = "stop_token_id" if name == "stop_token_ids" else name
        return click.UsageError(f"--{flag.replace('_', '-')}: {error.message}")
    return _error(number, error)


def _error(number: int, reason: object) -> click.ClickException:
    return click.ClickException(f"line {number} of the prompts: {reason}")
