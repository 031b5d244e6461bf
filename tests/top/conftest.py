"""A server to inspect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from inspected_pool import Inspected


@pytest.fixture
def inspected(tmp_path: Path) -> Iterator[Inspected]:
    server = Inspected(f"unix:{tmp_path}/inspect.sock")
    server.start()
    yield server
    server.stop()
