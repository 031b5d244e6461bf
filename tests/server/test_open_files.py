"""The limit on file descriptors is raised to the hard limit and checked before the daemon starts."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from each_row import each_row
from footprint import open_files
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.config import ENV_PREFIX
from kvservice.launch import Daemon

SMALL: dict[str, Any] = SMALL_POOL | {
    "max_connections": 10,
    "max_sessions": 4,
    "max_lanes": 3,
    "max_regions": 2,
    "share_pool": "off",
    "share_store": "off",
    "store_gib": 0,
    "keeper": "false",
    "http_address": "",
}
# What a small daemon with a unix socket and a TCP address needs.
TOTAL = 128 + 20 + 64 + 16 + 12 + 24


def starting(limit: int, options: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a daemon with this limit on descriptors."""
    environment = {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in options.items()}
    return subprocess.Popen(
        ["sh", "-c", f'ulimit -n {limit}; exec "$0" -P -m kvservice serve', sys.executable],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_what_a_configuration_needs_is_said_in_one_line(tmp_path: Path) -> None:
    """The option with the largest part is named. With one descriptor more, the next check refuses the daemon: there is
    no directory for its socket."""
    socket, nowhere = tmp_path / "socket", tmp_path / "nowhere" / "socket"
    both = {"unix_socket": socket, "tcp_address": "127.0.0.1:0"}
    connections, shared = 128 + 20 + 64 + 16, {"max_lanes": 12, "max_regions": 24}
    store = {"store_gib": 1 / 64}
    rows: list[tuple[int, dict[str, Any], dict[str, int]]] = [
        (24, both | store | {"share_pool": "read", "max_pool_mappings": 5, "share_store": "read"},
         {"max_connections": connections} | shared | {"max_pool_mappings": 20, "share_store": 32}),
        (64, both | store | {"share_store": "write", "max_regions": 1000},
         {"max_connections": connections} | shared | {"max_regions": 12000, "share_store": 32 + 256}),
        (100, {"unix_socket": "", "tcp_address": "127.0.0.1:0", "allow_client_shm": "off"},
         {"max_connections": 128 + 10}),
        (TOTAL - 1, both, {"max_connections": connections} | shared),
    ]  # fmt: skip
    started = [(starting(limit, SMALL | options), limit, needed) for limit, options, needed in rows]
    enough = starting(TOTAL, SMALL | both | {"unix_socket": nowhere})
    with each_row() as row:
        for process, limit, needed in started:
            with row((limit, needed)):
                _, said = process.communicate(timeout=120)
                assert process.returncode == 1
                (line,) = said.splitlines()
                assert line.startswith(f"Error: {max(needed, key=lambda name: needed[name])}: ")
                assert f" {sum(needed.values())} file descriptors (" in line
                assert f"hard limit is {limit} " in line
                assert {name: int(count) for count, name in re.findall(r"(\d+) for (\w+)", line)} == needed
        with row("enough"):
            _, said = enough.communicate(timeout=120)
            assert "file descriptors" not in said
            assert "nowhere" in said


def test_a_daemon_with_too_few_says_so_in_one_line(tmp_path: Path) -> None:
    process = starting(TOTAL - 1, SMALL | {"unix_socket": tmp_path / "socket", "tcp_address": "127.0.0.1:0"})
    _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    (line,) = said.splitlines()
    assert line.startswith("Error: max_connections: ")
    assert f" {TOTAL} file descriptors (" in line
    assert f"hard limit is {TOTAL - 1} " in line


def test_a_daemon_has_what_it_needs() -> None:
    """An idle daemon has fewer descriptors open than are counted for it, and a lane and a region no more than are
    counted for them. Only their memory is looked at: gRPC opens descriptors of its own at any time. The daemon raises
    its soft limit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = 1024 if limits[1] == resource.RLIM_INFINITY else min(1024, limits[1] - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, limits[1]))
    options = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "max_sessions": 4, "max_connections": 10}
    try:
        daemon = Daemon(**SMALL_POOL | options).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    try:
        pid = daemon.process.pid
        assert sum(open_files(pid).values()) < 128
        with KVClient(daemon.address) as client, client.session() as kv:
            kv.create_region(4096)
            files = open_files(pid)
            assert 1 <= files["/memfd:kvservice-lane (deleted)"] <= 4
            assert 1 <= files["/memfd:kvservice-region (deleted)"] <= 3
        (found,) = (
            line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max open files")
        )
        soft, hard = found.split()[3:5]
        assert soft == hard != str(lower)
    finally:
        daemon.__exit__()
