"""The progress bar of `LLM.generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvservice.client import EngineBatch, Step
from kvservice.engines.requests import EngineRequest


class ProgressView(Protocol):
    """Gets the state after each step. `batch` is the last one, None before the first."""

    def update(self, requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None) -> None: ...


class ProgressBar:
    """A bar that counts finished requests and generated tokens."""

    def __init__(self, progress: Progress, num_requests: int) -> None:
        self._progress = progress
        self._task = progress.add_task("requests", total=num_requests, tokens=0)

    def update(self, requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None) -> None:  # noqa: ARG002
        tokens = sum(sample.num_generated for request in requests for sample in request.samples)
        finished = sum(request.finished for request in requests)
        self._progress.update(self._task, completed=finished, tokens=tokens)


@contextmanager
def progress_bar(num_requests: int) -> Iterator[ProgressView]:
    """Yield a progress bar on standard error."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        yield ProgressBar(progress, num_requests)
