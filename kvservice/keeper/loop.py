"""The keeper's event loop: signals, notifications, ends of processes, control requests and the time."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from typing import Any

from kvservice.keeper.control import ControlSocket
from kvservice.keeper.descriptors import MAX_DESCRIPTORS
from kvservice.keeper.keeper import Keeper
from kvservice.keeper.log import Log
from kvservice.keeper.notifications import BadNotificationError, NotifySocket
from kvservice.keeper.processes import Processes
from kvservice.keeper.settings import KeeperSettings

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
UPGRADING = signal.SIGHUP
# These signals must not end the keeper.
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE)
# More messages than these can only be a flood. The kernel queues fewer.
MAX_MESSAGES_AT_ONCE = 1000


class Loop:
    def __init__(self, settings: KeeperSettings) -> None:
        """Raises ControlSocketError."""
        self._log = Log(settings.log_level, settings.log_format)
        self._selector = selectors.DefaultSelector()
        self._signals = _SignalPipe()
        self._selector.register(self._signals, selectors.EVENT_READ, self._take_signals)
        self._notifications = NotifySocket()
        self._selector.register(self._notifications, selectors.EVENT_READ, lambda: None)
        self._processes = Processes()
        environ = os.environ | {"NOTIFY_SOCKET": self._notifications.address, "FDSTORE": str(MAX_DESCRIPTORS)}
        self._keeper = Keeper(settings, self._processes, environ, time.monotonic, self._log)
        self._control: ControlSocket | None = None
        if settings.control_path:
            keeper = self._keeper
            self._control = ControlSocket(
                settings.control_path, self._selector, keeper.status, keeper.upgrade, keeper.reset
            )

    def run(self) -> int:
        """Run until the keeper has to exit. Returns the exit status."""
        with contextlib.ExitStack() as cleanup:
            if self._control is not None:
                cleanup.callback(self._control.close)
            self._keeper.start()
            while self._keeper.exit_status is None:
                for key, _ in self._selector.select(self._keeper.wait_s()):
                    key.data()
                self._take_ends()
                self._keeper.on_time()
            return self._keeper.exit_status

    def _take_signals(self) -> None:
        for number in self._signals.received():
            if number in STOPPING:
                self._keeper.stop()
            elif number == UPGRADING:
                self._keeper.upgrade(self._log_answer)

    def _log_answer(self, answer: dict[str, Any]) -> None:
        """Log a refusal. The keeper itself logs the result of an upgrade that has begun."""
        if answer["event"] == "result" and answer["pause_s"] is None:
            self._log.warning(f"SIGHUP: {answer['message']}")

    def _take_ends(self) -> None:
        """Read the notifications, then reap. What a process has sent before its end is known when its end is."""
        ended = self._processes.reap()
        for _ in range(MAX_MESSAGES_AT_ONCE):
            try:
                notification = self._notifications.receive()
            except BadNotificationError as error:
                self._log.ignored(f"{error}: ignored")
                continue
            if notification is None:
                break
            self._keeper.notified(notification)
        for pid, ending in ended:
            self._keeper.ended(pid, ending)


class _SignalPipe:
    """Turns signals into bytes to read."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        for number in (*STOPPING, UPGRADING, *IGNORED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        return self._reading.fileno()

    def received(self) -> bytes:
        """Return the numbers of the signals that have arrived."""
        try:
            return self._reading.recv(4096)
        except BlockingIOError:
            return b""
