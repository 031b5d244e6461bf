"""Daemons on TCP that require authentication, and channels to them."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from certificates import Authority, Signed
from ports import free_port
from scraping import Samples, scrape
from small_pool import SMALL_POOL

from kvservice.auth import add_token
from kvservice.launch import Daemon

NAMES = ("alice", "bob")


@dataclass
class Secured:
    """A daemon and its clients' files. `files` holds tls.crt, tls.key, clients.crt and tokens."""

    daemon: Daemon
    port: int
    http_port: int
    files: Path
    authority: Authority
    tokens: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def samples(self) -> Samples:
        """Return the daemon's metrics."""
        context = ssl.create_default_context(cadata=self.authority.cert.decode())
        return scrape(self.http_port, context)

    def tls(self, client: Signed | None = None) -> grpc.ChannelCredentials:
        pair = (client.key, client.cert) if client else ()
        return grpc.ssl_channel_credentials(self.authority.cert, *pair)


@contextlib.contextmanager
def secured(
    files: Path, *, tls: bool = True, tokens: bool = True, client_ca: bool = False, **pool: Any
) -> Iterator[Secured]:
    """Start a daemon with the small pool on loopback. `pool` overrides options."""
    authority = Authority()
    made: dict[str, str] = {}
    port, http_port = free_port(), free_port()
    options: dict[str, Any] = {"tcp_address": f"127.0.0.1:{port}", "http_address": f"127.0.0.1:{http_port}"}
    if tls:
        options["tls_cert"], options["tls_key"] = authority.sign("daemon").write(files, "tls")
    if client_ca:
        options["tls_client_ca"] = files / "clients.crt"
        options["tls_client_ca"].write_bytes(authority.cert)
    if tokens:
        options["auth_tokens"] = files / "tokens"
        made = {name: add_token(options["auth_tokens"], name) for name in NAMES}
    with Daemon(**SMALL_POOL | options | pool, log_level="info") as daemon:
        yield Secured(daemon, port, http_port, files, authority, made)


class _Details(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class WithToken(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor
):
    """Adds a header to every RPC of a channel."""

    def __init__(self, *headers: str) -> None:
        self._headers = [("authorization", header) for header in headers]

    def _add(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = [*(details.metadata or ()), *self._headers]
        changed = _Details(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready, details.compression
        )
        return continuation(changed, request)

    intercept_unary_unary: Any = _add
    intercept_unary_stream: Any = _add
    intercept_stream_stream: Any = _add


def with_token(channel: grpc.Channel, *tokens: str) -> grpc.Channel:
    return grpc.intercept_channel(channel, WithToken(*(f"Bearer {token}" for token in tokens)))


@pytest.fixture(scope="package")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A daemon with TLS and tokens. Tests do not change its files."""
    with secured(tmp_path_factory.mktemp("encrypted")) as running:
        yield running
