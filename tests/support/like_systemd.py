"""A stand-in for systemd with FileDescriptorStoreMax: it starts the daemon with the descriptors that it keeps."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from small_manager import SmallManager
from waiting import until

from kvservice.config import ENV_PREFIX
from kvservice.environment import missing_environment
from kvservice.keeper.processes import Processes
from kvservice.keeper.restarts import Ending


class LikeSystemd:
    """Runs `kvservice serve` on a unix socket in `directory`."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.address = f"unix:{directory}/kvservice.sock"
        given = {"tcp_address": "", "http_address": "", "unix_socket": directory / "kvservice.sock"} | options
        name = f"@kvservice-like-systemd-{os.urandom(8).hex()}"
        self._environ = os.environ | missing_environment(os.environ) | {"NOTIFY_SOCKET": name}
        self._environ |= {f"{ENV_PREFIX}{key.upper()}": str(value) for key, value in given.items()}
        self._manager = SmallManager(name)
        self._processes = Processes()
        self._kept: dict[str, int] = {}
        self.pid = 0

    def start(self) -> None:
        """Start the daemon, and keep what it stores until it is ready."""
        command = (sys.executable, "-P", "-m", "kvservice", "serve")
        self.pid = self._processes.start(command, self._environ, self._kept)
        while not self._obey():
            pass

    def end(self, number: int) -> str:
        """Send the daemon a signal. Returns how it ended."""
        self._processes.signal(self.pid, number)
        ended: list[tuple[int, Ending]] = []

        def has_ended() -> bool:
            ended.extend(self._processes.reap())
            return bool(ended)

        until(has_ended)
        while not self._manager.is_empty():
            self._obey()
        return str(ended[0][1])

    def close(self) -> None:
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
