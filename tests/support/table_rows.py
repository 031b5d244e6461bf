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


class TableRows:
    """The rows of a table. Leaving the context fails with the failures of all rows.

    with TableRows() as rows:
        for name, value in TABLE.items():
            with rows.row(name):
                check(value)
    """

    def __init__(self) -> None:
        self._failures: list[BaseException] = []

    def __enter__(self) -> TableRows:
        return self

    @contextlib.contextmanager
    def row(self, *name: object) -> Iterator[None]:
        """Run the checks of one row. If they fail, the next row is checked nevertheless."""
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            failure.add_note(f"in the row {', '.join(map(str, name))}")
            self._failures.append(failure)

    def __exit__(self, error: object, *_: object) -> None:
        if error is None and self._failures:
            raise BaseExceptionGroup("rows of the table that failed", self._failures)
