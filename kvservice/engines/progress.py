"""The view in a terminal while an engine works: a progress bar, or the queues and the requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from kvservice.client import EngineBatch, Step
from kvservice.engines.requests import EngineRequest

_MAX_ROWS: Final = 12
_REFRESH_S: Final = 0.1
_BAR_WIDTH: Final = 32


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


class LiveQueues:
    """Shows the queues, the rate of tokens, the share of accepted proposals, and the requests in progress."""

    def __init__(self, show: Callable[[RenderableType], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._show, self._clock = show, clock
        self._started_s = self._shown_s = clock()

    def update(self, requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None) -> None:
        now_s = self._clock()
        over = all(request.finished for request in requests)
        if over or now_s - self._shown_s >= _REFRESH_S:
            self._shown_s = now_s
            self._show(Group(queues(requests, batch, now_s - self._started_s), _bars(requests)))


def queues(requests: Sequence[EngineRequest], batch: EngineBatch[Step] | None, elapsed_s: float) -> Text:
    """Return one line: the queues, what was generated in `elapsed_s` seconds, and the acceptance rate."""
    tokens = sum(sample.num_generated for request in requests for sample in request.samples)
    finished = sum(request.finished for request in requests)
    line = Text(f"{finished}/{len(requests)} finished", style="bold")
    if batch is not None:
        line.append(f"   waiting {batch.waiting}  running {batch.running}  swapped {batch.swapped}", style="cyan")
        if batch.num_stalled:
            line.append(f"  stalled {batch.num_stalled}", style="yellow")
    line.append(f"   {tokens} tokens, {tokens / max(elapsed_s, 1e-9):.0f}/s")
    proposed = sum(request.num_proposed for request in requests)
    if proposed:
        accepted = sum(request.num_accepted for request in requests)
        line.append(f"   accepted {accepted} of {proposed} proposals ({accepted / proposed:.0%})", style="green")
    return line


def _bars(requests: Sequence[EngineRequest]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    running = [request for request in requests if not request.finished]
    for request in running[:_MAX_ROWS]:
        done, total = request.samples[0].num_generated, request.prompt.max_tokens
        table.add_row(
            f"request {request.request_id}",
            Bar(total, done, width=_BAR_WIDTH, complete_style="green"),
            f"{request.samples[0].prompt_length} + {done}/{total}",
        )
    if len(running) > _MAX_ROWS:
        table.add_row(f"and {len(running) - _MAX_ROWS} more")
    return table


@contextmanager
def live_queues(console: Console) -> Iterator[ProgressView]:
    """Yield a view on a terminal."""
    with Live(console=console, auto_refresh=False) as live:
        yield LiveQueues(lambda shown: live.update(shown, refresh=True))
