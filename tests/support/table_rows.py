"""Tables of a test: every row is tried, and all rows that fail are reported by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest


class Rows:
    """`rows[name]` is the context in which a test tries the row of that name."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []

    @contextlib.contextmanager
    def __getitem__(self, name: object) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            failure.add_note(f"in the row {name!r}")
            self.failures.append(failure)


@contextlib.contextmanager
def table() -> Iterator[Rows]:
    """Fail at the end if a row has failed."""
    rows = Rows()
    yield rows
    if len(rows.failures) == 1:
        raise rows.failures[0]
    if rows.failures:
        raise BaseExceptionGroup(f"{len(rows.failures)} rows failed", rows.failures)
