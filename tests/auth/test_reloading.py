"""Reloading of token and certificate files when they change."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from certificates import Authority, encrypted

from kvservice.auth import CertificateFiles, Certificates, Reloading, is_loopback
from kvservice.errors import InvalidArgumentError

AUTHORITY = Authority()
FIRST, SECOND = AUTHORITY.sign("first"), AUTHORITY.sign("second")


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    client_ca = tmp_path / "clients.crt"
    client_ca.write_bytes(AUTHORITY.cert)
    return CertificateFiles(*FIRST.write(tmp_path, "tls"), client_ca)


@pytest.fixture
def reloading(files: CertificateFiles) -> Reloading[Certificates]:
    return Reloading(files.paths, lambda: Certificates.read(files))


def test_certificate_key_and_authority_are_read(files: CertificateFiles) -> None:
    assert Certificates.read(files) == Certificates(FIRST.cert, FIRST.key, AUTHORITY.cert)
    without = CertificateFiles(files.cert, files.key)
    assert Certificates.read(without).client_ca == b""
    assert len(without.paths) == 2


BAD: dict[str, tuple[str, bytes | None, str]] = {
    "another certificate": ("cert", SECOND.cert, "tls_cert"),
    "empty certificate": ("cert", b"", "tls_cert"),
    "half a certificate": ("cert", FIRST.cert[:-60], "tls_cert"),
    "no certificate": ("cert", None, "tls_cert"),
    "another key": ("key", SECOND.key, "tls_cert"),
    "half a key": ("key", FIRST.key[:80], "tls_cert"),
    "encrypted key": ("key", encrypted(FIRST.key), "tls_cert"),
    "no key": ("key", None, "tls_key"),
    "empty authority": ("client_ca", b"", "tls_client_ca"),
    "text for an authority": ("client_ca", b"no certificate", "tls_client_ca"),
    "half an authority": ("client_ca", AUTHORITY.cert[:-60], "tls_client_ca"),
    "bytes for an authority": ("client_ca", b"\xff", "tls_client_ca"),
    "no authority": ("client_ca", None, "tls_client_ca"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_refused_and_later_kept_out(
    files: CertificateFiles,
    reloading: Reloading[Certificates],
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    name, content, field = BAD[case]
    file: Path = getattr(files, name)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(InvalidArgumentError) as caught:
        Certificates.read(files)
    assert caught.value.field == field
    before = reloading.value
    assert not reloading.reload()
    assert reloading.value is before
    (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(file) in line.getMessage()
    assert not reloading.reload(), "one change is one line"
    assert len(caplog.records) == 1


def test_a_new_certificate_is_taken_when_its_key_is_there(
    files: CertificateFiles, reloading: Reloading[Certificates], caplog: pytest.LogCaptureFixture
) -> None:
    assert not reloading.reload()
    files.cert.write_bytes(SECOND.cert)
    assert not reloading.reload()
    assert reloading.value.cert == FIRST.cert
    files.key.write_bytes(SECOND.key)
    with caplog.at_level(logging.INFO):
        assert reloading.reload()
    assert reloading.value == Certificates(SECOND.cert, SECOND.key, AUTHORITY.cert)
    assert "in use" in caplog.messages[-1]
    assert not reloading.reload()


def test_a_link_that_leads_elsewhere_is_a_change(tmp_path: Path) -> None:
    for name, signed in (("old", FIRST), ("new", SECOND)):
        (tmp_path / name).mkdir()
        signed.write(tmp_path / name, "tls")
        for file in (tmp_path / name).iterdir():
            os.utime(file, ns=(0, 0))
    link = tmp_path / "current"
    link.symlink_to("old")
    files = CertificateFiles(link / "tls.crt", link / "tls.key")
    reloading = Reloading(files.paths, lambda: Certificates.read(files))
    (tmp_path / "next").symlink_to("new")
    os.replace(tmp_path / "next", link)
    assert reloading.reload()
    assert reloading.value.cert == SECOND.cert


def test_a_failure_that_passes_by_itself_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "value"
    file.write_text("first")
    short = False

    def read() -> str:
        if short:
            raise InvalidArgumentError("too many open files")
        return file.read_text()

    reloading = Reloading([file], read)
    file.write_text("the second")
    short = True
    for _ in range(3):
        assert not reloading.reload()
    assert len(caplog.records) == 1
    short = False
    assert reloading.reload()
    assert reloading.value == "the second"


def test_the_log_says_which_process_uses_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file = tmp_path / "value"
    file.write_text("first")
    both = [Reloading([file], file.read_text), Reloading([file], file.read_text, "HTTP")]
    file.write_text("the second")
    assert all(reloading.reload() for reloading in both)
    expected = [f"{file} changed and is in use by gRPC", f"{file} changed and is in use by HTTP"]
    assert [record.getMessage() for record in caplog.records] == expected


def test_a_change_while_the_files_are_read_is_seen_next_time(tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text("first")

    def read() -> str:
        value = file.read_text()
        if value == "first":
            file.write_text("second, while the first is read")
        return value

    reloading = Reloading([file], read)
    assert reloading.value == "first"
    assert reloading.reload()
    assert reloading.value.startswith("second")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]", "example", "", "localhost.example"])
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)
