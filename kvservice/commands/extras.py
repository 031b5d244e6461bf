"""Packages that only some commands need, and how to get them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click


@contextlib.contextmanager
def needs(extra: str) -> Iterator[None]:
    """Report a missing package as an error of the user, with the extra of kvservice that has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "kvservice":
            raise
        message = f"the package {error.name} is missing; `pip install '.[{extra}]'` in kvservice's source installs it"
        raise click.ClickException(message) from None
