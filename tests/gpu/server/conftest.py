"""Runs the CPU's daemon tests with a pool on the GPU. It adds their directory to the path and replaces the daemon."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_wire import raw, raw_session, wire
from small_pool import SMALL_POOL

from kvservice.launch import Daemon

__all__ = ["raw", "raw_session", "wire"]

sys.path.append(str(Path(__file__).parents[2] / "server"))


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    with Daemon(**(SMALL_POOL | {"device": "cuda"})) as running:
        yield running
