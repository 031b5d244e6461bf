"""Tables of inputs in one test: all rows run, and the failure shows each row that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest


@contextmanager
def each_row() -> Iterator[Callable[[object], AbstractContextManager[None]]]:
    """Yield `row`, a context for what is done with one row. What fails in rows is raised at the end, with their names.

    A row that is skipped does not skip the others. If none fails, the test counts as skipped, with the row's reason.
    """
    failures: list[BaseException] = []
    skips: list[str] = []

    @contextmanager
    def row(name: object) -> Iterator[None]:
        try:
            yield
        except pytest.skip.Exception as skip:
            skips.append(f"the row {name!r} alone: {skip}")
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"in the row {name!r}")
            failures.append(error)

    yield row
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} rows failed", failures)
    if skips:
        pytest.skip("; ".join(skips))
