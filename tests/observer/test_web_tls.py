"""The observer's HTTP over TLS: its certificate, and access to the page."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from certificates import Authority
from page_pool import PagePool
from serving_http import serving_http

from kvservice.auth import CertificateFiles, Certificates, Reloading
from kvservice.observer.http_server import Connections, HttpLimits
from kvservice.observer.web_api import HttpOptions, Refusals, make_app

TOKEN = "a-token-of-the-page"
AUTHORITY, SUCCESSOR = Authority(), Authority("successor")


async def metrics() -> tuple[bytes, str]:
    return b"some 1\n", "text/plain"


@pytest.fixture
def reloading(tmp_path: Path) -> Reloading[Certificates]:
    files = CertificateFiles(*AUTHORITY.sign("daemon").write(tmp_path, "tls"))
    return Reloading(files.paths, lambda: Certificates.read(files))


def scenario(
    certificates: Reloading[Certificates] | None,
    body: Callable[[int], Awaitable[None]],
    options: HttpOptions | None = None,
    limits: HttpLimits | None = None,
) -> None:
    async def run() -> None:
        app = make_app(PagePool(64, 16, 4).views, options or HttpOptions(loopback=True), metrics, Refusals())
        async with serving_http(app, Connections(limits or HttpLimits()), certificates) as port:
            await body(port)

    asyncio.run(run())


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cadata=authority.cert.decode())


async def get(port: int, context: ssl.SSLContext | None, path: str = "/metrics", host: str = "localhost") -> str:
    """Return the status line and headers of the response."""
    name = "localhost" if context else None
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return (await reader.read()).partition(b"\r\n\r\n")[0].decode()
    finally:
        writer.transport.abort()


def test_it_is_encrypted_and_nothing_else(reloading: Reloading[Certificates]) -> None:
    async def body(port: int) -> None:
        assert (await get(port, trusting(AUTHORITY))).startswith("HTTP/1.1 200")
        with pytest.raises(ssl.SSLCertVerificationError):
            await get(port, trusting(SUCCESSOR))
        assert await get(port, None) == ""

    scenario(reloading, body)


UPGRADE = b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("nonsense", [b"\xff\r\n\r\n", UPGRADE], ids=["no HTTP", "another protocol"])
def test_requests_that_are_wrong_write_nothing_into_the_log(nonsense: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(nonsense)
        assert (await reader.read()).startswith(b"HTTP/1.1 ")
        writer.close()

    scenario(None, body)
    assert caplog.messages == []


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_tls_is_1_2_at_least(reloading: Reloading[Certificates]) -> None:
    old = trusting(AUTHORITY)
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1

    async def body(port: int) -> None:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await get(port, old)

    scenario(reloading, body)


def test_a_new_certificate_is_used_and_a_half_written_one_is_not(
    reloading: Reloading[Certificates], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(port: int) -> None:
        signed = SUCCESSOR.sign("daemon")
        (tmp_path / "tls.crt").write_bytes(signed.cert)
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert (await get(port, trusting(AUTHORITY))).startswith("HTTP/1.1 200")
        (tmp_path / "tls.key").write_bytes(signed.key)
        while reloading.value.cert != signed.cert:
            await asyncio.sleep(0.01)
        assert (await get(port, trusting(SUCCESSOR))).startswith("HTTP/1.1 200")
        with pytest.raises(ssl.SSLCertVerificationError):
            await get(port, trusting(AUTHORITY))

    scenario(reloading, body)


def test_a_handshake_that_does_not_go_on_ends(reloading: Reloading[Certificates]) -> None:
    async def body(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await reader.read() == b""
        writer.transport.abort()

    scenario(reloading, body, limits=HttpLimits(request_s=0.05))


def test_a_name_that_was_pointed_here_is_refused_all_the_same(reloading: Reloading[Certificates]) -> None:
    async def body(port: int) -> None:
        assert (await get(port, trusting(AUTHORITY), "/", f"localhost:{port}")).startswith("HTTP/1.1 200")
        assert (await get(port, trusting(AUTHORITY), "/", "evil.example")).startswith("HTTP/1.1 403")

    scenario(reloading, body)


def test_the_cookie_is_for_encrypted_connections(reloading: Reloading[Certificates]) -> None:
    async def body(port: int) -> None:
        head = await get(port, trusting(AUTHORITY), f"/?token={TOKEN}", "any.example")
        assert head.startswith("HTTP/1.1 303")
        (cookie,) = [line for line in head.lower().split("\r\n") if line.startswith("set-cookie")]
        assert {"secure", "httponly", "samesite=strict"} <= set(cookie.split("; "))

    scenario(reloading, body, HttpOptions(loopback=False, token=TOKEN))


def test_handshakes_that_do_not_end_keep_nobody_out(reloading: Reloading[Certificates]) -> None:
    """At the limit, each new connection closes the oldest one."""
    limits = HttpLimits(max_connections=8, max_per_address=8, request_s=1000.0)

    async def body(port: int) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as stack:
            silent = [stack.enter_context(socket.socket()) for _ in range(40)]
            for connection in silent:
                connection.setblocking(False)
                await loop.sock_connect(connection, ("127.0.0.1", port))
                await loop.sock_sendall(connection, b"\x16\x03\x01")
            assert (await get(port, trusting(AUTHORITY))).startswith("HTTP/1.1 200")
            for connection in silent[:32]:
                with contextlib.suppress(ConnectionResetError):
                    assert await loop.sock_recv(connection, 1) == b""

    scenario(reloading, body, limits=limits)
