"""An event loop whose time passes only when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class ManualLoop(asyncio.SelectorEventLoop):
    now = 0.0

    def time(self) -> float:
        return self.now


async def advance(seconds: float) -> None:
    """Let so many seconds pass, and let the timers run that are due."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ManualLoop)
    loop.now += seconds
    for _ in range(5):
        await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=ManualLoop) as runner:
        runner.run(scenario)
