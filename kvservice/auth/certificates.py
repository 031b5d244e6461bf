"""TLS certificates and keys. They are checked before they are used."""

from __future__ import annotations

import contextlib
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from kvservice.auth.reloading import open_regular
from kvservice.errors import InvalidArgumentError

# X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_TIME_FAULTS = (9, 10)


@dataclass(frozen=True)
class CertificateFiles:
    """Paths of PEM files: a certificate with its chain, its private key, and the CA of client certificates if the
    daemon requires them."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.cert, self.key, self.client_ca) if path is not None]


@dataclass(frozen=True)
class Certificates:
    """Contents of the files, in PEM. `key` matches `cert`. `client_ca` is b"" if there is none."""

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes = b""

    @classmethod
    def read(cls, files: CertificateFiles) -> Certificates:
        """Read and check the files. Raises InvalidArgumentError naming the option whose file is invalid."""
        cert, key = _read(files.cert, "tls_cert"), _read(files.key, "tls_key")
        client_ca = b"" if files.client_ca is None else _read(files.client_ca, "tls_client_ca")
        read = cls(cert, key, client_ca)
        _check_holds(cert, b"CERTIFICATE-----", "certificate", files.cert, "tls_cert")
        _check_holds(key, b"PRIVATE KEY-----", "private key", files.key, "tls_key")
        try:
            # The check uses its own context, because loading a key that does not match leaves a partial state behind.
            read.load_into(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{files.cert} and {files.key}: {error.message}", field=error.field) from None
        if files.client_ca is not None:
            _check_ca(client_ca, files.client_ca)
        return read

    def time_fault(self) -> str:
        """Return why clients reject the certificate's validity period; "" if it is valid now.

        Python's library does not read the dates. A handshake in memory, with a client that trusts the certificate,
        finds them out."""
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.load_into(server)
        client.check_hostname = False
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(to_client, to_server)
        answering = server.wrap_bio(to_server, to_client, server_side=True)
        try:
            client.load_verify_locations(cadata=self.cert.decode("ascii", errors="ignore"))
            for side in (asking, answering, asking):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLError as error:  # clients report all other errors when they connect
            if isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _TIME_FAULTS:
                return error.verify_message
        return ""

    def load_into(self, context: ssl.SSLContext) -> None:
        """Set the certificate and the key of a context. Handshakes in progress keep the previous ones. Raises
        InvalidArgumentError."""
        # OpenSSL loads certificates only from a path. A memory file gives it the bytes that were checked; the original
        # files may have changed since.
        try:
            memory = os.memfd_create("kvservice-tls", os.MFD_CLOEXEC)
            try:
                os.write(memory, self.key + b"\n" + self.cert)
                context.load_cert_chain(f"/proc/self/fd/{memory}", password=_no_password)
            finally:
                os.close(memory)
        except (ssl.SSLError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise InvalidArgumentError(f"certificate and key cannot be used: {reason}", field="tls_cert") from None


def _read(file: Path, field: str) -> bytes:
    try:
        with open_regular(file) as stream:
            return stream.read()
    except OSError as error:
        raise InvalidArgumentError(f"{file}: {error.strerror or error}", field=field) from None


def _check_holds(pem: bytes, mark: bytes, what: str, file: Path, field: str) -> None:
    if mark not in pem:
        raise InvalidArgumentError(f"{file} holds no {what} in PEM", field=field)


def _check_ca(pem: bytes, file: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise InvalidArgumentError(
            f"{file} holds no certificate that can be used: {reason}", field="tls_client_ca"
        ) from None
    if not context.cert_store_stats()["x509"]:
        raise InvalidArgumentError(f"{file} holds no certificate", field="tls_client_ca")


def _no_password() -> str:
    raise ValueError("the key is encrypted")
