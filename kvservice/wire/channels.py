"""gRPC channels to a daemon, in plain text or over TLS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from kvservice.auth.client import ClientCredentials, PathLike, TLSConfig
from kvservice.errors import ConnectionLostError, InvalidArgumentError, TLSHandshakeError

Options = Sequence[tuple[str, Any]]

SERVER_NAME_OPTION: Final = "grpc.ssl_target_name_override"
# Patterns of gRPC's messages for a failed connection, over its versions, and their meanings. The first match applies.
_HANDSHAKE_FAILURES: Final = (
    ("WRONG_VERSION_NUMBER", "the daemon does not speak TLS at this address"),
    (
        "Hostname Verification Check failed|is not in peer certificate",
        "the daemon's certificate is for another name: see server_name of TLSConfig",
    ),
    (
        "unable to get local issuer certificate|self.signed certificate",
        "the daemon's certificate comes from a CA that the client does not trust",
    ),
    ("certificate has expired", "the daemon's certificate has expired"),
    ("Secure read failed", "the daemon closed the connection: it may want a certificate of a CA that it trusts"),
    ("(Tls|Ssl) handshake failed", "client and daemon do not agree"),
)
# A refused connection to the IPv6 loopback address. localhost usually has an IPv4 address too.
_REFUSED_ON_LOOPBACK_6: Final = r"ipv6:(\[|%5B)::1(\]|%5D):\d+: .*Connection refused"


def open_channel(address: str, credentials: ClientCredentials, options: Options) -> grpc.Channel:
    """Open a channel. Raises InvalidArgumentError if a TLS file cannot be read."""
    if credentials.tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, _for_grpc(credentials.tls), [*options, *_name_options(credentials.tls)])


def open_aio_channel(address: str, credentials: ClientCredentials, options: Options) -> grpc.aio.Channel:
    """Open an asyncio channel, as `open_channel`."""
    if credentials.tls is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, _for_grpc(credentials.tls), [*options, *_name_options(credentials.tls)])


def connection_error(text: str) -> ConnectionLostError:
    """Return the error for an RPC that failed because there is no connection. `text` is gRPC's message."""
    for pattern, meaning in _HANDSHAKE_FAILURES:
        if re.search(pattern, text):
            return TLSHandshakeError(f"TLS handshake failed: {meaning} ({text})")
    if "failed to connect" in text and "Socket closed" in text:
        return ConnectionLostError(
            f"{text}: the other end closed the connection; it may expect TLS, or a certificate, or have as many "
            "connections as its max_connections allows"
        )
    if re.search(_REFUSED_ON_LOOPBACK_6, text):
        return ConnectionLostError(
            f"{text}: gRPC reports only the last address; if the daemon listens on 127.0.0.1, it may expect TLS there"
        )
    return ConnectionLostError(text)


def _for_grpc(tls: TLSConfig) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.cert))


def _name_options(tls: TLSConfig) -> Options:
    return [(SERVER_NAME_OPTION, tls.server_name)] if tls.server_name else []


def _read(file: PathLike | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(f"{file}: {error.strerror or error}", field="tls") from None


# ---- gRPC keepalive options, by which each end of a connection detects that the other is frozen or its host is down


# gRPC's minimum time between pings. Lower values have no effect.
MIN_PING_INTERVAL_MS = 1_000


def keepalive_options(timeout_s: float) -> tuple[tuple[str, int], ...]:
    """Return the options that close a connection whose other end has not answered for `timeout_s` seconds.

    The connection closes between two thirds and all of that time after the last answer. A ping is sent after a third of
    the time without traffic; its answer may take the rest. gRPC's keepalive timeout is effective only if the timeout of
    all pings, one minute by default, has the same value.
    """
    interval_ms = int(timeout_s * 1000 / 3)
    answer_ms = int(timeout_s * 1000) - interval_ms
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", answer_ms),
        ("grpc.http2.ping_timeout_ms", answer_ms),
        # No limit on pings while there is no data to send.
        ("grpc.http2.max_pings_without_data", 0),
    )
