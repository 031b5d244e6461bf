"""A daemon with a metrics port."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scraping import POOL

from kvservice.launch import Daemon


@pytest.fixture
def running(free_port: int) -> Iterator[tuple[Daemon, int]]:
    with Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon:
        yield daemon, free_port
