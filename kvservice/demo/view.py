"""What the demo shows: on a terminal a live map of the pool and the sequences, elsewhere lines, or nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvservice.client import PoolStats
from kvservice.demo.engine import Generation

# State of a block, its sign and its colour.
_BLOCKS = (("active", "█", "green"), ("shared", "▓", "cyan"), ("cached", "▒", "yellow"), ("free", "·", "bright_black"))
_STATES = {"running": "green", "swapped out": "magenta", "complete": "bright_black"}
# The demo is faster than the eye.
_LIVE_PAUSE_S = 0.04
_LINE_EVERY_STEPS = 8


class View(Protocol):
    def update(self, step: int, what: str, generations: Sequence[Generation], stats: PoolStats) -> None: ...


@contextmanager
def view(console: Console) -> Iterator[View]:
    """A live view if the console is a terminal, else lines."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _LiveMap(live)


class _LiveMap:
    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, step: int, what: str, generations: Sequence[Generation], stats: PoolStats) -> None:
        heading = Text.assemble((f"step {step:3}  ", "bold"), what)
        self._live.update(Group(heading, pool_map(stats), _progress(generations)), refresh=True)
        time.sleep(_LIVE_PAUSE_S)


class _Lines:
    """Every event, and each eighth step of nothing but decoding."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def update(self, step: int, what: str, generations: Sequence[Generation], stats: PoolStats) -> None:
        decoding_only = what.startswith("decoded") and "copied" not in what
        if decoding_only and step % _LINE_EVERY_STEPS:
            return
        counts = ", ".join(f"{count} {state}" for state, count in _counts(stats).items())
        running = sum(generation.state == "running" for generation in generations)
        self._console.print(f"step {step:3}  {running} running  {what}  [{counts}]", markup=False, soft_wrap=True)


def pool_map(stats: PoolStats) -> RenderableType:
    """One sign for each block, by state, and what the signs mean."""
    counts = _counts(stats)
    blocks, legend = Text(), Text()
    for state, sign, color in _BLOCKS:
        blocks.append(sign * counts[state], style=color)
        legend.append(f"{sign} {counts[state]} {state}   ", style=color)
    legend.append(f"swap tier: {stats.used_swap_blocks} of {stats.num_swap_blocks}", style="magenta")
    return Group(blocks, legend)


def _counts(stats: PoolStats) -> dict[str, int]:
    return {
        "active": stats.active_blocks,
        "shared": stats.shared_blocks,
        "cached": stats.cached_blocks + stats.pinned_blocks,
        "free": stats.free_blocks,
    }


def _progress(generations: Sequence[Generation]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for generation in generations:
        done, total = len(generation.token_ids), generation.part.num_tokens
        bar = ProgressBar(total, done, width=total, complete_style="green", finished_style="bright_black")
        state = Text(generation.state, style=_STATES[generation.state])
        table.add_row(generation.name, bar, f"{done}/{total}", state)
    return table


def results_table(generations: Sequence[Generation], alone: Sequence[Sequence[int]]) -> RenderableType:
    """A row for each sequence; `alone` are the tokens that the library generated for it by itself."""
    table = Table(title="Generated with K/V in the daemon, compared with the library's own cache")
    for heading in ("sequence", "prompt", "from cache", "generated", "picked by", "same tokens"):
        table.add_column(heading)
    for generation, expected in zip(generations, alone, strict=True):
        same = sum(ours == theirs for ours, theirs in zip(generation.token_ids, expected, strict=True))
        table.add_row(
            generation.name,
            str(len(generation.part.prompt)),
            str(generation.sequence.num_cached_tokens),
            str(len(generation.token_ids)),
            "likeliest" if generation.seed is None else f"seed {generation.seed}",
            Text(f"{same} of {len(expected)}", style="green" if same == len(expected) else "red"),
        )
    return table
