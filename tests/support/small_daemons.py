"""Daemons with the small pool that share their pools differently."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from small_pool import SMALL_POOL

from kvservice.launch import Daemon

# The transports besides inline: name of the variant, transport, and the daemon's `share_pool`.
TRANSPORTS = {
    "region": ("region", "write"),
    "lane": ("lane", "write"),
    "mapped": ("mapped", "write"),
    "mapped to read": ("mapped", "read"),
}
OpenDaemon = Callable[[str, str], Daemon]


@pytest.fixture(scope="package")
def open_daemon() -> Iterator[OpenDaemon]:
    """Return the daemon with this dtype and `share_pool`. Each daemon is started once."""
    running: dict[tuple[str, str], Daemon] = {}
    with contextlib.ExitStack() as stack:

        def find(dtype: str, share_pool: str) -> Daemon:
            if (dtype, share_pool) not in running:
                options = SMALL_POOL | {"dtype": dtype, "share_pool": share_pool}
                running[dtype, share_pool] = stack.enter_context(Daemon(**options))
            return running[dtype, share_pool]

        yield find
