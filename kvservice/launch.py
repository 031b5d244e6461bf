"""Run a daemon as a child process: for demonstrations, benchmarks and tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvservice.config import ENV_PREFIX
from kvservice.environment import missing_of_daemon
from kvservice.errors import KVServiceError
from kvservice.keeper.control import ask
from kvservice.keeper.notify import MANAGER_VARIABLES
from kvservice.keeper.private_paths import control_path
from kvservice.owned import OwnedFolder, OwnedProcess

# A socket's path has at most 107 bytes. The longest below the parent is /kvservice-XXXXXXXX/kvservice.sock.keeper.
_MAX_PARENT_BYTES = 107 - 41


class StartError(KVServiceError):
    """The daemon exited or did not answer in time. The message contains its log."""


class Daemon:
    """A private daemon on a unix socket in a temporary directory, as a context manager. Clients connect to `address`.

    `options` are fields of ServeConfig. By default the daemon opens no address except the socket, and has no keeper:
    with keeper=True, `process` is the keeper. Daemon and directory end with this process, also when it is killed, or
    when nothing refers to this object. In a fork of this process the object does nothing.
    """

    def __init__(self, *, start_timeout_s: float = 60.0, **options: Any) -> None:
        given = options.pop("unix_socket", None)
        sockets = [] if given is None else [Path(f"{given}{suffix}") for suffix in ("", ".fds", ".own", ".keeper")]
        self._folder = OwnedFolder("kvservice-", _parent(), sockets)
        self._socket = sockets[0] if sockets else self._folder.path / "kvservice.sock"
        self._options = {"tcp_address": "", "http_address": "", "log_level": "warning", "keeper": False} | options
        self._options["unix_socket"] = self._socket
        self.address = f"unix://{self._socket}"
        self.log = self._folder.path / "daemon.log"
        self._start_timeout_s = start_timeout_s

    def __enter__(self) -> Daemon:
        options = {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in self._options.items()}
        with self.log.open("wb") as log:
            # -P keeps a checkout in the working directory from shadowing the installed package.
            self.process = OwnedProcess(
                [sys.executable, "-P", "-m", "kvservice", "serve"],
                env=_environment_without_manager() | options,
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
        if self.process.is_owned:
            self.stop()
            self._folder.remove()

    def daemon_pid(self) -> int:
        """Return the id of the daemon's process. Raises StartError if its keeper is about to start it."""
        if not self._options["keeper"]:
            return self.process.pid
        (status,) = ask(control_path(str(self._socket)), "status", self._start_timeout_s)
        if status["pid"] is None:
            raise StartError("the daemon's process has ended")
        return int(status["pid"])

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
        # A look at the path costs almost nothing. A check costs a channel, at the expense of the daemon that starts.
        while not (self._socket.is_socket() and check(self.address, timeout_s=0.5)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                said = self.log.read_text(errors="replace").strip()
                raise StartError(f"the daemon did not start: {said}")
            time.sleep(0.02)


def _parent() -> str:
    """Return the folder for temporary files, or /tmp if the paths of sockets in it would be too long."""
    parent = tempfile.gettempdir()
    return parent if len(os.fsencode(parent)) <= _MAX_PARENT_BYTES else "/tmp"


def _environment_without_manager() -> dict[str, str]:
    """Return the environment of this process, but for what it says about a manager such as systemd."""
    environ = os.environ | missing_of_daemon(os.environ)
    return {name: value for name, value in environ.items() if name not in MANAGER_VARIABLES}
