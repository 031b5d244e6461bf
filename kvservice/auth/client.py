"""What a client presents to a daemon, and what it checks the daemon by."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeAlias

from kvservice.auth.addresses import is_loopback
from kvservice.errors import InvalidArgumentError

logger = logging.getLogger(__name__)

PathLike: TypeAlias = str | os.PathLike[str]

_UNIX: Final = "unix:"
_MAX_TOKEN_LENGTH: Final = 4096
_TOKEN_CHARACTERS: Final = re.compile(r"[\x21-\x7e]*")


@dataclass(frozen=True)
class TLSConfig:
    """`ca`: PEM file of the CA that the daemon's certificate comes from; None: the public ones that gRPC knows.

    `cert` and `key`: PEM files of the client's own certificate, for a daemon that asks for one. `server_name`: the name
    that the daemon's certificate is for, if that is not the address's host.
    """

    ca: PathLike | None = None
    cert: PathLike | None = None
    key: PathLike | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError("a certificate and its key go together", field="tls")


# True: TLSConfig(); a path: TLSConfig(ca=path); False and None: plain text.
TLSOption: TypeAlias = TLSConfig | bool | PathLike | None


@dataclass(frozen=True)
class ClientCredentials:
    """`tls`: None for plain text. `token`: a token, or a path of the file that holds it, which is read for each call
    anew; "" for none."""

    tls: TLSConfig | None = None
    token: str | os.PathLike[str] = field(default="", repr=False)

    @classmethod
    def for_address(cls, address: str, tls: TLSOption, token: str | os.PathLike[str] | None) -> ClientCredentials:
        """Of a client's arguments. The unix socket asks for no token and gets none. Raises InvalidArgumentError."""
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
        """The metadata of an RPC. Raises InvalidArgumentError for what cannot be a token."""
        token = self.token if isinstance(self.token, str) else _read(self.token)
        if len(token) > _MAX_TOKEN_LENGTH or not _TOKEN_CHARACTERS.fullmatch(token):
            raise InvalidArgumentError("has spaces, line ends or other characters that no token has", field="token")
        return (("authorization", f"Bearer {token}"),) if token else ()


NO_CREDENTIALS: Final = ClientCredentials()


def _tls_config(tls: TLSOption) -> TLSConfig | None:
    if tls is None or isinstance(tls, TLSConfig):
        return tls
    if isinstance(tls, bool):
        return TLSConfig() if tls else None
    return TLSConfig(ca=tls)


def _host(address: str) -> str:
    """The host of a gRPC target."""
    return re.sub(r"^(dns|ipv4|ipv6):(//[^/]*/)?", "", address).rpartition(":")[0]


def _read(file: os.PathLike[str]) -> str:
    try:
        return Path(file).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{os.fspath(file)}: {error}", field="token") from None
