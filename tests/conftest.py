"""Fixtures that several rooms share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# `python -m pytest` puts the checkout first; without a compiled extension it must not hide the installed package.
CHECKOUT = Path(__file__).resolve().parents[1]
if not any(CHECKOUT.glob("kvservice/_ext.*.so")):
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != CHECKOUT]

from scraping import unused_port  # noqa: E402  the path comes first
from small_pool import SMALL_POOL  # noqa: E402

from kvservice.client import KVClient  # noqa: E402  the path comes first
from kvservice.launch import Daemon  # noqa: E402


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A real daemon that tests share; each leaves it as it found it."""
    with Daemon(**SMALL_POOL) as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Iterator[KVClient]:
    with KVClient(daemon.address) as connected:
        yield connected


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    return unused_port()
