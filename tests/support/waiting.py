"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only a failed test waits so long: how fast the machine is must not decide whether a test passes.
PATIENCE_S = 120.0


def until(condition: Callable[[], object], meanwhile: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
    """Run `meanwhile` again and again until the condition holds. Fails if it never does."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        meanwhile()
