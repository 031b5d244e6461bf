"""Daemons with a metrics port."""

from __future__ import annotations

from collections.abc import Iterator

import ports
import pytest
from scraping import POOL, count_from_now

from kvservice.client import KVClient
from kvservice.launch import Daemon


@pytest.fixture
def running(free_port: int) -> Iterator[tuple[Daemon, int]]:
    """A new daemon."""
    with Daemon(http_address=f"127.0.0.1:{free_port}", **POOL) as daemon:
        yield daemon, free_port


@pytest.fixture(scope="session")
def lasting() -> Iterator[tuple[Daemon, int]]:
    port = ports.free_port()
    with Daemon(http_address=f"127.0.0.1:{port}", **POOL) as daemon:
        yield daemon, port


@pytest.fixture
def shared(lasting: tuple[Daemon, int]) -> tuple[Daemon, int]:
    """A daemon that tests share. Its pool is empty, and `scrape` shows what the test adds to its counters."""
    daemon, port = lasting
    with KVClient(daemon.address) as client:
        with client.session() as kv:
            kv.reset_prefix_cache()
        stats = client.stats()
        assert (stats.sessions, stats.free_blocks) == (0, POOL["num_blocks"]), "an earlier test has left something"
    count_from_now(port)
    return lasting
