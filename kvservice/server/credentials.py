"""Tokens and TLS certificates. They are read from files and reloaded when the files change."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from kvservice.auth import CertificateFiles, Certificates, Reloading, Tokens
from kvservice.config import ServeConfig

logger = logging.getLogger(__name__)

RELOAD_EVERY_S = 1.0


class Credentials:
    """`tokens` and `certificates` are None if the configuration names no files for them."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises InvalidArgumentError naming the option whose file cannot be used."""
        self.tokens: Reloading[Tokens] | None = None
        self.certificates: Reloading[Certificates] | None = None
        if config.auth_tokens:
            file = Path(config.auth_tokens)
            self.tokens = Reloading([file], lambda: Tokens.read(file))
        if config.tls_cert:
            client_ca = Path(config.tls_client_ca) if config.tls_client_ca else None
            files = CertificateFiles(Path(config.tls_cert), Path(config.tls_key), client_ca)
            self.certificates = Reloading(files.paths, lambda: _read(files))
        # The number of TLS handshakes that clients started. gRPC does not report how many of them fail.
        self.num_handshakes = 0
        self._lock = threading.Lock()

    def for_server(self) -> grpc.ServerCredentials | None:
        """Return the credentials of a TCP port, or None for plain text. gRPC accepts no TLS version below 1.2."""
        if self.certificates is None:
            return None
        self._served = self.certificates.value
        # The type annotation of the second parameter does not allow a callback that returns None; gRPC does.
        newer: Any = self._newer_configuration
        return grpc.dynamic_ssl_server_credentials(_configuration(self._served), newer, bool(self._served.client_ca))

    async def keep_current(self, on_new_tokens: Callable[[], None]) -> None:
        """Reload changed files until cancelled. Calls `on_new_tokens` after the token file has changed. Returns at once
        if there are no files."""
        while self.certificates is not None or self.tokens is not None:
            await asyncio.sleep(RELOAD_EVERY_S)
            if self.certificates is not None:
                self.certificates.reload()
            if self.tokens is not None and self.tokens.reload():
                on_new_tokens()

    def _newer_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the certificates if they have changed, or None. gRPC's threads call this before each handshake."""
        assert self.certificates is not None, "there is a TLS port"
        with self._lock:
            self.num_handshakes += 1
            current = self.certificates.value
            if current is self._served:
                return None
            self._served = current
            return _configuration(current)


def _read(files: CertificateFiles) -> Certificates:
    """Read the certificates; log a warning if they are expired or not yet valid. Raises InvalidArgumentError."""
    found = Certificates.read(files)
    if fault := found.time_fault():
        logger.warning("%s: clients will refuse it: %s", files.cert, fault)
    return found


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.cert)], root_certificates=certificates.client_ca or None
    )
