"""Reloading of token and certificate files when they change."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, encrypted
from each_row import each_row

from kvservice.auth import NUM_LOOKS, CertificateFiles, Certificates, Reloading, is_loopback
from kvservice.config import ServeConfig
from kvservice.errors import InvalidArgumentError
from kvservice.server.rpc.callers import Credentials

AUTHORITY = Authority()
FIRST, SECOND = AUTHORITY.sign("first"), AUTHORITY.sign("second")


def written(folder: Path) -> CertificateFiles:
    client_ca = folder / "clients.crt"
    client_ca.write_bytes(AUTHORITY.cert)
    return CertificateFiles(*FIRST.write(folder, "tls"), client_ca)


@pytest.fixture
def files(tmp_path: Path) -> CertificateFiles:
    return written(tmp_path)


@pytest.fixture
def reloading(files: CertificateFiles) -> Reloading[Certificates]:
    return Reloading(files.paths, lambda: Certificates.read(files))


def reloaded(*all_of: Reloading[Any]) -> bool:
    """Reload until the change has been there for long enough to be used."""
    for _ in range(NUM_LOOKS - 1):
        assert [one.reload() for one in all_of] == [False] * len(all_of)
    return [one.reload() for one in all_of] == [True] * len(all_of)


def test_certificate_key_and_authority_are_read(files: CertificateFiles) -> None:
    assert Certificates.read(files) == Certificates(FIRST.cert, FIRST.key, AUTHORITY.cert)
    without = CertificateFiles(files.cert, files.key)
    assert Certificates.read(without).client_ca == b""
    assert len(without.paths) == 2


UNUSABLE = "/tls.key: certificate and key cannot be used"
# The file that is changed, its content, the option that is named, and a part of the message.
BAD: dict[str, tuple[str, bytes | None, str, str]] = {
    "another certificate": ("cert", SECOND.cert, "tls_cert", UNUSABLE),
    "empty certificate": ("cert", b"", "tls_cert", "/tls.crt holds no certificate in PEM"),
    "half a certificate": ("cert", FIRST.cert[:-60], "tls_cert", ""),
    "a key for a certificate": ("cert", FIRST.key, "tls_cert", "/tls.crt holds no certificate in PEM"),
    "no certificate": ("cert", None, "tls_cert", ""),
    "another key": ("key", SECOND.key, "tls_cert", f"{UNUSABLE}: KEY_VALUES_MISMATCH"),
    "half a key": ("key", FIRST.key[:80], "tls_cert", ""),
    "encrypted key": ("key", encrypted(FIRST.key), "tls_cert", f"{UNUSABLE}: the key is enc"),
    "a certificate for a key": ("key", FIRST.cert, "tls_key", "/tls.key holds no private key in PEM"),
    "no key": ("key", None, "tls_key", ""),
    "empty authority": ("client_ca", b"", "tls_client_ca", "/clients.crt holds no certificate"),
    "text for an authority": ("client_ca", b"no certificate", "tls_client_ca", "/clients.crt holds no certificate"),
    "half an authority": ("client_ca", AUTHORITY.cert[:-60], "tls_client_ca", ""),
    "bytes for an authority": ("client_ca", b"\xff", "tls_client_ca", ""),
    "no authority": ("client_ca", None, "tls_client_ca", ""),
}


def test_what_cannot_be_used_is_refused_and_later_kept_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with each_row() as row:
        for case, (name, content, field, said) in BAD.items():
            with row(case):
                (tmp_path / case).mkdir()
                files = written(tmp_path / case)
                reloading = Reloading(files.paths, lambda files=files: Certificates.read(files))  # type: ignore[misc]
                file: Path = getattr(files, name)
                if content is None:
                    file.unlink()
                else:
                    file.write_bytes(content)
                with pytest.raises(InvalidArgumentError) as caught:
                    Certificates.read(files)
                assert caught.value.field == field
                assert said in str(caught.value)
                before = reloading.value
                caplog.clear()
                assert not reloaded(reloading)
                assert reloading.value is before
                (line,) = [record for record in caplog.records if record.levelno == logging.WARNING]
                assert str(file) in line.getMessage()
                assert not reloading.reload(), "one change is one line"
                assert len(caplog.records) == 1


def test_health_notes_files_that_cannot_be_used(files: CertificateFiles, tmp_path: Path) -> None:
    """They would keep the next process from starting."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"engine {'a' * 64}\n")
    tokens.chmod(0o600)
    config = ServeConfig(auth_tokens=str(tokens), tls_cert=str(files.cert), tls_key=str(files.key))
    credentials = Credentials(config)
    assert credentials.tokens is not None
    assert credentials.certificates is not None
    assert credentials.note == ""
    good = tokens.read_text()
    tokens.write_text("junk\n")
    files.key.write_text("junk\n")
    for _ in range(NUM_LOOKS):
        credentials.tokens.reload()
        credentials.certificates.reload()
    assert "auth_tokens" in credentials.note
    assert "tls_key" in credentials.note
    tokens.write_text(good)
    for _ in range(NUM_LOOKS):
        credentials.tokens.reload()
    assert "auth_tokens" not in credentials.note


def test_a_new_certificate_is_taken_when_its_key_is_there(
    files: CertificateFiles, reloading: Reloading[Certificates], caplog: pytest.LogCaptureFixture
) -> None:
    assert not reloading.reload()
    files.cert.write_bytes(SECOND.cert)
    assert not reloaded(reloading)
    assert reloading.value.cert == FIRST.cert
    files.key.write_bytes(SECOND.key)
    with caplog.at_level(logging.INFO):
        assert reloaded(reloading)
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
    assert reloaded(reloading)
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
    for _ in range(NUM_LOOKS + 2):
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
    assert reloaded(*both)
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
    assert reloaded(reloading)
    assert reloading.value.startswith("second")


def test_a_file_that_is_being_written_is_not_used(tmp_path: Path) -> None:
    """Each part would be valid. The file that stays the same for some reloads is used."""
    file = tmp_path / "value"
    file.write_text("one two three")
    reloading = Reloading([file], file.read_text)
    with file.open("w") as writer:
        for part in ("", "four ", "five ", "six"):
            writer.write(part)
            writer.flush()
            for _ in range(NUM_LOOKS - 1):
                assert not reloading.reload()
            assert reloading.value == "one two three"
    assert reloading.reload()
    assert reloading.value == "four five six"
    assert not reloading.reload()


def test_a_write_that_begins_while_the_file_is_read_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text("old")
    begins = False

    def read() -> str:
        if begins:
            file.write_text("half of")
        return file.read_text()

    reloading = Reloading([file], read)
    file.write_text("what was new")
    for _ in range(NUM_LOOKS - 1):
        assert not reloading.reload()
    begins = True
    assert not reloading.reload()
    begins = False
    file.write_text("half of what is newest")
    assert reloading.value == "old"
    assert reloaded(reloading)
    assert reloading.value == "half of what is newest"


def test_what_was_there_before_the_write_is_no_change(tmp_path: Path) -> None:
    file, kept = tmp_path / "value", tmp_path / "kept"
    file.write_text("old")
    reloading = Reloading([file], file.read_text)
    file.rename(kept)
    file.write_text("new")
    assert not reloading.reload()
    kept.replace(file)
    assert not reloaded(reloading)
    assert reloading.value == "old"


def test_which_hosts_are_loopback() -> None:
    loopback = {"127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"}
    others = {"0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]", "example", "", "localhost.example"}
    assert {host for host in loopback | others if is_loopback(host)} == loopback
