"""The container stack of deploy/docker-compose.yml."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from container_stack import Stack, running


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running(Stack) as started:
        yield started
