"""A keeper with processes that exist only in the test, and a clock that only the test advances."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvservice.keeper import Ending, Keeper, KeeperSettings, Log, Notification, Processes


@dataclass
class FakeChild:
    """A started process: its environment, and its end of the standby's channel."""

    environ: dict[str, str]
    taken: tuple[str, ...]
    channel: socket.socket | None = None
    signals: list[int] = field(default_factory=list)

    def go(self) -> dict[str, Any]:
        """Return the message with which the keeper has told the standby process to go. Its descriptors are closed."""
        assert self.channel is not None
        data, descriptors, _, _ = socket.recv_fds(self.channel, 65536, 64)
        for descriptor in descriptors:
            os.close(descriptor)
        return json.loads(data) | {"descriptors": len(descriptors)}


class FakeChildren(Processes):
    """Processes have the ids 1, 2, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.all: dict[int, FakeChild] = {}
        self.fails: OSError | None = None

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        descriptors: Mapping[str, int],
        standby: int | None = None,
    ) -> int:
        if self.fails is not None:
            raise self.fails
        assert list(command) == ["daemon"]
        channel = None if standby is None else socket.socket(fileno=os.dup(standby))
        self.all[len(self.all) + 1] = FakeChild(dict(environ), tuple(descriptors), channel)
        return len(self.all)

    def signal(self, pid: int, number: int) -> None:
        self.all[pid].signals.append(number)

    def close(self) -> None:
        for child in self.all.values():
            if child.channel is not None:
                child.channel.close()


class KeeperRig:
    def __init__(self) -> None:
        self.now = 1000.0
        self.children = FakeChildren()
        self.lines: list[str] = []
        log = Log("info", "text", lambda line: self.lines.append(line.decode()), lambda: self.now)
        settings = KeeperSettings(["daemon"], "", 30.0, "info", "text")
        self.keeper = Keeper(settings, self.children, {"NAME": "value"}, lambda: self.now, log)
        self.answers: list[dict[str, Any]] = []

    def says(self, pid: int, *assignments: str, descriptors: tuple[int, ...] = ()) -> None:
        """Deliver a notification of a process."""
        values = dict(line.split("=", 1) for line in assignments)
        self.keeper.notified(Notification(pid, values, descriptors))

    def stores(self, pid: int, name: str) -> int:
        """Have a process store a new memory file, and return the keeper's descriptor of it."""
        descriptor = os.memfd_create("stored")
        self.says(pid, "FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", descriptors=(descriptor,))
        return descriptor

    def stores_socket(self, pid: int, name: str) -> int:
        """Have a process store a listening socket, and return the keeper's descriptor of it."""
        descriptor = socket.create_server(("127.0.0.1", 0)).detach()
        self.says(pid, "FDSTORE=1", f"FDNAME={name}", "FDPOLL=0", descriptors=(descriptor,))
        return descriptor

    def ends(self, pid: int, status: int = 0, signal: int = 0) -> None:
        self.keeper.ended(pid, Ending(128 + signal if signal else status, signal))

    def passes(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.keeper.on_time()

    def serving(self) -> None:
        """Start the daemon as process 1 of version 1.0."""
        self.keeper.start()
        self.says(1, "X_KVSERVICE_VERSION=1.0")
        self.says(1, "READY=1")

    def upgrade(self) -> None:
        self.keeper.upgrade(self.answers.append)

    def close(self) -> None:
        self.keeper.stop()
        self.children.close()
        for descriptor in self.keeper.descriptors.values():
            os.close(descriptor)
