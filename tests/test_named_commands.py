"""Commands that documents, help texts and errors name: they are there, with their options, files and extras."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvservice.cli import main
from kvservice.commands import needs

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", ".github/*.md", "csrc/*.md", "deploy/**/*.md", "proto/*.md", "kvservice/**/*.md")
    for path in ROOT.glob(pattern)
)
SOURCES = sorted((ROOT / "kvservice").rglob("*.py"))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
COMMAND = re.compile(r"(sudo )?(\w+=\S+ )*(\S*/)?(kvservice|pip|python3?|docker|kubectl|pytest) ")
# The input of a hash begins like a command.
NO_COMMANDS = {"kvservice chain root, block size N"}


def quoted(path: Path) -> Iterator[str]:
    """Yield the lines of code blocks, and what stands between backquotes in a document, or in the texts of a module."""
    text = path.read_text()
    if path.suffix == ".py":
        text = "\n\n".join(texts(ast.parse(text)))
    else:
        code = re.compile(r"```\w*\n(.*?)```|((?:^ {4}\S.*\n)+)", re.DOTALL | re.MULTILINE)
        for block in code.findall(text):
            for line in "".join(block).replace("\\\n", " ").splitlines():
                yield re.split(r"\s#\s", line)[0].strip()
        text = re.sub("```.*?```", "", text, flags=re.DOTALL)
    yield from (" ".join(span.split()) for span in re.findall("`([^`]+)`", text))


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module. A value in an f-string becomes NAME."""
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(node.values)
            yield "".join(one.value if isinstance(one, ast.Constant) else "NAME" for one in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.value


@functools.cache
def named() -> list[tuple[str, str]]:
    """Return the file and the text of each command."""
    found = []
    for path in [*DOCUMENTS, *SOURCES]:
        for line in quoted(path):
            for command in (part.strip(" ()") for part in re.split(r"&&|;|\||(?<=\s)>", line)):
                if COMMAND.match(f"{command} ") and command not in NO_COMMANDS:
                    found.append((str(path.relative_to(ROOT)), command))
    return found


def check(command: str) -> None:
    """Raise an error if a command cannot work in a checkout."""
    words = [word for word in shlex.split(re.sub(r"(?<!\S)\[|\](?!\S)", "", command)) if word not in ("...", "sudo")]
    while "=" in words[0]:
        words.pop(0)
    program, *arguments = words
    program = program.rpartition("/")[2]
    if program == "kvservice":
        check_ours(arguments)
    elif program == "pip":
        check_pip(arguments)
    elif program.startswith("python") and arguments[:1] == ["-m"] and arguments[1].startswith("kvservice"):
        spec = importlib.util.find_spec(arguments[1])
        assert spec is not None, f"there is no module {arguments[1]}"
        assert spec.origin is not None
        for option in (one for one in arguments[2:] if one.startswith("--")):
            assert f'"{option}"' in Path(spec.origin).read_text(), option
    else:
        files = [word for word in arguments if re.fullmatch(r"(deploy|proto|tests|kvservice|csrc)/\S+", word)]
        assert [file for file in files if not (ROOT / file).exists()] == []


def check_ours(arguments: list[str]) -> None:
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        assert arguments[0] in command.commands, f"there is no command {arguments[0]}"
        command = command.commands[arguments.pop(0)]
        context = click.Context(command, info_name=command.name, parent=context)
    # A command in a text may lack the value of its last option.
    given = arguments if not arguments or not arguments[-1].startswith("--") else [*arguments, "VALUE"]
    values, _, order = command.make_parser(context).parse_args(given)
    for option in order:
        if isinstance(option.type, click.Choice) and values[option.name] != "VALUE":
            option.type_cast_value(context, values[option.name])


def check_pip(arguments: list[str]) -> None:
    """The package is in no index, so that only its source can be installed."""
    installed = [word for word in arguments[1:] if not word.startswith("-")]
    for word in installed:
        assert not word.startswith("kvservice"), f"{word} is in no index"
        if extra := re.fullmatch(r"\.\[(\w+)\]", word):
            assert extra[1] in EXTRAS | {"NAME"}, f"there is no extra {extra[1]}"


def failed(command: str) -> str:
    try:
        check(command)
    except (AssertionError, click.ClickException) as error:
        return f"{command}: {error.format_message() if isinstance(error, click.ClickException) else error}"
    return ""


def test_commands_can_work() -> None:
    assert len(named()) > 100
    assert [f"{path}: {why}" for path, command in named() if (why := failed(command))] == []


@pytest.mark.parametrize(
    "command",
    [
        "kvservice serves",
        "kvservice bench blocks --fast",
        "kvservice demo --dtype int8",
        "pip install '.[everything]'",
        "pip install 'kvservice[demo]'",
        "python -m kvservice.nothing",
        "python -m kvservice.mooncake.node --port 1",
        "docker compose -f deploy/nothing.yml up",
    ],
)
def test_commands_that_cannot_work_are_found(command: str) -> None:
    assert failed(command)


def test_extras_that_are_named_exist() -> None:
    calls = (node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    needed = {ast.literal_eval(call.args[0]) for call in calls if ast.unparse(call.func) == "needs"}
    text = "".join(path.read_text() for path in [*DOCUMENTS, *SOURCES])
    assert needed >= {"demo", "torch", "transformers"}
    assert needed | set(re.findall(r"kvservice\[(\w+)\]", text)) <= EXTRAS


def test_the_error_of_a_missing_package_says_what_installs_it() -> None:
    with pytest.raises(click.ClickException) as refused, needs("demo"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    (command,) = re.findall("`(.*?)`", refused.value.message)
    assert shlex.split(command) == ["pip", "install", ".[demo]"]
    check(command)
