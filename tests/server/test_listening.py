"""The addresses on which the daemon may listen without authentication, and those that it reports."""

from __future__ import annotations

import re
import urllib.request

import pytest
from small_pool import SMALL_POOL

from kvservice.config import ServeConfig
from kvservice.health import check
from kvservice.launch import Daemon
from kvservice.server.listening import ConfigError, check_addresses

TLS = {"tls_cert": "c", "tls_key": "k"}
EXPOSED = ["0.0.0.0:1", "[::]:1", "192.0.2.1:1", "example:1"]


@pytest.mark.parametrize("address", EXPOSED)
@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({}, "set tls_cert and tls_key, and auth_tokens or tls_client_ca;"),
        (TLS, "set auth_tokens or tls_client_ca;"),
        ({"auth_tokens": "t"}, "set tls_cert and tls_key;"),
    ],
)
def test_other_hosts_need_tls_and_a_name(address: str, options: dict[str, str], missing: str) -> None:
    with pytest.raises(ConfigError, match=missing) as caught:
        check_addresses(ServeConfig(tcp_address=address, **options))
    assert caught.value.field == "tcp_address"


@pytest.mark.parametrize("address", EXPOSED)
@pytest.mark.parametrize(
    "options", [TLS | {"auth_tokens": "t"}, TLS | {"tls_client_ca": "a"}, {"insecure": True}], ids=lambda o: [*o][-1]
)
def test_they_are_served_with_both_or_if_that_is_said(address: str, options: dict[str, object]) -> None:
    """check_addresses raises ConfigError for a refused address."""
    check_addresses(ServeConfig(tcp_address=address, **options))


@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "localhost:1", ""])
def test_loopback_is_open(address: str) -> None:
    """check_addresses raises ConfigError for a refused address."""
    check_addresses(ServeConfig(tcp_address=address, unix_socket="s"))


def test_there_is_an_address() -> None:
    with pytest.raises(ConfigError, match="nothing to listen on"):
        check_addresses(ServeConfig(tcp_address="", unix_socket=""))


def test_the_log_says_where_it_listens_with_the_ports_that_the_system_chose() -> None:
    options = {"tcp_address": "127.0.0.1:0", "http_address": "127.0.0.1:0", "log_level": "info"}
    with Daemon(**SMALL_POOL | options) as daemon:
        said = daemon.log.read_text()
        (tcp_address,) = re.findall(r"serving .*, (127\.0\.0\.1:\d+)$", said, re.MULTILINE)
        assert check(tcp_address, timeout_s=20)
        (url,) = re.findall(r"the page and /metrics are at (http://127\.0\.0\.1:\d+/)$", said, re.MULTILINE)
        with urllib.request.urlopen(f"{url}metrics", timeout=20) as answer:
            assert answer.status == 200
