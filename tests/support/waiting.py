"""Waits for other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only a failing test waits this long. The speed of the machine must not decide whether a test passes.
PATIENCE_S = 120.0


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
    """Call `meanwhile` repeatedly until the condition holds. Fail if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        meanwhile()
