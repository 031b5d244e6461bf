"""Client credentials: the token and certificate for the daemon, and the CA that verifies the daemon."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from kvservice.errors import InvalidArgumentError, reason_of

# ---- loopback detection for addresses


def is_loopback(host: str) -> bool:
    """Return whether `host` is reachable from this host only. `host` is an IP address (IPv6 with or without brackets)
    or a name. The only name that counts as loopback is localhost."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# ---- the credentials


logger = logging.getLogger(__name__)

PathLike: TypeAlias = str | os.PathLike[str]

_UNIX: Final = "unix:"
_MAX_TOKEN_LENGTH: Final = 4096
_TOKEN_CHARACTERS: Final = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True)
class TLSConfig:
    """TLS settings of a client.

    `ca` is a PEM file with the CA that issued the daemon's certificate; None selects gRPC's public CAs. `cert` and
    `key` are PEM files with the client's own certificate, for a daemon that requires one. `server_name` is the name in
    the daemon's certificate if it differs from the host of the address.
    """

    ca: PathLike | None = None
    cert: PathLike | None = None
    key: PathLike | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError("a certificate and its key go together", field="tls")


# True means TLSConfig(), a path means TLSConfig(ca=path), False and None mean plain text.
TLSOption: TypeAlias = TLSConfig | bool | PathLike | None


@dataclass(frozen=True)
class ClientCredentials:
    """TLS settings and token of a client.

    `tls` is None for plain text. `token` is a token, or the path of a file that holds it and is read for each call; ""
    means no token.
    """

    tls: TLSConfig | None = None
    token: str | os.PathLike[str] = field(default="", repr=False)

    @classmethod
    def for_address(cls, address: str, tls: TLSOption, token: str | os.PathLike[str] | None) -> ClientCredentials:
        """Build credentials from a client's arguments. A unix socket needs no token and gets none. Raises
        InvalidArgumentError."""
        address = target_of(address)
        config = _tls_config(tls)
        if address.startswith(_UNIX):
            if config is not None:
                raise InvalidArgumentError("is for addresses like host:port, not for a unix socket", field="tls")
            return cls()
        credentials = cls(config, token or "")
        if credentials.headers() and config is None and not is_loopback(_host(address)):
            logger.warning("the token goes to %s unencrypted: set tls", address)
        return credentials

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of an RPC. Raises InvalidArgumentError if the token has characters that no token has."""
        token = self.token if isinstance(self.token, str) else _read(self.token)
        if len(token) > _MAX_TOKEN_LENGTH or not _TOKEN_CHARACTERS.fullmatch(token):
            raise InvalidArgumentError("has spaces, line breaks or other forbidden characters", field="token")
        return (("authorization", f"Bearer {token}"),) if token else ()


_MAX_SOCKET_BYTES: Final = 107
NO_CREDENTIALS: Final = ClientCredentials()


def check_address(address: object) -> None:
    """Raise InvalidArgumentError for what gRPC would take for something else, or would only fail to reach."""
    if not isinstance(address, str):
        raise InvalidArgumentError(f"is {type(address).__name__}, not a text", field="address")
    if address.startswith(_UNIX):
        path = address.removeprefix(_UNIX).removeprefix("//")
        if not path or len(os.fsencode(path)) > _MAX_SOCKET_BYTES:
            raise InvalidArgumentError(
                f"{address!r}: the path of a socket has 1 to {_MAX_SOCKET_BYTES} bytes", field="address"
            )
        return
    scheme, slashes, _ = address.partition("://")
    if ":" not in address or (slashes and scheme != "dns"):  # gRPC's own scheme
        raise InvalidArgumentError(
            f"{address!r} is neither the path of a socket, as unix:///path/of.sock or /path/of.sock, nor host:port",
            field="address",
        )
    port = address.rpartition(":")[2]
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 1 << 16
    if not is_port and "://" not in address:
        raise InvalidArgumentError(f"{address!r} has no port from 1 to 65535", field="address")


def target_of(address: object) -> str:
    """Return gRPC's target for an address: unix:PATH, unix:///PATH, a PATH that begins with / or ., or host:port.
    Raises InvalidArgumentError."""
    target = f"{_UNIX}{address}" if isinstance(address, str) and address.startswith(("/", "./", "../")) else address
    check_address(target)
    return str(target)


def _tls_config(tls: TLSOption) -> TLSConfig | None:
    if tls is None or isinstance(tls, TLSConfig):
        return tls
    if isinstance(tls, bool):
        return TLSConfig() if tls else None
    return TLSConfig(ca=tls)


def _host(address: str) -> str:
    """Return the host of a gRPC target."""
    return re.sub(r"^(dns|ipv4|ipv6):(//[^/]*/)?", "", address).rpartition(":")[0]


def _read(file: os.PathLike[str]) -> str:
    try:
        return Path(file).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{os.fspath(file)}: {reason_of(error)}", field="token") from None
