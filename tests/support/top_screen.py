"""The text on the screen of a Textual application, and waits for it."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable
from typing import Any

from textual.app import App
from waiting import PATIENCE_S


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
