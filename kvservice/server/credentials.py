"""What the daemon knows remote callers by, read from files and read again when they change."""

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
    """`tokens` and `certificates` are None where the configuration names no files for them."""

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
        # TLS handshakes that clients began. gRPC does not say how many of them fail.
        self.num_handshakes = 0
        self._lock = threading.Lock()

    def for_server(self) -> grpc.ServerCredentials | None:
        """What a TCP port is opened with; None for plain text. gRPC accepts no TLS older than 1.2."""
        if self.certificates is None:
            return None
        self._served = self.certificates.value
        # The type of the second argument does not know that None is allowed.
        newer: Any = self._newer_configuration
        return grpc.dynamic_ssl_server_credentials(_configuration(self._served), newer, bool(self._served.client_ca))

    async def keep_current(self, on_new_tokens: Callable[[], None]) -> None:
        """Read changed files again, until cancelled."""
        while True:
            await asyncio.sleep(RELOAD_EVERY_S)
            if self.certificates is not None:
                self.certificates.reload()
            if self.tokens is not None and self.tokens.reload():
                on_new_tokens()

    def _newer_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """gRPC's threads call this before each handshake. None: the certificates are still the same."""
        assert self.certificates is not None, "there is a TLS port"
        with self._lock:
            self.num_handshakes += 1
            current = self.certificates.value
            if current is self._served:
                return None
            self._served = current
            return _configuration(current)


def _read(files: CertificateFiles) -> Certificates:
    """Raises InvalidArgumentError."""
    found = Certificates.read(files)
    if fault := found.time_fault():
        logger.warning("%s: clients will refuse it: %s", files.cert, fault)
    return found


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(certificates.key, certificates.cert)], root_certificates=certificates.client_ca or None
    )
