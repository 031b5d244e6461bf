"""Run a daemon as a child process: for demonstrations, benchmarks and tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvservice.config import ENV_PREFIX
from kvservice.environment import missing_environment
from kvservice.errors import KVServiceError


class StartError(KVServiceError):
    """The daemon exited or did not answer in time. The message contains its log."""


class Daemon:
    """A private daemon on a unix socket in a temporary directory, as a context manager. Clients connect to `address`.

    `options` are fields of ServeConfig. By default the daemon opens no address except the socket.
    """

    def __init__(self, *, start_timeout_s: float = 60.0, **options: Any) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvservice-"))
        self._socket = Path(options.pop("unix_socket", self._directory / "kvservice.sock"))
        self._options = {"tcp_address": "", "http_address": "", "log_level": "warning"} | options
        self._options["unix_socket"] = self._socket
        self.address = f"unix://{self._socket}"
        self.log = self._directory / "daemon.log"
        self._start_timeout_s = start_timeout_s

    def __enter__(self) -> Daemon:
        options = {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in self._options.items()}
        with self.log.open("wb") as log:
            # -P keeps a checkout in the working directory from shadowing the installed package.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvservice", "serve"],
                env=os.environ | missing_environment(os.environ) | options,
                stdout=log,
                stderr=log,
            )
        try:
            self._await_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def stop(self, timeout_s: float = 40.0) -> int:
        """Send SIGTERM, and SIGKILL after `timeout_s` seconds. Returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def _await_ready(self) -> None:
        from kvservice.health import check

        deadline = time.monotonic() + self._start_timeout_s
        while not check(self.address, timeout_s=0.5):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace").strip()
                raise StartError(f"the daemon did not start: {said}")
            time.sleep(0.02)
