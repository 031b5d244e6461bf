"""A stand-in for systemd with FileDescriptorStoreMax: it starts the daemon with the descriptors that it keeps."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from pathlib import Path
from typing import Any

from small_manager import SmallManager
from waiting import until

from kvservice.config import ENV_PREFIX
from kvservice.environment import missing_environment

# The number of the first descriptor that systemd passes.
FIRST_DESCRIPTOR = 3


class LikeSystemd:
    """Runs `kvservice serve` on a unix socket in `directory`."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.address = f"unix:{directory}/kvservice.sock"
        given = {"tcp_address": "", "http_address": "", "unix_socket": directory / "kvservice.sock"} | options
        name = f"@kvservice-like-systemd-{os.urandom(8).hex()}"
        self._environ = os.environ | missing_environment(os.environ) | {"NOTIFY_SOCKET": name}
        self._environ |= {f"{ENV_PREFIX}{key.upper()}": str(value) for key, value in given.items()}
        self._manager = SmallManager(name)
        self._kept: dict[str, int] = {}
        self.pid = 0

    def start(self) -> None:
        """Start the daemon, and keep what it stores until it is ready."""
        beyond = FIRST_DESCRIPTOR + len(self._kept)
        passed = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in self._kept.values()]
        about = {"LISTEN_FDS": str(len(passed)), "LISTEN_FDNAMES": ":".join(self._kept)}
        moves = [
            (os.POSIX_SPAWN_DUP2, descriptor, number) for number, descriptor in enumerate(passed, FIRST_DESCRIPTOR)
        ]
        # The shell becomes the daemon, and knows its own id before that.
        command = ["sh", "-c", 'export LISTEN_PID=$$; exec "$0" -P -m kvservice serve', sys.executable]
        self.pid = os.posix_spawn("/bin/sh", command, self._environ | about, file_actions=moves)
        for descriptor in passed:
            os.close(descriptor)
        while not self._obey():
            pass

    def end(self, number: int) -> str:
        """Send the daemon a signal. Returns how it ended."""
        os.kill(self.pid, number)
        statuses: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            statuses.append(status)
            return pid == self.pid

        until(has_ended)
        self.pid = 0
        while not self._manager.is_empty():
            self._obey()
        code = os.waitstatus_to_exitcode(statuses[-1])
        return f"status {code}" if code >= 0 else f"signal {-code}"

    def close(self) -> None:
        if self.pid:
            self.end(signal.SIGKILL)
        for descriptor in self._kept.values():
            os.close(descriptor)
        with self._manager:
            pass

    def _obey(self) -> bool:
        """Do what the next message says. Returns whether it says that the daemon is ready."""
        message = self._manager.receive()
        values = dict(line.split("=", 1) for line in message.lines)
        name = values.get("FDNAME", "")
        if "FDSTORE" in values:
            (self._kept[name],) = message.descriptors
            return False
        if "FDSTOREREMOVE" in values and name in self._kept:
            os.close(self._kept.pop(name))
        for descriptor in message.descriptors:  # of a barrier
            os.close(descriptor)
        return values.get("READY") == "1"
