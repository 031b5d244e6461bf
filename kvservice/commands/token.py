"""`kvservice token`: create, list and remove the tokens of a token file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvservice.auth import tokens
from kvservice.auth.tokens import load, parse
from kvservice.errors import KVServiceError

F = TypeVar("F", bound=Callable[..., Any])

_file_option: Callable[[F], F] = click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="KVSERVICE_AUTH_TOKENS",
    required=True,
    show_envvar=True,
    help="The token file, the daemon's --auth-tokens.",
)


@click.group()
def token() -> None:
    """Create, list and remove the tokens with which clients authenticate.

    A token file holds names and hashes, but no tokens. The daemon reloads it when it changes.
    """


@token.command("new")
@click.argument("name")
@_file_option
def new(name: str, file: Path) -> None:
    """Create a token for NAME, add its hash to the file, and print it.

    The token is printed only once and is not stored.
    """
    try:
        made = tokens.add_token(file, name)
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    click.echo(made)


@token.command("list")
@_file_option
def list_names(file: Path) -> None:
    """Print the names in the file."""
    try:
        identities = list(parse(load(file), file))
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
    for identity in identities:
        click.echo(identity.name)


@token.command("remove")
@click.argument("name")
@_file_option
def remove(name: str, file: Path) -> None:
    """Remove the token of NAME from the file.

    The daemon closes the streams that were opened with it, and refuses further calls.
    """
    try:
        tokens.remove_token(file, name)
    except KVServiceError as error:
        raise click.ClickException(str(error)) from None
