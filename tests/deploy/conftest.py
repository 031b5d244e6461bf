"""The stack of deploy/, built and started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from container_stack import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    running = Stack()
    running.compose("build", "daemon", timeout_s=1500)
    try:
        running.compose("up", "--detach", "--no-build")
        running.await_healthy()
        yield running
    finally:
        running.compose("down", "--volumes", "--timeout", "5")
