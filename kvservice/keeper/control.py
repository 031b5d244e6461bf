"""The control socket beside the daemon's unix socket: one line of JSON asks, lines of JSON answer.

    {"command": "status"}  ──▶ {"event": "result", "ok": true, "pid": ..., "restarts": ..., ...}
    {"command": "reset"}   ──▶ {"event": "result", "ok": true, "message": ...}
    {"command": "upgrade"} ──▶ {"event": "progress", "message": ...} ... {"event": "result", "ok": ..., "message": ...}

Its mode is 0600, so only the daemon's user and root may connect.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from kvservice.keeper.private_paths import listen_at, remove_own

MAX_REQUEST_BYTES = 1024
MAX_CONNECTIONS = 8
MAX_ANSWER_BYTES = 1 << 16


class ControlSocketError(Exception):
    """The control socket cannot be opened, or the keeper does not answer."""


class ControlSocket:
    """The keeper's side. `selectors` data are callables, which the loop calls when their descriptor is readable."""

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        status: Callable[[], dict[str, Any]],
        upgrade: Callable[[Report], None],
        reset: Callable[[], str],
    ) -> None:
        """Listen at `path`, in place of a socket there that no process serves. Raises ControlSocketError."""
        self._path, self._selector = path, selector
        self._status, self._upgrade, self._reset = status, upgrade, reset
        self._connections: set[socket.socket] = set()
        try:
            self._listening = listen_at(path, MAX_CONNECTIONS)
            self._made = os.lstat(path)
        except OSError as error:
            raise ControlSocketError(f"cannot listen on {path}: {error.strerror}") from None
        self._listening.setblocking(False)
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        for connection in [*self._connections]:
            self._drop(connection)
        self._selector.unregister(self._listening)
        self._listening.close()
        remove_own(self._path, self._made)

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # the client is gone, or there are no descriptors left
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: socket.socket) -> None:
        """Answer the request, which comes in one piece. A connection is for one request."""
        try:
            data = connection.recv(MAX_REQUEST_BYTES)
            command = json.loads(data)["command"] if data else None
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            command = None
        if command == "status":
            self._send(connection, {"event": "result", "ok": True, **self._status()})
        elif command == "reset":
            self._send(connection, {"event": "result", "ok": True, "message": self._reset()})
        elif command == "upgrade":
            self._upgrade(lambda answer: self._send(connection, answer))
        else:
            self._drop(connection)

    def _send(self, connection: socket.socket, answer: dict[str, Any]) -> None:
        """Send one line. The connection ends with a result, or if the client does not read."""
        if connection not in self._connections:
            return
        try:
            connection.sendall(json.dumps(answer).encode() + b"\n")
        except OSError:
            self._drop(connection)
            return
        if answer["event"] == "result":
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection)
            connection.close()


def ask(path: str, command: str, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield the answers of the keeper, the result last. Raises ControlSocketError if there is no keeper, or no answer
    for `timeout_s` seconds."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
            connection.sendall(json.dumps({"command": command}).encode())
            lines = connection.makefile("rb")
            while line := lines.readline(MAX_ANSWER_BYTES):
                answer = json.loads(line)
                yield answer
                if answer["event"] == "result":
                    return
        except TimeoutError:
            raise ControlSocketError(f"no answer for {timeout_s:g} s") from None
        except (BrokenPipeError, ConnectionResetError):
            pass
        except OSError as error:
            raise ControlSocketError(f"no keeper at {path}: {error.strerror}") from None
    raise ControlSocketError("the keeper ended, or has too many connections")


# ---- one upgrade: its standby process, its phase, and the reports to the client that asked for it


# A function that sends an answer, a JSON object, to a client of the control socket.
Report: TypeAlias = Callable[[dict[str, Any]], None]

# The limit on the time that the new process needs to import its modules and to check the state.
PREPARE_S = 120.0


class UpgradePhase(Enum):
    PREPARING = "the new process starts"
    DRAINING = "the old process drains"
    TAKING_OVER = "the new process takes over"


@dataclass(frozen=True)
class Upgraded:
    """The result of an upgrade. `message` is for a person. `pause_s` is the time from the beginning of the drain until
    the new process served."""

    ok: bool
    message: str
    pause_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"event": "result", "ok": self.ok, "message": self.message, "pause_s": self.pause_s}


class Upgrade:
    def __init__(self, pid: int, channel: socket.socket, old_version: str, now: float, report: Report) -> None:
        """`pid` is the standby process and `channel` leads to it. `now` is the time of a monotonic clock in seconds."""
        self.pid, self.channel, self.old_version = pid, channel, old_version
        self.phase = UpgradePhase.PREPARING
        self.deadline: float | None = now + PREPARE_S
        self.refusal = ""
        # The end of the old process, if it was not in order.
        self.disorder = ""
        self._report = report
        self._drained_from: float | None = None
        self._progress()

    def drain(self, now: float, timeout_s: float) -> None:
        """Note that the old process has been asked to hand over."""
        self._drained_from, self.deadline = now, now + timeout_s
        self._enter(UpgradePhase.DRAINING)

    def take_over(self) -> None:
        """Note that the old process has ended, and that the new one knows."""
        self.deadline = None
        self.channel.close()
        self._enter(UpgradePhase.TAKING_OVER)

    def served(self, now: float, version: str) -> Upgraded:
        """The new process serves. Returns the result, which has been reported."""
        assert self._drained_from is not None
        pause_s = now - self._drained_from
        message = f"upgraded {self.old_version} -> {version}, paused {pause_s:.2f} s"
        if self.disorder:
            message += f"; {self.disorder}, so its state was taken over as after a crash"
        return self._end(Upgraded(True, message, round(pause_s, 3)))

    def failed(self, reason: str) -> Upgraded:
        """The upgrade has come to nothing. Returns the result, which has been reported."""
        self.channel.close()
        return self._end(Upgraded(False, self.refusal or reason))

    def _enter(self, phase: UpgradePhase) -> None:
        self.phase = phase
        self._progress()

    def _progress(self) -> None:
        self._report({"event": "progress", "message": self.phase.value})

    def _end(self, result: Upgraded) -> Upgraded:
        self._report(result.to_json())
        return result
