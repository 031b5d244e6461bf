"""Tables in one test: all rows are tried, and the test fails with each row that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest


@contextlib.contextmanager
def rows() -> Iterator[Callable[[object], AbstractContextManager[None]]]:
    """Give out `row(name)`, the context in which a row is tried. The errors of all rows are raised at the end.

    with rows() as row:
        for name, (argument, expected) in TABLE.items():
            with row(name):
                assert call(argument) == expected
    """
    failures: list[BaseException] = []

    @contextlib.contextmanager
    def row(name: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"in the row {name}")
            failures.append(error)

    yield row
    if failures:
        raise BaseExceptionGroup("some rows of the table failed", failures)
