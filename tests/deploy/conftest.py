"""The stack of deploy/, built and started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import container_engine
import pytest
from container_stack import DEMO_IMAGE, Stack, make_demo_image


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


@pytest.fixture(scope="session")
def demo_image(stack: Stack) -> str:  # noqa: ARG001  it is made from the daemon's
    make_demo_image()
    return DEMO_IMAGE
