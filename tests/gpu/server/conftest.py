"""Runs the CPU's daemon tests with a pool on the GPU: it replaces the daemon."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from raw_wire import raw, raw_session, wire
from small_pool import SMALL_POOL

from kvservice.launch import Daemon

__all__ = ["raw", "raw_session", "wire"]


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with Daemon(**(SMALL_POOL | {"device": "cuda"})) as running:
        yield running
