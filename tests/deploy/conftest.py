"""The container stacks of deploy/, each of which is built and started once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import container_engine
import pytest
from container_stack import MooncakeStack, Stack


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    with container_engine.engine():
        running = Stack()
        running.build()
        try:
            running.up()
            yield running
        finally:
            running.down()


@pytest.fixture(scope="session")
def mooncake_stack() -> Iterator[MooncakeStack]:
    with container_engine.engine():
        running = MooncakeStack()
        running.build()
        try:
            running.up()
            yield running
        finally:
            running.down()
