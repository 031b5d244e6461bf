"""The container stack of deploy/, which is built and started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import container_engine
import pytest
from container_stack import Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with container_engine.engine():
        running = Stack()
        running.build()
        try:
            running.up()
            yield running
        finally:
            running.compose("down", "--volumes", "--timeout", "5")
