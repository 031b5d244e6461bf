"""The lines of a file of prompts, for `kvservice generate`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

import click

from kvservice.errors import KVServiceError

if TYPE_CHECKING:
    from kvservice.engines import SamplingParams

# Most characters of a file of prompts, which is read as a whole.
MAX_CHARACTERS: Final = 1 << 28


@dataclass(frozen=True)
class PromptLine:
    """A prompt with its parameters. `number` is that of its line, from 1."""

    number: int
    prompt: Any
    params: SamplingParams

    def fail(self, reason: object) -> click.ClickException:
        return _error(self.number, reason)


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
    try:
        return PromptLine(number, prompt, SamplingParams.of(options | values))
    except KVServiceError as error:
        raise _error(number, error) from None


def _parse_chat(number: int, line: str, options: dict[str, Any]) -> PromptLine:
    from kvservice.engines import SamplingParams
    from kvservice.engines.prompts import ChatArguments, conversations_of

    messages, values = _values(number, line, "messages")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    arguments: Any = {name: values.pop(name) for name in ChatArguments.__annotations__ if name in values}
    try:
        conversations = conversations_of(messages, arguments)
        if len(conversations) != 1:
            raise _error(number, "a line has one conversation")
        return PromptLine(number, conversations[0], SamplingParams.of(options | values))
    except KVServiceError as error:
        raise _error(number, error) from None


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


def _error(number: int, reason: object) -> click.ClickException:
    return click.ClickException(f"line {number} of the prompts: {reason}")
