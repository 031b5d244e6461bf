"""Messages about the certificates that the daemon is started with."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority, Signed
from each_row import each_row
from refused_starts import refusals_to_serve
from secure_daemon import Secured
from small_pool import SMALL_POOL
from waiting import PATIENCE_S

from kvservice.config import ServeConfig
from kvservice.config_sources import load_config
from kvservice.errors import InvalidArgumentError
from kvservice.launch import Daemon
from kvservice.server.rpc.callers import Credentials

AUTHORITY = Authority()
EXPIRED = "clients will refuse it: certificate has expired"


def configured(directory: Path, signed: Signed) -> dict[str, Any]:
    cert, key = signed.write(directory, "tls")
    return {"tcp_address": "127.0.0.1:0", "tls_cert": cert, "tls_key": key}


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    mismatched = Signed(AUTHORITY.sign("daemon").cert, AUTHORITY.sign("other").key)
    (said,) = refusals_to_serve(configured(tmp_path, mismatched))
    files = f"{tmp_path}/tls.crt and {tmp_path}/tls.key"
    assert f"tls_cert: {files}: certificate and key cannot be used: KEY_VALUES_MISMATCH" in said


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Although nobody writes to it. The daemon would wait for ever."""
    os.mkfifo(pipe := tmp_path / "pipe")
    files = {name: str(one) for name, one in configured(tmp_path, AUTHORITY.sign("daemon")).items()}
    with pytest.raises(InvalidArgumentError, match=f"config: {pipe}: is not a regular file"):
        load_config({}, {}, pipe)
    with each_row() as row:
        for name in ("tls_cert", "tls_key", "tls_client_ca"):
            with row(name), pytest.raises(InvalidArgumentError, match=f"{name}: {pipe}: is not a regular file"):
                Credentials(ServeConfig(**files | {name: str(pipe)}))


def test_a_certificate_that_has_expired_is_warned_of(tmp_path: Path, encrypted: Secured) -> None:
    with Daemon(**SMALL_POOL | configured(tmp_path, AUTHORITY.sign("daemon", expired=True))) as daemon:
        assert f"{tmp_path}/tls.crt: {EXPIRED}" in daemon.log.read_text()
    assert EXPIRED not in encrypted.daemon.log.read_text()


def test_without_files_nothing_is_looked_at() -> None:
    """A loop that looks all the same would not end in time."""

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await Credentials(ServeConfig()).keep_current(lambda: None, lambda: None)

    asyncio.run(run())
