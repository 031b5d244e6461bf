"""The limit on file descriptors is raised to the hard limit and checked before the daemon starts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from footprint import open_files
from small_pool import SMALL_POOL

from kvservice.client import KVClient
from kvservice.config import ENV_PREFIX, ServeConfig
from kvservice.launch import Daemon
from kvservice.server.listening import ConfigError
from kvservice.server.open_files import needed_files, raise_file_limit

SMALL: dict[str, Any] = {
    "max_connections": 10,
    "max_sessions": 4,
    "max_lanes": 3,
    "max_regions": 2,
    "unix_socket": "/run/x",
}


class Limits:
    """Replaces the limits of this process during a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.now = (soft, hard)
        monkeypatch.setattr(resource, "getrlimit", lambda _: self.now)
        monkeypatch.setattr(resource, "setrlimit", lambda _, limits: setattr(self, "now", limits))


def test_what_a_configuration_needs() -> None:
    both = ServeConfig(**SMALL, share_pool="read", max_pool_mappings=5)
    needed = {"max_connections": 128 + 20 + 64, "max_lanes": 12, "max_regions": 24, "max_pool_mappings": 20}
    assert needed_files(both) == needed
    store = ServeConfig(**SMALL, store_gib=1)
    assert needed_files(store)["share_store"] == 8 * 4
    assert needed_files(store.model_copy(update={"share_store": "write"}))["share_store"] == 8 * 4 + 256
    plain = ServeConfig(**SMALL | {"unix_socket": ""}, allow_client_shm="off")
    assert needed_files(plain) == {"max_connections": 128 + 10}


def test_the_soft_limit_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(monkeypatch, 24, 4096)
    raise_file_limit(ServeConfig(**SMALL))
    assert limits.now == (4096, 4096)
    limits = Limits(monkeypatch, 24, resource.RLIM_INFINITY)
    raise_file_limit(ServeConfig())
    assert limits.now == (resource.RLIM_INFINITY,) * 2


def test_too_low_a_hard_limit_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ServeConfig(**SMALL)
    total = sum(needed_files(config).values())
    Limits(monkeypatch, 24, total)
    raise_file_limit(config)
    Limits(monkeypatch, 24, total - 1)
    with pytest.raises(ConfigError) as refused:
        raise_file_limit(config)
    assert refused.value.field == "max_connections"
    for number in (f"{total} file descriptors", "12 for max_lanes", f"hard limit is {total - 1} "):
        assert number in refused.value.message
    many = ServeConfig(**SMALL | {"max_regions": 1000})
    with pytest.raises(ConfigError) as refused:
        raise_file_limit(many)
    assert refused.value.field == "max_regions"


@pytest.mark.parametrize("limit", [24, 64, 200])
def test_a_daemon_with_too_few_says_so_in_one_line(tmp_path: Path, limit: int) -> None:
    options = SMALL_POOL | {"unix_socket": tmp_path / "socket", "tcp_address": "", "http_address": ""}
    environment = {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in options.items()}
    ended = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit}; exec "$0" -P -m kvservice serve', sys.executable],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: max_")
    assert f"hard limit is {limit} " in line


def test_a_daemon_has_what_it_needs() -> None:
    """An idle daemon has fewer descriptors open than are counted for it, and a lane and a region no more than are
    counted for them. Only their memory is looked at: gRPC opens descriptors of its own at any time."""
    with Daemon(**SMALL_POOL | {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0"}) as daemon:
        pid = daemon.process.pid
        assert sum(open_files(pid).values()) < 128
        with KVClient(daemon.address) as client, client.session() as kv:
            kv.create_region(4096)
            files = open_files(pid)
            assert 1 <= files["/memfd:kvservice-lane (deleted)"] <= 4
            assert 1 <= files["/memfd:kvservice-region (deleted)"] <= 3
        (limits,) = (
            line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max open files")
        )
        soft, hard = limits.split()[3:5]
        assert soft == hard
