"""The container stack of deploy/docker-compose.yml. It ends with its file of tests, and others can have the engine."""

from __future__ import annotations

from collections.abc import Iterator

import container_engine
import pytest
from container_stack import Stack


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with container_engine.engine():
        running = Stack()
        running.build()
        try:
            running.up()
            yield running
        finally:
            running.down()
