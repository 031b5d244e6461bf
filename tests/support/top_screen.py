"""The text on the screen of a Textual application, waits for it, and the command that prints once."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from click.testing import CliRunner, Result
from inspected_pool import Inspected
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import DataTable
from waiting import PATIENCE_S

from kvservice.cli import main
from kvservice.top import Source
from kvservice.top.app import TopApp

INTERVAL_S = 0.05
TALL, SHORT = (130, 45), (90, 24)


@asynccontextmanager
async def screen(
    inspected: Inspected, size: tuple[int, int] = TALL, sort_key: str = "blocks"
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """Run the application of `kvservice top` against a server."""
    async with Source(inspected.address) as source:
        app = TopApp(source, await source.first_snapshot(), INTERVAL_S, sort_key, "")
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            yield app, pilot


def shown_names(app: TopApp, table: str = "sessions") -> list[str]:
    """Return the second column of a table."""
    shown = app.query_one(f"#{table}", DataTable)
    return [shown.get_row_at(row)[1].plain for row in range(shown.row_count)]


def text_of(app: App[Any]) -> str:
    """Return the lines of the screen."""
    lines: dict[str, str] = {}
    for y, text in re.findall(r'<text[^>]* y="([0-9.]+)"[^>]*>([^<]*)</text>', app.export_screenshot()):
        lines[y] = lines.get(y, "") + html.unescape(text).replace("\xa0", " ")
    return "\n".join(lines.values())


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


def top(*arguments: str, **environ: str) -> Result:
    """Run `kvservice top` in this process. Its output is not a terminal."""
    return CliRunner().invoke(main, ["top", *arguments], env=environ, prog_name="kvservice")
