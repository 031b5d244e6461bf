"""The addresses on which the daemon may listen without authentication, and those that it reports."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from each_row import each_row
from scraping import scrape, value
from small_pool import SMALL_POOL

from kvservice.config import ServeConfig
from kvservice.health import check
from kvservice.launch import Daemon
from kvservice.server.rpc.listening import ConfigError, check_addresses

TLS: dict[str, Any] = {"tls_cert": "c", "tls_key": "k"}
# The kernel's unit of the start of a process.
TICK_S = 0.01
EXPOSED = ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "example:1"]


def test_other_hosts_need_tls_and_a_name() -> None:
    refused: list[tuple[dict[str, str], str]] = [
        ({}, "set tls_cert and tls_key, and auth_tokens or tls_client_ca;"),
        (TLS, "set auth_tokens or tls_client_ca;"),
        ({"auth_tokens": "t"}, "set tls_cert and tls_key;"),
    ]
    served: list[dict[str, Any]] = [TLS | {"auth_tokens": "t"}, TLS | {"tls_client_ca": "a"}, {"insecure": True}]
    with each_row() as row:
        for address in EXPOSED:
            for options, missing in refused:
                with row((address, [*options])):
                    with pytest.raises(ConfigError, match=missing) as caught:
                        check_addresses(ServeConfig(tcp_address=address, **options))
                    assert caught.value.field == "tcp_address"
            for options in served:
                with row((address, [*options])):
                    check_addresses(ServeConfig(tcp_address=address, **options))
        for address in ("127.0.0.1:1", "[::1]:1", "localhost:1", ""):
            with row((address, "loopback")):
                check_addresses(ServeConfig(tcp_address=address, unix_socket="s"))


def test_there_is_an_address() -> None:
    with pytest.raises(ConfigError, match="nothing to listen on"):
        check_addresses(ServeConfig(tcp_address="", unix_socket=""))


def test_the_log_says_where_it_listens_with_the_ports_that_the_system_chose() -> None:
    options = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "log_level": "info"}
    before = time.monotonic()
    with Daemon(**SMALL_POOL | options) as daemon:
        said = daemon.log.read_text()
        (tcp_address,) = re.findall(r"serving .*, (127\.0\.0\.1:\d+)$", said, re.MULTILINE)
        assert check(tcp_address, timeout_s=20)
        (url,) = re.findall(r"the page and /metrics are at (http://127\.0\.0\.1:\d+/)$", said, re.MULTILINE)
        samples = scrape(int(url.rpartition(":")[2].strip("/")))
        # Nothing served since the process was started.
        took_s = value(samples, "kvservice_last_restart_take_over_seconds")
        assert took_s < value(samples, "kvservice_last_restart_down_seconds") < time.monotonic() - before + TICK_S
