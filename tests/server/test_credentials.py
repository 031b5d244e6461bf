"""Messages about the certificates that the daemon is started with."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Authority, encrypted

from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError
from kvservice.server.credentials import Credentials

AUTHORITY = Authority()
SIGNED, OTHER = AUTHORITY.sign("daemon"), AUTHORITY.sign("other")


@pytest.mark.parametrize(
    ("cert", "key", "field", "said"),
    [
        (b"", SIGNED.key, "tls_cert", "tls.crt holds no certificate in PEM"),
        (SIGNED.key, SIGNED.key, "tls_cert", "tls.crt holds no certificate in PEM"),
        (SIGNED.cert, SIGNED.cert, "tls_key", "tls.key holds no private key in PEM"),
        (SIGNED.cert, OTHER.key, "tls_cert", "tls.key: certificate and key cannot be used: KEY_VALUES_MISMATCH"),
        (SIGNED.cert, encrypted(SIGNED.key), "tls_cert", "tls.key: certificate and key cannot be used: the key is enc"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, cert: bytes, key: bytes, field: str, said: str) -> None:
    config = configured(tmp_path, cert, key)
    with pytest.raises(InvalidArgumentError, match=said) as caught:
        Credentials(config)
    assert caught.value.field == field


def test_a_file_without_a_ca_is_named(tmp_path: Path) -> None:
    config = configured(tmp_path, SIGNED.cert, SIGNED.key, tls_client_ca=str(tmp_path / "tls.key"))
    with pytest.raises(InvalidArgumentError, match=r"tls_client_ca: .*/tls.key holds no certificate"):
        Credentials(config)


@pytest.mark.parametrize("expired", [True, False])
def test_a_certificate_that_has_expired_is_warned_of(tmp_path: Path, caplog, expired: bool) -> None:
    signed = AUTHORITY.sign("daemon", expired=expired)
    Credentials(configured(tmp_path, signed.cert, signed.key))
    said = f"{tmp_path}/tls.crt: clients will refuse it: certificate has expired"
    assert caplog.messages == ([said] if expired else [])


def configured(directory: Path, cert: bytes, key: bytes, **more: str) -> ServeConfig:
    for name, pem in (("tls.crt", cert), ("tls.key", key)):
        (directory / name).write_bytes(pem)
    return ServeConfig(tls_cert=str(directory / "tls.crt"), tls_key=str(directory / "tls.key"), **more)
