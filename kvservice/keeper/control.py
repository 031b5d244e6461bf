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
from typing import Any

from kvservice.keeper.private_paths import listen_at, remove_own
from kvservice.keeper.upgrade import Report

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
